//! What is wrong with a configuration string, where, and what was meant.

use std::fmt;

use thiserror::Error;
use unicode_width::UnicodeWidthChar;

use super::keys::nearest_of;

/// A piece of the text, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub at: usize,
    /// How long it is.
    pub len: usize,
}

/// A configuration string that could not be used. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ConfigError {
    /// The key it is about; empty when there is none.
    pub key: String,
    /// Where the trouble is.
    pub span: Span,
    /// What would have been right.
    pub expected: String,
    /// What was probably meant: the known key, or legal value, that is most like what stands there.
    pub nearest: Option<String>,
}

/// How much of a long line `caret` shows on each side of the trouble.
const WINDOW_CHARS: usize = 60;

impl ConfigError {
    pub(super) fn new(key: &str, span: Span, expected: impl Into<String>) -> Self {
        Self { key: key.to_owned(), span, expected: expected.into(), nearest: None }
    }

    /// The same with the word of `known` that `said` is most like, unless it is like none.
    pub(super) fn or_nearest(mut self, said: &str, known: &[&str]) -> Self {
        self.nearest = nearest_of(said, known.iter().copied());
        self
    }

    /// Byte offset of the trouble in the text.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.span.at
    }

    /// The text with a caret under the trouble, for a terminal. Long lines are shown in part; control
    /// characters, and those that have no place of their own in a line, as `?`. Carets are counted
    /// in columns, of which wide characters take two.
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

/// The columns that characters take in a terminal.
fn columns(chars: impl Iterator<Item = char>) -> usize {
    chars.filter_map(UnicodeWidthChar::width).sum()
}

/// The character, or `?` for one that would move or hide others: control characters, joiners,
/// changes of direction, selectors. Accents stay on the letter before them.
fn visible(c: char) -> char {
    let hidden = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
    if hidden || c.width().is_none() { '?' } else { c }
}

/// The text as a terminal may have it: in one line, with `?` for what would move or hide other characters.
#[cfg(feature = "cli")]
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(visible).collect()
}

/// The last character boundary at or before `at`.
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

/// Something that is legal and probably not meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigWarning {
    /// A key stands twice; the last one counts.
    Repeated {
        /// The key.
        key: String,
        /// Byte offset of the one that does not count.
        earlier_at: usize,
        /// Byte offset of the one that counts.
        last_at: usize,
    },
    /// Two environment variables are set and say different things.
    Disagreement {
        /// The one that counts.
        used: &'static str,
        /// The one that does not.
        ignored: &'static str,
    },
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated { key, earlier_at, last_at } => {
                write!(
                    f,
                    "{key} stands at byte {earlier_at} and at byte {last_at}; the last counts"
                )
            }
            Self::Disagreement { used, ignored } => {
                write!(f, "{used} and {ignored} are both set and differ; {used} counts")
            }
        }
    }
}
