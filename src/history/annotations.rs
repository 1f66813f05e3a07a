//! Annotations: keys and values that a program records, such as the begin and end of a training step.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::clock::Moment;
use super::record::History;

/// Keys and values that the program recorded, with the time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Annotation {
    /// Microseconds since 1970.
    pub time_us: u64,
    /// Keys and values. PyTorch's annotations have two keys: `name`, and `stage`, whose value is `START`
    /// or `END`.
    pub words: Vec<(String, String)>,
}

/// The newest annotations, at most [`MAX`](Self::MAX).
#[derive(Debug, Default)]
pub(super) struct Annotations(Mutex<VecDeque<Annotation>>);

impl Annotations {
    const MAX: usize = 65_536;

    pub(super) fn all(&self) -> Vec<Annotation> {
        self.0.lock().iter().cloned().collect()
    }

    pub(super) fn clear(&self) {
        drop(std::mem::take(&mut *self.0.lock()));
    }
}

/// An annotated region. Records the end of the region when dropped. See [`History::annotated`].
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
    /// Records keys and values with the current time, if recording is on. Snapshots list the newest
    /// 65,536 annotations under `external_annotations`, as snapshots of PyTorch do. May wait for a lock
    /// that is held only briefly.
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

    /// Records the start of a region now, and its end when the result is dropped.
    pub fn annotated<'a>(&'a self, name: &'a str) -> AnnotationScope<'a> {
        self.annotate([("name", name), ("stage", "START")]);
        AnnotationScope { history: self, name }
    }
}
