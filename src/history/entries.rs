//! Entries as of one moment, merged in the order of their times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::event::Entry;

/// What one shard of a history has, oldest first.
#[derive(Clone, Debug)]
pub(super) struct Row {
    chunks: Vec<Arc<Vec<Entry>>>,
}

impl Row {
    /// Chunks one after the other. Each is in order; an entry that came late may belong into the one before.
    pub(super) fn new(chunks: impl Iterator<Item = Arc<Vec<Entry>>>) -> Self {
        let mut own = Self { chunks: Vec::new() };
        for chunk in chunks {
            let Some(before) = own.chunks.last_mut() else {
                own.chunks.push(chunk);
                continue;
            };
            let moment = |entry: Option<&Entry>| entry.map(|entry| entry.moment);
            if moment(before.last()) <= moment(chunk.first()) {
                own.chunks.push(chunk);
                continue;
            }
            let mut both: Vec<_> = before.iter().chain(chunk.iter()).cloned().collect();
            both.sort_by_key(|entry| entry.moment);
            *before = Arc::new(both);
        }
        own
    }

    fn len(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len()).sum()
    }

    fn iter(&self) -> impl Iterator<Item = &Entry> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }
}

/// Entries of a history as of one moment, oldest first. Holds them as long as it lives, and copies none but
/// the last of each heap.
#[derive(Clone, Debug, Default)]
pub struct Entries {
    rows: Vec<Row>,
    /// The oldest ones that are passed over.
    passed_over: usize,
    len: usize,
    dropped: u64,
}

impl Entries {
    /// The newest `entries_max` of the rows. `dropped` were lost before.
    pub(super) fn newest(rows: Vec<Row>, entries_max: usize, dropped: u64) -> Self {
        let all: usize = rows.iter().map(Row::len).sum();
        let passed_over = all.saturating_sub(entries_max);
        Self { rows, passed_over, len: all - passed_over, dropped: dropped + passed_over as u64 }
    }

    /// The newest `entries_max` of them; the others count as dropped.
    #[must_use]
    pub fn at_most(self, entries_max: usize) -> Self {
        Self::newest(self.rows, entries_max.min(self.len), self.dropped - self.passed_over as u64)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many older ones were recorded and are lost.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// All of them, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> + '_ {
        let mut rows: Vec<_> = self.rows.iter().map(|row| row.iter().peekable()).collect();
        let mut next: BinaryHeap<_> = rows
            .iter_mut()
            .enumerate()
            .filter_map(|(number, row)| Some(Reverse((row.peek()?.moment, number))))
            .collect();
        let merged = std::iter::from_fn(move || {
            let Reverse((_, number)) = next.pop()?;
            let entry = rows[number].next()?;
            if let Some(after) = rows[number].peek() {
                next.push(Reverse((after.moment, number)));
            }
            Some(entry)
        });
        merged.skip(self.passed_over)
    }
}
