//! Late entries: entries that have a timestamp but are not recorded yet.
//!
//! A free gets its timestamp under the heap's lock. Its entry is recorded after that lock is released,
//! because its stack is gathered in between. A snapshot taken in between would list the block as free
//! without an entry for the free.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::record::History;
use crate::threads::{Inside, Region};

#[derive(Debug, Default)]
pub(super) struct LateEntries {
    count: AtomicUsize,
    /// A thread enters this region once for each of its late entries. So the region's depth on a thread
    /// is the number of that thread's late entries.
    here: Region,
}

/// Counts one late entry until dropped.
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
    /// Counts a late entry. Called under the lock under which the entry's timestamp was taken. The
    /// caller drops the result when the entry is recorded.
    pub(crate) fn late(&self) -> Late<'_> {
        let LateEntries { count, here } = &self.late;
        count.fetch_add(1, Ordering::AcqRel);
        Late { count, _here: here.enter() }
    }

    /// Returns true if other threads have late entries. Late entries of the calling thread do not
    /// count, because it cannot wait for them: a stack provider may take a snapshot, and the thread's
    /// entry is recorded only after the provider has returned.
    #[doc(hidden)]
    pub fn any_late(&self) -> bool {
        let count = self.late.count.load(Ordering::Acquire);
        count > 0 && count > self.late.here.depth()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_for_the_late_entries_of_others_only() {
        let history = History::default();
        std::thread::scope(|scope| {
            let _late = history.late();
            assert!(!history.any_late(), "its own");
            scope.spawn(|| assert!(history.any_late())).join().unwrap();
        });
        assert!(!history.any_late());
    }
}
