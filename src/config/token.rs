//! Text to tokens with positions.
//!
//! `,` `:` `[` `]` stand alone; everything else between white space is a word. A word in double
//! quotes may hold anything but a double quote.

use super::error::{ConfigError, Span};

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Comma,
    Colon,
    Open,
    Close,
    Word,
    Quoted,
}

/// One token and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    /// The word without its quotes; the character itself for punctuation.
    pub(super) text: &'a str,
    pub(super) span: Span,
}

impl Token<'_> {
    pub(super) fn is_word(&self) -> bool {
        matches!(self.kind, Kind::Word | Kind::Quoted)
    }
}

/// Cuts the text.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ConfigError> {
    let mut found = Vec::new();
    let mut rest = text.char_indices().peekable();
    while let Some((start, c)) = rest.next() {
        let kind = match c {
            ',' => Kind::Comma,
            ':' => Kind::Colon,
            '[' => Kind::Open,
            ']' => Kind::Close,
            '"' => {
                let Some((end, _)) = rest.find(|(_, c)| *c == '"') else {
                    let span = Span { at: start, len: text.len() - start };
                    return Err(ConfigError::new("", span, "a closing double quote"));
                };
                let span = Span { at: start, len: end + 1 - start };
                found.push(Token { kind: Kind::Quoted, text: &text[start + 1..end], span });
                continue;
            }
            c if c.is_whitespace() => continue,
            _ => {
                let mut end = start + c.len_utf8();
                while let Some((at, c)) =
                    rest.next_if(|(_, c)| !c.is_whitespace() && !",:[]\"".contains(*c))
                {
                    end = at + c.len_utf8();
                }
                let span = Span { at: start, len: end - start };
                found.push(Token { kind: Kind::Word, text: &text[start..end], span });
                continue;
            }
        };
        let span = Span { at: start, len: 1 };
        found.push(Token { kind, text: &text[start..=start], span });
    }
    Ok(found)
}
