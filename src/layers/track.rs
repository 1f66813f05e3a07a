//! `track`: what was never given back, and who asked for it.
//!
//! The history remembers it: `track` has it gather stacks of live blocks, those of the program itself unless
//! somebody chose a [provider](History::set_stack_provider), and has it tell what lives when it goes. An
//! allocator from the string that is still there when the process ends is asked then: a typed buffer keeps
//! its allocator, and PyTorch's stay. Whoever [stops](History::stop) the history, or has it gather no stacks,
//! ends this too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::record::record;
use crate::allocator::DeviceAllocator;
use crate::history::{History, LeakReporter};
use crate::sync::{Global, Rank, at_exit};

/// Histories that write what was never given back themselves, with the process that each was tracked in.
static TRACKED: Global<Vec<(u32, Weak<History>)>> = Global::new(Rank::Tracked, Vec::new());

/// `inner`, remembering who asked for each block, with what was never given back told to `report` when its
/// history goes: when it was dropped, and everything that was switched to instead of it. What lives now its
/// history says at any time: [`History::live`].
pub fn track_to<A: DeviceAllocator + 'static>(
    inner: A,
    report: LeakReporter,
) -> Box<dyn DeviceAllocator> {
    tracked(Box::new(inner), report).0
}

/// The same, written to the standard error stream, also when the process ends before.
pub fn track<A: DeviceAllocator + 'static>(inner: A) -> Box<dyn DeviceAllocator> {
    static IS_HOOKED: AtomicBool = AtomicBool::new(false);
    let report = |live: &_| super::say(format_args!("never given back: {live}"));
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
    // Nothing may unwind out of here, and nobody is left to be told.
    let _ = std::panic::catch_unwind(|| {
        let own = std::process::id();
        let histories: Vec<_> = {
            let all = TRACKED.read();
            let tracked_here = all.iter().filter(|(process, _)| *process == own);
            tracked_here.filter_map(|(_, history)| history.upgrade()).collect()
        };
        histories.iter().for_each(|history| history.tell_leaks());
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
