//! `backend:cpu`: exact sizes, one address map for all instances, and behaviour when memory is short.

mod instances;
mod random;
mod rules;

use stratalloc::strategies::Clock;
use stratalloc::system::{Source, SystemBlock, SystemMemory};

use crate::common::prelude::*;

const ANY: StreamId = StreamId::DEFAULT;

/// System memory that counts its allocations and has a limit that the test sets.
#[derive(Debug)]
struct Counted {
    memory: SystemMemory,
    held: AtomicI64,
    held_bytes: AtomicI64,
    calls: AtomicU64,
    most_bytes: AtomicI64,
}

impl Counted {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            memory: SystemMemory::default(),
            held: AtomicI64::new(0),
            held_bytes: AtomicI64::new(0),
            calls: AtomicU64::new(0),
            most_bytes: AtomicI64::new(i64::MAX),
        })
    }

    fn held(&self) -> (i64, i64) {
        (self.held.load(Ordering::SeqCst), self.held_bytes.load(Ordering::SeqCst))
    }
}

impl Source for Counted {
    fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let size = i64::try_from(size_bytes).expect("tests allocate little");
        if self.held_bytes.load(Ordering::SeqCst) + size > self.most_bytes.load(Ordering::SeqCst) {
            let message = format!("no memory for {size_bytes} bytes");
            return Err(DriverError::new(DriverErrorKind::OutOfMemory, "test", 12, message));
        }
        let block = self.memory.take(size_bytes, alignment_bytes)?;
        self.held.fetch_add(1, Ordering::SeqCst);
        self.held_bytes.fetch_add(size, Ordering::SeqCst);
        Ok(block)
    }

    fn release(&self, block: SystemBlock) {
        self.held.fetch_sub(1, Ordering::SeqCst);
        let size = i64::try_from(block.size_bytes()).expect("tests allocate little");
        self.held_bytes.fetch_sub(size, Ordering::SeqCst);
        drop(block);
    }
}

/// Returns a clock that the test sets, and the seconds to set it with.
fn hand_clock() -> (Arc<AtomicU64>, Clock) {
    let seconds = Arc::new(AtomicU64::new(0));
    let own = Arc::clone(&seconds);
    (seconds, Arc::new(move || Duration::from_secs(own.load(Ordering::SeqCst))))
}

fn settings(conf: &str) -> Settings {
    config(conf).settings().clone()
}

fn over(source: &Arc<Counted>, conf: &str) -> CpuAllocator {
    timed(source, conf, hand_clock().1)
}

fn timed(source: &Arc<Counted>, conf: &str, clock: Clock) -> CpuAllocator {
    let source = Arc::clone(source) as Arc<dyn Source>;
    CpuAllocator::with_source(DeviceId(0), &settings(conf), source, clock).expect("legal settings")
}
