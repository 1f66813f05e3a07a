//! Entries that are on their way: their moment has passed, and they are not recorded yet.
//!
//! A free takes its moment under the lock of a heap and is recorded after that lock is released, because its
//! stack is gathered in between. A snapshot taken in between would have the block free and no entry for it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::record::History;
use crate::threads::{Inside, Region};

#[derive(Debug, Default)]
pub(super) struct LateEntries {
    count: AtomicUsize,
    /// A thread with such an entry is inside of it.
    here: Region,
}

/// One entry that is on its way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Late<'a> {
    count: &'a AtomicUsize,
    _here: Inside<'a>,
}

impl Drop for Late<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}

impl History {
    /// Notes an entry that is on its way. Called under the lock that its moment belongs to; the result is
    /// dropped when the entry is recorded.
    pub(crate) fn late(&self) -> Late<'_> {
        let LateEntries { count, here } = &self.late;
        count.fetch_add(1, Ordering::AcqRel);
        Late { count, _here: here.enter() }
    }

    /// Whether entries of other threads are on their way. The calling thread cannot wait for its own: a
    /// stack provider may take a snapshot, and the entry is recorded after the provider has returned.
    pub(crate) fn any_late(&self) -> bool {
        let count = self.late.count.load(Ordering::Acquire);
        count > 0 && count > self.late.here.depth()
    }
}
