//! What a program says about its own course: where a step begins and ends.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::clock::Moment;
use super::record::History;

/// Something that the program said, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Annotation {
    /// When, in microseconds since 1970.
    pub time_us: u64,
    /// Keys and values. PyTorch's have `name`, and `stage` with `START` or `END`.
    pub words: Vec<(String, String)>,
}

/// The newest annotations.
#[derive(Debug, Default)]
pub(super) struct Annotations(Mutex<VecDeque<Annotation>>);

impl Annotations {
    /// So many are kept.
    const MAX: usize = 65_536;

    pub(super) fn all(&self) -> Vec<Annotation> {
        self.0.lock().iter().cloned().collect()
    }

    pub(super) fn clear(&self) {
        drop(std::mem::take(&mut *self.0.lock()));
    }
}

/// What has begun, until it is dropped. See [`History::annotated`].
#[derive(Debug)]
#[must_use = "it ends when this is dropped"]
pub struct AnnotationScope<'a> {
    history: &'a History,
    name: &'a str,
}

impl Drop for AnnotationScope<'_> {
    fn drop(&mut self) {
        self.history.annotate([("name", self.name), ("stage", "END")]);
    }
}

impl History {
    /// Keeps keys and values with the time, while anything is recorded. Snapshots list the newest
    /// 65,536 under `external_annotations`, as PyTorch's do. Never waits long.
    pub fn annotate<'w>(&self, words: impl IntoIterator<Item = (&'w str, &'w str)>) {
        if !self.is_on() {
            return;
        }
        let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let words = words.into_iter().map(owned).collect();
        let annotation = Annotation { time_us: Moment::now().unix_us(), words };
        let mut all = self.annotations.0.lock();
        let oldest = if all.len() == Annotations::MAX { all.pop_front() } else { None };
        all.push_back(annotation);
        drop(all);
        drop(oldest);
    }

    /// Says that something begins now and, when the answer is dropped, that it has ended.
    pub fn annotated<'a>(&'a self, name: &'a str) -> AnnotationScope<'a> {
        self.annotate([("name", name), ("stage", "START")]);
        AnnotationScope { history: self, name }
    }
}
