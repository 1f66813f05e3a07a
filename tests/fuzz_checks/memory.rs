//! A global allocator that counts the heap bytes of the current thread. It measures the peak heap use of
//! code under test, such as the readers of recordings (`replay::reader`).
//!
//! While a block is reallocated, both copies are counted. `tests/reader_memory.rs` uses this allocator
//! too.

#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).expect("no memory is that large")
}

fn count(bytes: i64) {
    // While the thread ends, its counters may no longer exist. No measurement runs then.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// `realloc` has its default implementation: a new block, a copy, and a free of the old block.
// SAFETY: every call goes to `System` unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: `at` came from `alloc` above, hence from `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs `work` and returns its result and the peak of its heap bytes.
pub(super) fn peak_of<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get() - before)
}
