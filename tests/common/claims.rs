//! Who holds which bytes, for many threads: two holders of one byte are seen at once.
//!
//! A thread claims a block as soon as it has it and gives the claim up just before it frees it, so
//! a claim never outlives its block. A block that other streams use leaves a claim that only the
//! end of their work lifts. The sums kept beside the claims bracket what the allocator should count.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use stratalloc::ids::StreamId;

/// What still stands in the way of other holders.
#[derive(Debug)]
enum Claim {
    Held,
    /// Streams whose work must have passed these moments.
    Draining(Vec<(StreamId, u64)>),
}

#[derive(Debug, Default)]
struct State {
    /// End and claim by start.
    claims: BTreeMap<u64, (u64, Claim)>,
    /// How far each stream's work may have come.
    passed: BTreeMap<StreamId, u64>,
}

/// All claims, and the sums over all threads.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
    /// Never above the truth: rises after a call returned and falls before one begins.
    pub(crate) at_least: Sum,
    /// Never below the truth: rises before a call begins and falls after one returned.
    pub(crate) at_most: Sum,
}

/// A number with its peak.
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
    /// Claims the bytes of a block that was just handed out.
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

    /// Gives a claim up, just before the block is freed. `waits` names the other streams that use
    /// it and a moment that lies before the free.
    pub(crate) fn give_up(&self, address: u64, waits: Vec<(StreamId, u64)>) {
        let claims = &mut self.state.lock().expect("no holder has panicked").claims;
        let (end, _) = claims.remove(&address).expect("only claimed blocks are freed");
        if !waits.is_empty() {
            claims.insert(address, (end, Claim::Draining(waits)));
        }
    }

    /// Says, before it happens, that a stream's work passes a moment.
    pub(crate) fn pass(&self, stream: StreamId, moment: u64) {
        let passed = &mut self.state.lock().expect("no holder has panicked").passed;
        let known = passed.entry(stream).or_insert(0);
        *known = moment.max(*known);
    }
}
