//! Scopes of private pools that are open in another allocator over the same device.
//!
//! A scope may be a capture's. Who waits for the whole device breaks captures, and one that only another
//! allocator was told of, too: a replaced allocator asks here before it does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What a replaced allocator knows of its successors' scopes.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere(OnceLock<Arc<AtomicUsize>>);

impl Elsewhere {
    /// From now on `open_scopes` says how many there are. Told once, when the allocator is replaced.
    pub(crate) fn heed(&self, open_scopes: &Arc<AtomicUsize>) {
        // It is replaced once, and by one switch.
        let _ = self.0.set(Arc::clone(open_scopes));
    }

    /// Whether any is open.
    pub(crate) fn any_scope(&self) -> bool {
        self.0.get().is_some_and(|open| open.load(Ordering::SeqCst) != 0)
    }
}
