//! Errors of configuration strings: the key, the position, the expected value and a suggestion.

use std::fmt;

use thiserror::Error;
use unicode_width::UnicodeWidthChar;

use super::keys::nearest_of;

/// A range of the text, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The offset of the first byte.
    pub at: usize,
    /// The number of bytes.
    pub len: usize,
}

/// An invalid configuration string. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ConfigError {
    /// The key. Empty if the error belongs to no key.
    pub key: String,
    /// The position of the error.
    pub span: Span,
    /// A description of the expected text.
    pub expected: String,
    /// The known key, or valid value, that is most similar to the text.
    pub nearest: Option<String>,
}

/// The most characters that `caret` shows on each side of the error.
const WINDOW_CHARS: usize = 60;

impl ConfigError {
    pub(super) fn new(key: &str, span: Span, expected: impl Into<String>) -> Self {
        Self { key: key.to_owned(), span, expected: expected.into(), nearest: None }
    }

    /// Adds the most similar word of `known` as a suggestion, unless none is similar.
    pub(super) fn or_nearest(mut self, given: &str, known: &[&str]) -> Self {
        self.nearest = nearest_of(given, known.iter().copied());
        self
    }

    /// Returns the byte offset of the error in the text.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.span.at
    }

    /// Returns the text with a caret under the error, for a terminal. Of a long line, the part around
    /// the error is shown. Control characters, and characters without a column of their own, are shown
    /// as `?`. Carets are positioned by columns: a wide character has two.
    #[must_use]
    pub fn caret(&self, text: &str) -> String {
        let at = floor(text, self.span.at);
        let end = floor(text, self.span.at.saturating_add(self.span.len)).max(at);
        let clean = |part: &str| -> Vec<char> { part.chars().map(visible).collect() };
        let (before, word, behind) =
            (clean(&text[..at]), clean(&text[at..end]), clean(&text[end..]));
        let skipped = before.len().saturating_sub(WINDOW_CHARS);
        let mut line = String::from(if skipped > 0 { "..." } else { "" });
        line.extend(&before[skipped..]);
        let indent = columns(line.chars());
        let shown = word.len().min(WINDOW_CHARS);
        line.extend(&word[..shown]);
        line.extend(behind.iter().take(WINDOW_CHARS.saturating_sub(word.len() - shown)));
        if behind.len() > WINDOW_CHARS || shown < word.len() {
            line.push_str("...");
        }
        let carets = columns(word[..shown].iter().copied()).max(1);
        format!("{line}\n{}{}", " ".repeat(indent), "^".repeat(carets))
    }
}

/// Returns the number of terminal columns of the characters.
fn columns(chars: impl Iterator<Item = char>) -> usize {
    chars.filter_map(UnicodeWidthChar::width).sum()
}

/// Returns the character, or `?` for control characters and invisible characters of formatting: joiners,
/// spaces without a width, changes of direction, variation selectors and the like. Accents also have no
/// width of their own, but are visible on the letter before them, so they are kept.
fn visible(c: char) -> char {
    let hidden = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
    if hidden || c.width().is_none() { '?' } else { c }
}

/// Returns the text in one line that is safe for a terminal. Characters that would move or hide others
/// become `?`.
pub fn shown(text: &str) -> String {
    text.chars().map(visible).collect()
}

/// Returns the last character boundary at or before `at`.
fn floor(text: &str, at: usize) -> usize {
    let at = at.min(text.len());
    (0..=at).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0)
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            let shown: String = self.key.chars().take(WINDOW_CHARS).collect();
            let more = if shown.len() < self.key.len() { "..." } else { "" };
            write!(f, "{}{more}: ", shown.escape_debug())?;
        }
        write!(f, "expected {} (byte {})", self.expected, self.span.at)?;
        match &self.nearest {
            Some(nearest) => write!(f, "; did you mean {nearest}?"),
            None => Ok(()),
        }
    }
}

/// A valid but probably unintended configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigWarning {
    /// A key occurs twice. The last occurrence is used.
    Repeated {
        /// The key.
        key: String,
        /// The byte offset of the ignored occurrence.
        earlier_at: usize,
        /// The byte offset of the used occurrence.
        last_at: usize,
    },
    /// Two environment variables are set to different texts.
    Disagreement {
        /// The variable that is used.
        used: &'static str,
        /// The variable that is ignored.
        ignored: &'static str,
    },
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated { key, earlier_at, last_at } => {
                write!(
                    f,
                    "{key} is set at byte {earlier_at} and at byte {last_at}; the last value is used"
                )
            }
            Self::Disagreement { used, ignored } => {
                write!(f, "{used} and {ignored} are both set and differ; {used} is used")
            }
        }
    }
}
