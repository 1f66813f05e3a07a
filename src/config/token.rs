//! Splits the text into tokens with positions.
//!
//! Each of `,` `:` `[` `]` is a token. Any other text between white space is a word. A word in double
//! quotes may contain any character except a double quote.

use super::error::{ConfigError, Span};

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Comma,
    Colon,
    Open,
    Close,
    Word,
    Quoted,
}

/// A token and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    /// The word without its quotes, or the punctuation character.
    pub(super) text: &'a str,
    pub(super) span: Span,
}

impl Token<'_> {
    pub(super) fn is_word(&self) -> bool {
        matches!(self.kind, Kind::Word | Kind::Quoted)
    }
}

/// Splits the text into tokens.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ConfigError> {
    let mut found = Vec::new();
    let mut rest = text.char_indices().peekable();
    while let Some((start, c)) = rest.next() {
        let (kind, end) = match c {
            ',' => (Kind::Comma, start + 1),
            ':' => (Kind::Colon, start + 1),
            '[' => (Kind::Open, start + 1),
            ']' => (Kind::Close, start + 1),
            '"' => {
                let Some((end, _)) = rest.find(|(_, c)| *c == '"') else {
                    let span = Span { at: start, len: text.len() - start };
                    return Err(ConfigError::new("", span, "a closing double quote"));
                };
                (Kind::Quoted, end + 1)
            }
            c if c.is_whitespace() => continue,
            _ => {
                let mut end = start + c.len_utf8();
                while let Some((at, c)) =
                    rest.next_if(|(_, c)| !c.is_whitespace() && !",:[]\"".contains(*c))
                {
                    end = at + c.len_utf8();
                }
                (Kind::Word, end)
            }
        };
        let quote = usize::from(kind == Kind::Quoted);
        let span = Span { at: start, len: end - start };
        found.push(Token { kind, text: &text[start + quote..end - quote], span });
    }
    Ok(found)
}
