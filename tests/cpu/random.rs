//! Random histories against a simple model, and many threads on several instances.

use std::mem::MaybeUninit;

use stratalloc::strategies::CpuBuffer;

use super::{ANY, Counted, hand_clock, timed};
use crate::common::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Take(u64),
    Buffer(u64),
    Free(usize),
    FreeRaw(usize),
    Forget(usize),
    Empty,
    /// Limits the system's memory, or removes that limit.
    Most(Option<u16>),
    Pass(u64),
    Trim,
    ResetPeaks,
}

impl Arbitrary for Step {
    fn arbitrary(g: &mut Gen) -> Self {
        let size = 1 + u64::from(u8::arbitrary(g) % 8) * 100;
        let nth = usize::arbitrary(g);
        match u8::arbitrary(g) % 16 {
            0..=4 => Self::Take(size),
            5..=6 => Self::Buffer(size),
            7..=9 => Self::Free(nth),
            10 => Self::FreeRaw(nth),
            11 => Self::Forget(nth),
            12 => Self::Empty,
            13 => Self::Most(Option::arbitrary(g)),
            14 => Self::Pass(u64::arbitrary(g) % 4),
            _ if bool::arbitrary(g) => Self::Trim,
            _ => Self::ResetPeaks,
        }
    }
}

#[derive(Debug)]
enum HeldBlock {
    Typed(Allocation),
    Buffer(CpuBuffer),
}

impl HeldBlock {
    fn range(&self) -> (u64, u64) {
        match self {
            Self::Typed(own) => (own.address(), own.size_bytes()),
            Self::Buffer(own) => (own.address(), own.size_bytes()),
        }
    }
}

/// A minimal model: the live blocks, and the free blocks of each size, oldest first.
#[derive(Default)]
struct Model {
    held: Vec<HeldBlock>,
    idle: HashMap<u64, Vec<u64>>,
    peak: u64,
}

impl Model {
    fn live_bytes(&self) -> u64 {
        self.held.iter().map(|held| held.range().1).sum()
    }

    fn took(&mut self, held: HeldBlock) -> Result<(), String> {
        let (address, size) = held.range();
        let overlaps = |other: &HeldBlock| {
            let (at, len) = other.range();
            address < at + len && at < address + size
        };
        if let Some(other) = self.held.iter().find(|other| overlaps(other)) {
            return Err(format!("{held:?} lies over {other:?}"));
        }
        let stack = self.idle.entry(size).or_default();
        match stack.last() {
            Some(top) if *top == address => _ = stack.pop(),
            Some(top) => return Err(format!("{address:#x} instead of {top:#x}")),
            None => {}
        }
        self.held.push(held);
        self.peak = self.peak.max(self.live_bytes());
        Ok(())
    }

    fn freed(&mut self, (address, size): (u64, u64)) {
        self.idle.entry(size).or_default().push(address);
    }
}

fn check(own: &CpuAllocator, source: &Counted, model: &Model) -> Result<(), String> {
    let s = own.stats();
    let as_bytes = |n: i64| u64::try_from(n).expect("counts are positive");
    let live = model.live_bytes();
    let same = |what: &str, is: u64, expected: u64| {
        if is == expected { Ok(()) } else { Err(format!("{what}: {is} instead of {expected}")) }
    };
    same("allocated", as_bytes(s.allocated_bytes.all.current), live)?;
    same("blocks", as_bytes(s.allocation.all.current), model.held.len() as u64)?;
    same("peak", as_bytes(s.allocated_bytes.all.peak), model.peak)?;
    same("reserved", as_bytes(s.reserved_bytes.all.current), as_bytes(source.held().1))?;
    same("segments", as_bytes(s.segment.all.current), as_bytes(source.held().0))?;
    let idle: usize = model.idle.values().map(Vec::len).sum();
    same("free blocks", s.free_blocks, idle as u64)?;
    same("layout", own.layout().len() as u64, model.held.len() as u64 + idle as u64)
}

