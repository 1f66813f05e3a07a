//! Parses tokens to entries, and entries to settings. An entry is a key and its value, which is a word
//! or a list.

use super::error::{ConfigError, Span};
use super::keys::{KeyTable, Known};
use super::read::Reader;
use super::settings::Settings;
use super::token::{Kind, Token, tokens};
use crate::size::MIB;

/// The longest text that is parsed.
pub(super) const TEXT_MAX_BYTES: usize = 64 * 1024;
/// The most nested brackets.
const NESTING_MAX: usize = 8;

/// One entry `key:value`.
#[derive(Debug)]
pub(super) struct Entry<'t, 'k> {
    pub(super) key: Known<'k>,
    pub(super) key_span: Span,
    pub(super) value: Value<'t>,
}

/// The value of an entry.
#[derive(Debug)]
pub(super) struct Value<'t> {
    /// The word, or the tokens between the brackets.
    pub(super) tokens: Vec<Token<'t>>,
    pub(super) is_list: bool,
    pub(super) span: Span,
    /// The value as written, but without quotes around a word.
    pub(super) text: &'t str,
}

/// Parses the entries of a text, in order.
pub(super) fn entries<'t, 'k>(
    text: &'t str,
    table: &'k KeyTable,
) -> Result<Vec<Entry<'t, 'k>>, ConfigError> {
    if text.len() > TEXT_MAX_BYTES {
        let span = Span { at: TEXT_MAX_BYTES, len: 0 };
        return Err(ConfigError::new("", span, format!("at most {TEXT_MAX_BYTES} bytes")));
    }
    let tokens = tokens(text)?;
    let mut parser = Parser { text, tokens: &tokens, at: 0 };
    let mut found = Vec::new();
    while parser.at < tokens.len() {
        found.push(parser.entry(table)?);
        if parser.at < tokens.len() {
            let key = found.last().map_or("", |entry: &Entry<'_, '_>| entry.key.name());
            parser.expect(key, Kind::Comma, "a comma before the next key")?;
        }
    }
    Ok(found)
}

/// Applies all entries. Applies `large_segment_size_mb` first, wherever it occurs, because the ranges
/// of other keys depend on it.
pub(super) fn apply(settings: &mut Settings, entries: &[Entry<'_, '_>]) -> Result<(), ConfigError> {
    let (first, rest): (Vec<_>, Vec<_>) =
        entries.iter().partition(|entry| entry.key.name() == "large_segment_size_mb");
    for entry in first.into_iter().chain(rest) {
        let value = &entry.value;
        match &entry.key {
            Known::BuiltIn(key) => {
                let segment_mib = settings.large_segment_bytes / MIB;
                let reader = Reader { key: key.name, range: key.range, value, segment_mib };
                (key.read)(settings, &reader)?;
            }
            Known::Extra(key) if !key.accepts(value.text, value.is_list) => {
                return Err(ConfigError::new(key.name(), value.span, key.range()));
            }
            Known::Extra(key) => {
                settings.extra.retain(|(known, _)| known != key.name());
                settings.extra.push((key.name().to_owned(), value.text.to_owned()));
            }
        }
    }
    check_fills(settings, entries)
}

/// Returns an error if blocks of `backend:cpu` would be filled with both zeros and junk.
fn check_fills(settings: &Settings, entries: &[Entry<'_, '_>]) -> Result<(), ConfigError> {
    if !(settings.cpu.zero_fill && settings.cpu.junk_fill) {
        return Ok(());
    }
    let fill =
        |entry: &&Entry<'_, '_>| matches!(entry.key.name(), "cpu_zero_fill" | "cpu_junk_fill");
    let last = entries.iter().rev().find(fill);
    let (name, span) = last
        .map_or(("cpu_junk_fill", Span::default()), |entry| (entry.key.name(), entry.value.span));
    Err(ConfigError::new(name, span, "False, because the other fill is True"))
}

struct Parser<'t, 'p> {
    text: &'t str,
    tokens: &'p [Token<'t>],
    at: usize,
}

