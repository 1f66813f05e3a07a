//! The entries of a history at one moment, merged by timestamp.
//!
//! `record` distributes entries over shards, each with its own lock, and stores those of a shard as a
//! list of arrays, called chunks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::event::Entry;

/// The entries of one shard, oldest first.
#[derive(Clone, Debug)]
pub(super) struct Row {
    chunks: Vec<Arc<Vec<Entry>>>,
}

impl Row {
    /// Collects the chunks of one shard. Each chunk is sorted by timestamp. If a chunk has an entry that
    /// is older than the last one of the previous chunk, the two are merged into one sorted chunk.
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

/// The entries of a history at one moment, oldest first. The value shares the memory of full chunks
/// with the recorder until it is dropped. The last chunk of each shard is copied, and chunks of a shard
/// whose times overlap.
#[derive(Clone, Debug, Default)]
pub struct Entries {
    rows: Vec<Row>,
    /// The number of oldest entries that iteration skips.
    passed_over: usize,
    len: usize,
    dropped: u64,
}

impl Entries {
    /// Returns the newest `entries_max` entries. `dropped` is the number of entries that were recorded
    /// but are no longer kept.
    pub(super) fn newest(rows: Vec<Row>, entries_max: usize, dropped: u64) -> Self {
        let all: usize = rows.iter().map(Row::len).sum();
        let passed_over = all.saturating_sub(entries_max);
        Self { rows, passed_over, len: all - passed_over, dropped: dropped + passed_over as u64 }
    }

    /// Returns the newest `entries_max` entries. The others count as dropped.
    #[must_use]
    pub fn at_most(self, entries_max: usize) -> Self {
        Self::newest(self.rows, entries_max.min(self.len), self.dropped - self.passed_over as u64)
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of older entries that were recorded but are no longer kept.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Iterates over all entries, oldest first.
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
