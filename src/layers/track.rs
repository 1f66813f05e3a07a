//! `track`: reports leaks, the blocks that were never freed, with their stacks.
//!
//! `track` uses the history. It makes the history gather stacks of live blocks, and report the live blocks
//! when the history is dropped. The stacks are native ones unless the program set a
//! [provider](History::set_stack_provider). Allocators built from the configuration string also report at
//! process exit, because a typed buffer or PyTorch may keep them alive until then.
//! [Stopping](History::stop) the history, or recording without stacks, ends tracking too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::record::record;
use crate::allocator::DeviceAllocator;
use crate::history::{History, LeakReporter};
use crate::sync::{Global, Rank, at_exit};

/// Histories that report leaks at process exit, each with the id of the process that tracks it. A forked
/// process does not report those of its parent.
static TRACKED: Global<Vec<(u32, Weak<History>)>> = Global::new(Rank::Tracked, Vec::new());

/// Returns `inner` with a history that records a stack for each block. Passes leaks to `report` when the
/// history is dropped. That happens after this allocator, and all allocators that replaced it in a switch,
/// were dropped. [`History::live`] returns the live blocks at any time.
pub fn track_to<A: DeviceAllocator + 'static>(
    inner: A,
    report: LeakReporter,
) -> Box<dyn DeviceAllocator> {
    tracked(Box::new(inner), report).0
}

/// As [`track_to`], with leaks written to the standard error stream, also at process exit.
pub fn track<A: DeviceAllocator + 'static>(inner: A) -> Box<dyn DeviceAllocator> {
    static IS_HOOKED: AtomicBool = AtomicBool::new(false);
    let report = |live: &_| super::write_stderr(format_args!("never freed: {live}"));
    let (inner, history) = tracked(Box::new(inner), Box::new(report));
    let mut all = TRACKED.lock();
    all.retain(|(_, known)| known.strong_count() > 0 && known.as_ptr() != Arc::as_ptr(&history));
    all.push((std::process::id(), Arc::downgrade(&history)));
    drop(all);
    if !IS_HOOKED.swap(true, Ordering::Relaxed) {
        at_exit(report_at_exit);
    }
    inner
}

extern "C" fn report_at_exit() {
    // A panic must not cross the C boundary. It is dropped, because no caller could receive it.
    let _ = std::panic::catch_unwind(|| {
        let own = std::process::id();
        let histories: Vec<_> = {
            let all = TRACKED.read();
            let tracked_here = all.iter().filter(|(process, _)| *process == own);
            tracked_here.filter_map(|(_, history)| history.upgrade()).collect()
        };
        histories.iter().for_each(|history| history.report_leaks_at_end());
    });
}

fn tracked(
    inner: Box<dyn DeviceAllocator>,
    report: LeakReporter,
) -> (Box<dyn DeviceAllocator>, Arc<History>) {
    let own = inner.control().recording.map(|recording| Arc::clone(recording.history()));
    let (inner, history) = match own {
        Some(history) => (inner, history),
        None => {
            let history = Arc::new(History::default());
            (Box::new(record(inner, Arc::clone(&history))) as Box<_>, history)
        }
    };
    history.remember_live_blocks();
    history.report_leaks(report);
    (inner, history)
}