fn run(steps: &[Step]) -> Result<(), String> {
    let source = Counted::new();
    let (seconds, clock) = hand_clock();
    let own = timed(&source, "", clock);
    let mut model = Model::default();
    for step in steps {
        let nth = |n: usize, model: &Model| (!model.held.is_empty()).then(|| n % model.held.len());
        match *step {
            Step::Take(size) | Step::Buffer(size) => {
                let room = source.held().1 < source.most_bytes.load(Ordering::SeqCst);
                let hits = model.idle.get(&size).is_some_and(|stack| !stack.is_empty());
                let retries = own.stats().num_alloc_retries;
                let taken = if matches!(step, Step::Take(_)) {
                    own.try_allocate(size, ANY).map(HeldBlock::Typed)
                } else {
                    own.buffer(size).map(HeldBlock::Buffer)
                };
                if own.stats().num_alloc_retries > retries {
                    if hits || (room && source.most_bytes.load(Ordering::SeqCst) == i64::MAX) {
                        return Err("under pressure without need".to_owned());
                    }
                    model.idle.clear();
                }
                match taken {
                    Ok(held) => model.took(held)?,
                    Err(error) if hits => return Err(error.to_string()),
                    Err(_) => {}
                }
            }
            Step::Free(n) | Step::FreeRaw(n) => {
                let Some(n) = nth(n, &model) else { continue };
                let held = model.held.swap_remove(n);
                let range = held.range();
                match held {
                    HeldBlock::Buffer(buffer) => {
                        // The block belongs to a buffer, so freeing it by its address must fail.
                        if own.free_raw(range.0).is_ok() {
                            return Err("freed a lent block".to_owned());
                        }
                        drop(buffer);
                    }
                    HeldBlock::Typed(_) if matches!(step, Step::FreeRaw(_)) => {
                        own.free_raw(range.0).map_err(|error| error.to_string())?;
                    }
                    HeldBlock::Typed(block) => {
                        own.free(block).map_err(|error| error.to_string())?
                    }
                }
                model.freed(range);
            }
            Step::Forget(n) => {
                let Some(n) = nth(n, &model) else { continue };
                let address = model.held[n].range().0;
                match (&model.held[n], own.record_free(address)) {
                    (HeldBlock::Typed(_), Ok(memory)) => {
                        stratalloc::system::Source::release(&*source, memory);
                        model.held.swap_remove(n);
                    }
                    (HeldBlock::Buffer(_), Err(_)) => {}
                    (held, answer) => return Err(format!("{held:?}: {answer:?}")),
                }
            }
            Step::Empty => {
                own.empty_cache().map_err(|error| error.to_string())?;
                model.idle.clear();
            }
            Step::Most(most) => {
                source
                    .most_bytes
                    .store(most.map_or(i64::MAX, |n| i64::from(n % 2000)), Ordering::SeqCst);
            }
            Step::Pass(n) => _ = seconds.fetch_add(n, Ordering::SeqCst),
            Step::Trim => assert_eq!(own.trim(), 0, "no age is set"),
            Step::ResetPeaks => {
                own.reset_peaks();
                model.peak = model.live_bytes();
            }
        }
        check(&own, &source, &model).map_err(|wrong| format!("after {step:?}: {wrong}"))?;
    }
    let held = std::mem::take(&mut model.held);
    let (buffers, typed): (Vec<_>, Vec<_>) =
        held.into_iter().partition(|held| matches!(held, HeldBlock::Buffer(_)));
    drop(own);
    for held in typed {
        let HeldBlock::Typed(block) = held else { continue };
        CpuAllocator::free_shared(block).map_err(|error| error.to_string())?;
    }
    drop(buffers);
    if source.held() == (0, 0) { Ok(()) } else { Err(format!("{:?} are left", source.held())) }
}

#[test]
fn random_histories_follow_the_model() {
    histories(runs(400), 100, run);
}

/// Each thread fills its buffers with a value of its own and later checks it. A wrong value means that two
/// threads share a byte.
#[test]
fn threads_on_shared_and_own_instances_never_meet_in_a_block() {
    const ROUNDS: u64 = 4000;
    let source = Counted::new();
    let shared = Arc::new(timed(&source, "cpu_cached_max_mb:1,cpu_junk_fill:True", hand_clock().1));
    let instances: Vec<_> = (0..4).map(|_| timed(&source, "", hand_clock().1)).collect();
    std::thread::scope(|scope| {
        for (thread, private) in instances.iter().enumerate() {
            let shared = &shared;
            scope.spawn(move || {
                let mark = u8::try_from(thread + 1).unwrap();
                let mut kept: Vec<CpuBuffer> = Vec::new();
                for round in 0..ROUNDS {
                    let own = if round % 3 == 0 { private } else { &**shared };
                    let mut buffer = own.buffer(1 + (round * 37) % 900).unwrap();
                    buffer.bytes().fill(MaybeUninit::new(mark));
                    buffer.fill(stratalloc::system::Fill::Zero);
                    buffer.initialized().unwrap().fill(mark);
                    kept.push(buffer);
                    let address = own.try_allocate(64, ANY).map(|b| b.address()).unwrap();
                    // Any instance can free the block.
                    shared.free_raw(address).unwrap();
                    if kept.len() > 16 {
                        let mut old = kept.swap_remove(usize::try_from(round % 16).unwrap());
                        assert!(old.initialized().unwrap().iter().all(|byte| *byte == mark));
                    }
                    if round % 500 == 0 {
                        shared.empty_cache().unwrap();
                    }
                }
            });
        }
    });
    for own in instances.iter().chain([&*shared]) {
        let s = own.stats();
        assert_eq!((s.allocation.all.current, s.allocated_bytes.all.current), (0, 0));
        assert_eq!(s.allocation.all.allocated, s.allocation.all.freed);
    }
    drop((instances, shared));
    assert_eq!(source.held(), (0, 0));
}
