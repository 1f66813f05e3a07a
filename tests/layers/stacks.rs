//! All layers together under random operations, on simulated and on real memory.
//!
//! After each run everything is freed. Then every layer, the strategy and the device must hold nothing.

use super::fixture::{allocated, built};
use crate::common::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take { bytes: u64, stream: u64 },
    TakeRaw { bytes: u64, stream: u64 },
    Free { pick: usize },
    FreeRaw { pick: usize },
    Record { pick: usize, stream: u64 },
    Empty,
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let sizes = [1, 300, 512, 513, 5000, 70_000, 1 << 20, 3 << 20, 40 << 20];
        let (bytes, stream) = (*g.choose(&sizes).expect("a size"), u64::arbitrary(g) % 3);
        let pick = usize::arbitrary(g);
        match u8::arbitrary(g) % 16 {
            0..=5 => Self::Take { bytes, stream },
            6 => Self::TakeRaw { bytes, stream },
            7..=11 => Self::Free { pick },
            12 => Self::FreeRaw { pick },
            13..=14 => Self::Record { pick, stream },
            _ => Self::Empty,
        }
    }
}

/// Allocates, frees and checks that live blocks never overlap.
struct Player<'a> {
    strategy: &'a Strategy,
    /// True if no other thread can get an address that this thread has freed.
    alone: bool,
    typed: Vec<Allocation>,
    raw: Vec<(u64, u64)>,
}

impl Player<'_> {
    fn check_apart(&self, address: u64, bytes: u64) {
        let typed = self.typed.iter().map(|block| (block.address(), block.size_bytes()));
        for (start, size) in typed.chain(self.raw.iter().copied()) {
            let apart = address + bytes <= start || start + size <= address;
            assert!(apart, "{bytes} bytes at {address:#x} overlap {size} at {start:#x}");
        }
    }

    fn step(&mut self, op: Op) {
        let by_address = self.strategy.control().by_address;
        let crossing = self.strategy.cross_stream();
        match op {
            Op::Take { bytes, stream } => match self.strategy.try_allocate(bytes, StreamId(stream))
            {
                Ok(block) => {
                    assert_eq!(block.size_bytes(), bytes);
                    assert!(block.address().is_multiple_of(4096));
                    self.check_apart(block.address(), bytes);
                    self.typed.push(block);
                }
                Err(AllocError::OutOfMemory(_)) => {}
                Err(error) => panic!("{error}"),
            },
            Op::TakeRaw { bytes, stream } if by_address => {
                let request = Request::new(bytes, StreamId(stream));
                match self.strategy.allocate(request).map(|block| block.address()) {
                    Ok(address) => {
                        self.check_apart(address, bytes);
                        self.raw.push((address, bytes));
                    }
                    Err(AllocError::OutOfMemory(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Free { pick } if !self.typed.is_empty() => {
                self.strategy.give(self.typed.swap_remove(pick % self.typed.len()));
            }
            Op::FreeRaw { pick } if !self.raw.is_empty() => {
                let raw = &self.strategy;
                let (address, bytes) = self.raw.swap_remove(pick % self.raw.len());
                assert_eq!(raw.free_raw(address), Ok(bytes));
                assert!(!self.alone || raw.free_raw(address).is_err(), "twice");
            }
            Op::Record { pick, stream } if !self.typed.is_empty() => {
                let block = &self.typed[pick % self.typed.len()];
                crossing.record_stream(block, StreamId(stream)).expect("it is live");
            }
            Op::Empty => {
                self.strategy.caching().empty_cache().expect("it works");
            }
            Op::TakeRaw { .. } | Op::Free { .. } | Op::FreeRaw { .. } | Op::Record { .. } => {}
        }
    }

    fn finish(self) {
        self.typed.into_iter().for_each(|block| self.strategy.give(block));
        for (address, bytes) in self.raw {
            let raw = &self.strategy;
            assert_eq!(raw.free_raw(address), Ok(bytes));
        }
    }
}

/// Returns a file name that no other test uses.
fn log_path() -> std::path::PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("stratalloc-stack-{}-{number}.csv", std::process::id()))
}

fn survives<B: Base>(ops_of_all: &[Vec<Op>], guard: &str) {
    let device = Arc::new(B::with_bytes(256 << 20));
    let path = log_path();
    // A per-thread cache does not support frees by address, so only every other run has one.
    let front = if ops_of_all[0].len().is_multiple_of(2) { "front:1MiB," } else { "" };
    let text = format!(
        "layers:[statistics,{front}track,log:\"{}\",oom_retry:1,limit:120MiB,\
         fault:[probability:0.05,seed:3],align:4KiB,{guard}statistics]",
        path.display()
    );
    let strategy = built(&text, Arc::clone(&device) as Arc<dyn Driver>, true);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ops_of_all
            .iter()
            .map(|ops| {
                let strategy = &strategy;
                scope.spawn(move || {
                    let alone = ops_of_all.len() == 1;
                    let mut player = Player { strategy, alone, typed: Vec::new(), raw: Vec::new() };
                    ops.iter().for_each(|op| player.step(*op));
                    player.finish();
                })
            })
            .collect();
        // A thread that was joined has run its destructors, which free the blocks that `front` cached
        // for it.
        threads.into_iter().for_each(|thread| thread.join().expect("no step fails"));
    });
    assert_eq!(allocated(&strategy), 0, "callers hold nothing");
    device.finish_all();
    strategy.caching().empty_cache().expect("it works");
    assert_eq!(device.held().segments.len(), 0, "all idle memory went back");
    assert_eq!(strategy.stats().memory_reserved(), 0);
    drop(strategy);
    read_back(&path);
    std::fs::remove_file(&path).expect("the log is there");
}

/// Checks that the log has a free for every allocation.
fn read_back(path: &std::path::Path) {
    use stratalloc_recording::{Limits, Op, Workload, reader};

    let trace = reader::read(path, &Limits::default()).expect("a log can be read");
    let workload = Workload::of(&trace, 1 << 40);
    let of = |wanted: fn(&Op) -> bool| workload.ops.iter().filter(wanted).count();
    let taken = of(|op| matches!(op, Op::Allocate { .. }));
    assert_eq!(taken, of(|op| matches!(op, Op::Free { .. })), "of {}", workload.ops.len());
}

/// An operation, and the number of the thread that performs it.
type OnThread = (u8, Op);

fn of_threads(count: u8, ops: &[OnThread]) -> Vec<Vec<Op>> {
    let of = |thread| ops.iter().filter(move |(of, _)| of % count == thread).map(|(_, op)| *op);
    (0..count).map(|thread| of(thread).collect()).collect()
}

#[test]
fn nothing_is_left_after_the_histories_of_any_threads_on_a_simulated_device() {
    for threads in [1, 3] {
        histories(runs(100), 100 * usize::from(threads), |ops: &[OnThread]| {
            survives::<Sim>(&of_threads(threads, ops), "");
            Ok(())
        });
    }
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_after_random_histories_on_real_memory_with_guards() {
    histories(runs(6), 120, |ops: &[OnThread]| {
        survives::<stratalloc_sim::Host>(&of_threads(2, ops), "guard,");
        Ok(())
    });
}
