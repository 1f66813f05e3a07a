//! Counts running calls of users' functions (callbacks), so that an interpreter can wait for them
//! before it exits.
//!
//! A caller adds a function together with a release function, which releases its `user` pointer.
//! Functions with the same release function share one gate.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use stratalloc::sync::{Global, Rank};

/// Bit that is set when the gate is closed, and never cleared. The other bits count the running calls.
const CLOSED: u64 = 1 << 63;
const POLL: Duration = Duration::from_millis(1);

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Gate(AtomicU64);

/// A running call. It is counted until this is dropped.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a Gate);

/// Gates by the address of the release function.
static GATES: Global<BTreeMap<usize, Arc<Gate>>> = Global::new(Rank::Gates, BTreeMap::new());

impl Gate {
    /// Returns the open gate of a release function. Returns a new gate if the function is null (0).
    pub(super) fn of(release: usize) -> Arc<Self> {
        if release == 0 {
            return Arc::default();
        }
        let mut gates = GATES.lock();
        let gate = gates.entry(release).or_default();
        if gate.0.load(Ordering::Relaxed) & CLOSED != 0 {
            // The closed gate belonged to a function that was unloaded. This is a new function at the
            // same address.
            *gate = Arc::default();
        }
        Arc::clone(gate)
    }

    /// Counts a call until the result is dropped. `None` if the gate is closed. Then the call must not
    /// be made.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        let inside = Inside(self);
        // SeqCst pairs with `close`: either `close` counts this call, or this call sees that the gate
        // is closed.
        (self.0.fetch_add(1, Ordering::SeqCst) & CLOSED == 0).then_some(inside)
    }

    fn close(&self, wait: Duration) -> u64 {
        self.0.fetch_or(CLOSED, Ordering::SeqCst);
        let start = Instant::now();
        loop {
            let inside = self.0.load(Ordering::SeqCst) & !CLOSED;
            if inside == 0 || start.elapsed() >= wait {
                return inside;
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // The count may be 0: if this thread forked during the call, `forget_calls` has reset it in the
        // child.
        let leave = |count: u64| (count & !CLOSED != 0).then(|| count - 1);
        let _ = self.0.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, leave);
    }
}

/// Closes the gate of a release function and waits, at most `wait`, until no call is running. Returns
/// the number of calls that are still running.
pub(super) fn close(release: usize, wait: Duration) -> u64 {
    let gate = GATES.read().get(&release).map(Arc::clone);
    gate.map_or(0, |gate| gate.close(wait))
}

/// Resets the counts in a forked child: the counted calls run on threads of the parent.
pub(super) fn forget_calls() {
    for gate in GATES.read().values() {
        gate.0.fetch_and(CLOSED, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn closing_waits_until_the_calls_inside_have_left_and_lets_no_other_in() {
        let gate = Gate::of(0x1000);
        let (entered, is_inside) = mpsc::channel();
        let (leave, may_leave) = mpsc::channel::<()>();
        let call = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || {
                let _inside = gate.enter().unwrap();
                entered.send(()).unwrap();
                may_leave.recv().unwrap();
            })
        };
        is_inside.recv().unwrap();
        assert_eq!(close(0x1000, Duration::ZERO), 1, "it does not wait longer than it may");
        assert!(gate.enter().is_none());
        leave.send(()).unwrap();
        assert_eq!(close(0x1000, Duration::MAX), 0);
        call.join().unwrap();
        assert!(gate.enter().is_none());
        assert!(
            Gate::of(0x1000).enter().is_some(),
            "the next function at this address has a gate of its own"
        );
        assert_eq!(close(0x2000, Duration::MAX), 0, "no function was added");
    }
}