impl<'t> Parser<'t, '_> {
    fn next(&mut self) -> Option<Token<'t>> {
        let token = self.tokens.get(self.at).copied();
        self.at += 1;
        token
    }

    /// Returns the end of the last token, as the position of an error about missing text.
    fn end(&self) -> Span {
        let before = self.tokens.get(self.at.saturating_sub(2)).or(self.tokens.last());
        Span { at: before.map_or(0, |token| token.span.at + token.span.len), len: 0 }
    }

    fn expect(&mut self, key: &str, kind: Kind, what: &str) -> Result<(), ConfigError> {
        match self.next() {
            Some(token) if token.kind == kind => Ok(()),
            Some(token) => Err(ConfigError::new(key, token.span, what)),
            None => Err(ConfigError::new(key, self.end(), what)),
        }
    }

    fn entry<'k>(&mut self, table: &'k KeyTable) -> Result<Entry<'t, 'k>, ConfigError> {
        let token = self.next().ok_or_else(|| ConfigError::new("", self.end(), "a key"))?;
        if token.kind != Kind::Word {
            return Err(ConfigError::new("", token.span, "a key"));
        }
        let key = table.find(token.text, token.span)?;
        self.expect(key.name(), Kind::Colon, "a colon and a value behind the key")?;
        let value = self.value(key.name())?;
        // A second colon means that the value is a list, and that its brackets are missing.
        if let Known::BuiltIn(known) = key
            && let Some(list) = known.range.find('[')
            && !value.is_list
            && self.tokens.get(self.at).is_some_and(|token| token.kind == Kind::Colon)
        {
            let what = format!("a list in brackets, as {}", &known.range[list..]);
            return Err(ConfigError::new(known.name, value.span, what));
        }
        Ok(Entry { key, key_span: token.span, value })
    }

    fn value(&mut self, key: &str) -> Result<Value<'t>, ConfigError> {
        let missing = |span| ConfigError::new(key, span, "a value");
        let first = self.next().ok_or_else(|| missing(self.end()))?;
        match first.kind {
            Kind::Word | Kind::Quoted => Ok(Value {
                tokens: vec![first],
                is_list: false,
                span: first.span,
                text: first.text,
            }),
            Kind::Open => self.list(key, first),
            Kind::Comma | Kind::Colon | Kind::Close => Err(missing(first.span)),
        }
    }

    fn list(&mut self, key: &str, open: Token<'t>) -> Result<Value<'t>, ConfigError> {
        let start = self.at;
        let mut depth = 1;
        loop {
            let Some(token) = self.next() else {
                return Err(ConfigError::new(key, open.span, "a closing bracket for this one"));
            };
            match token.kind {
                Kind::Open if depth == NESTING_MAX => {
                    let what = format!("at most {NESTING_MAX} brackets in one another");
                    return Err(ConfigError::new(key, token.span, what));
                }
                Kind::Open => depth += 1,
                Kind::Close => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                let end = token.span.at + 1;
                return Ok(Value {
                    tokens: self.tokens[start..self.at - 1].to_vec(),
                    is_list: true,
                    span: Span { at: open.span.at, len: end - open.span.at },
                    text: &self.text[open.span.at..end],
                });
            }
        }
    }
}

/// Returns the value's only token, or an error if the value is not one word.
pub(super) fn word<'v, 't>(
    key: &str,
    value: &'v Value<'t>,
    range: &str,
) -> Result<&'v Token<'t>, ConfigError> {
    match value.tokens.as_slice() {
        [token] if !value.is_list => Ok(token),
        _ => Err(ConfigError::new(key, value.span, range)),
    }
}

/// Returns the pairs of a list such as `[name:word,name:word]`, or an error for any other value.
pub(super) fn pairs<'v, 't>(
    key: &str,
    value: &'v Value<'t>,
    range: &str,
) -> Result<Vec<(&'v Token<'t>, &'v Token<'t>)>, ConfigError> {
    let mut found = Vec::new();
    let mut rest = value.tokens.as_slice();
    while !rest.is_empty() {
        let (name, word) = match rest {
            [name, colon, word, ..]
                if name.is_word() && colon.kind == Kind::Colon && word.is_word() =>
            {
                (name, word)
            }
            [first, ..] => return Err(ConfigError::new(key, first.span, range)),
            [] => break,
        };
        found.push((name, word));
        rest = match &rest[3..] {
            [] => &[],
            [comma, more @ ..] if comma.kind == Kind::Comma => more,
            [other, ..] => {
                return Err(ConfigError::new(key, other.span, "a comma or a closing bracket"));
            }
        };
    }
    Ok(found)
}
