//! Checks across many threads that no byte is in two blocks: panics as soon as two threads hold the same
//! byte.
//!
//! A thread claims a block right after it allocates it, and drops the claim right before it frees the block.
//! If other streams use the block, its bytes stay claimed until their work has finished. The sums `at_least`
//! and `at_most` bound the allocator's number of live blocks.
//!
//! A moment is a position in the work submitted to the device, as `Sim::submitted` returns it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use stratalloc::ids::StreamId;

/// The reason why a range must not be allocated.
#[derive(Debug)]
enum Claim {
    Held,
    /// The block was freed, but its bytes stay claimed until each of these streams has finished its work
    /// past a moment.
    Draining(Vec<(StreamId, u64)>),
}

#[derive(Debug, Default)]
struct State {
    /// The end of each claimed range and why it is claimed, by the start of the range.
    claims: BTreeMap<u64, (u64, Claim)>,
    /// For each stream, the last moment up to which its work has finished or is about to finish.
    passed: BTreeMap<StreamId, u64>,
}

/// All claims, and the sums over all threads.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
    /// A lower bound of the live blocks: increased after an allocation has returned, decreased before a free
    /// begins.
    pub(crate) at_least: Sum,
    /// An upper bound of the live blocks: increased before an allocation begins, decreased after a free has
    /// returned.
    pub(crate) at_most: Sum,
}

/// A number and its peak.
#[derive(Debug, Default)]
pub(crate) struct Sum {
    now: AtomicI64,
    peak: AtomicI64,
}

impl Sum {
    pub(crate) fn add(&self, n: i64) {
        let now = self.now.fetch_add(n, SeqCst) + n;
        self.peak.fetch_max(now, SeqCst);
    }

    pub(crate) fn now(&self) -> i64 {
        self.now.load(SeqCst)
    }

    pub(crate) fn peak(&self) -> i64 {
        self.peak.load(SeqCst)
    }
}

impl Claims {
    /// Claims the bytes of a block that was just allocated.
    pub(crate) fn claim(&self, address: u64, bytes: u64) {
        let State { claims, passed } = &mut *self.state.lock().expect("no holder has panicked");
        let end = address + bytes;
        while let Some((&start, (until, claim))) = claims.range(..end).next_back() {
            if *until <= address {
                break;
            }
            match claim {
                Claim::Held => panic!("{address:#x}..{end:#x} is held from {start:#x} on"),
                Claim::Draining(waits) => {
                    for (stream, moment) in waits {
                        let passed = passed.get(stream).copied().unwrap_or(0);
                        assert!(passed > *moment, "{address:#x} is still used by {stream:?}");
                    }
                }
            }
            claims.remove(&start);
        }
        claims.insert(address, (end, Claim::Held));
    }

    /// Drops the claim of a block that is about to be freed. `waits` lists the other streams that use the
    /// block, each with the moment right before the free.
    pub(crate) fn give_up(&self, address: u64, waits: Vec<(StreamId, u64)>) {
        let claims = &mut self.state.lock().expect("no holder has panicked").claims;
        let (end, _) = claims.remove(&address).expect("only claimed blocks are freed");
        if !waits.is_empty() {
            claims.insert(address, (end, Claim::Draining(waits)));
        }
    }

    /// Records that a stream's work up to a moment is about to finish.
    pub(crate) fn pass(&self, stream: StreamId, moment: u64) {
        let passed = &mut self.state.lock().expect("no holder has panicked").passed;
        let known = passed.entry(stream).or_insert(0);
        *known = moment.max(*known);
    }
}
