//! Several sentences about one thing, of which the most important ones stand alone where there is little
//! room.

use std::fmt;

use serde::{Serialize, Serializer};

/// The sentences of a result, in the order in which they are read. In JSON they are one string.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sentences(Vec<Sentence>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sentence {
    text: String,
    /// Whether it is shown where there is little room.
    is_main: bool,
}

impl Sentences {
    /// Returns one sentence, which is shown everywhere.
    pub fn one(text: impl Into<String>) -> Self {
        Self::default().and(text)
    }

    /// Adds a sentence that is shown everywhere. An empty one is left out.
    #[must_use]
    pub fn and(self, text: impl Into<String>) -> Self {
        self.with(text.into(), true)
    }

    /// Adds a sentence that is shown where there is room. An empty one is left out.
    #[must_use]
    pub fn and_more(self, text: impl Into<String>) -> Self {
        self.with(text.into(), false)
    }

    fn with(mut self, text: String, is_main: bool) -> Self {
        if !text.is_empty() {
            self.0.push(Sentence { text, is_main });
        }
        self
    }

    /// Adds other sentences.
    #[must_use]
    pub fn then(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// Shows all sentences only where there is room.
    #[must_use]
    pub fn as_more(mut self) -> Self {
        self.0.iter_mut().for_each(|one| one.is_main = false);
        self
    }

    /// Returns true if there is no sentence.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the sentences that are shown where there is little room.
    pub fn main(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|one| one.is_main).map(|one| one.text.as_str())
    }

    /// Returns the other sentences.
    pub fn more(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|one| !one.is_main).map(|one| one.text.as_str())
    }
}

impl fmt::Display for Sentences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Sentence { text, .. }) in self.0.iter().enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}{text}")?;
        }
        Ok(())
    }
}

impl Serialize for Sentences {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
