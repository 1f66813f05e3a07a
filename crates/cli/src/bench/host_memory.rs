//! Cases of host memory: this library's allocator, the system's and, if built in, mimalloc.

use std::alloc::System;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::Arc;

#[cfg(not(feature = "mimalloc"))]
use crate::outcome::write_note;
use stratalloc::allocator::{DeviceAllocator, Request};
use stratalloc::config::Settings;
use stratalloc::error::DriverError;
use stratalloc::ids::{DeviceId, StreamId};
use stratalloc::size::{KIB, MIB};
use stratalloc::strategies::{CpuAllocator, CpuCachingGuard, current};
use stratalloc::system::{FromGlobal, Source};

use super::cases::{Together, median, median_ns, together};

const PAGE_BYTES: usize = 4096;
const ALIGNMENT_BYTES: u64 = 64;

/// Sizes of blocks that are allocated, written page by page, and freed.
pub(crate) const TOUCHED: [(&str, u64); 7] = [
    ("touch:1MiB", MIB),
    ("touch:2MiB", 2 * MIB),
    ("touch:4MiB", 4 * MIB),
    ("touch:8MiB", 8 * MIB),
    ("touch:16MiB", 16 * MIB),
    ("touch:32MiB", 32 * MIB),
    ("touch:64MiB", 64 * MIB),
];

/// A function that allocates this many bytes, writes to each page, and frees them.
pub(crate) type HostAllocator = Box<dyn Fn(u64)>;

fn write_each_page(bytes: &mut [MaybeUninit<u8>]) {
    for page in bytes.chunks_mut(PAGE_BYTES) {
        black_box(&mut page[0]).write(1);
    }
}

/// Returns the function for this library's allocator of host memory.
pub(crate) fn own(settings: &Settings) -> Result<HostAllocator, DriverError> {
    let own = CpuAllocator::new(DeviceId(0), settings)?;
    let buffer = move |bytes| own.buffer(bytes).expect("cases fit the machine");
    Ok(Box::new(move |bytes| write_each_page(buffer(bytes).bytes())))
}

/// Returns the function for an allocator with Rust's `GlobalAlloc` interface.
fn global<A>(source: FromGlobal<A>) -> HostAllocator
where
    FromGlobal<A>: Source + 'static,
{
    let block = move |bytes| source.take(bytes, ALIGNMENT_BYTES).expect("cases fit the machine");
    Box::new(move |bytes| write_each_page(block(bytes).bytes()))
}

/// Returns the functions for other allocators, by name. Time them before this library's cases. Memory
/// freed by those stays in the C library and would save the other allocators system calls.
pub(crate) fn others() -> Vec<(&'static str, HostAllocator)> {
    #[cfg(not(feature = "mimalloc"))]
    write_note("no rows of mimalloc: this program was built without the feature mimalloc");
    vec![
        ("system", global(FromGlobal(&System))),
        #[cfg(feature = "mimalloc")]
        ("mimalloc", global(FromGlobal(&mimalloc::MiMalloc))),
    ]
}

/// Returns the nanoseconds to allocate a block, write to each page and free it.
pub(crate) fn touch(memory: &HostAllocator, bytes: u64) -> f64 {
    let steps = usize::try_from((256 * MIB / bytes).max(8)).unwrap_or(8);
    (0..4).for_each(|_| memory(bytes));
    median_ns(7, steps, |_| memory(bytes))
}

/// Runs threads that each allocate and free 64 KiB in an instance of their own. Returns the median of
/// seven runs.
pub(crate) fn guards(settings: &Settings, threads: usize) -> Result<Together, DriverError> {
    let own = || CpuAllocator::new(DeviceId(0), settings).map(Arc::new);
    let instances: Vec<_> = (0..threads).map(|_| own()).collect::<Result<_, _>>()?;
    let request = Request::new(64 * KIB, StreamId::DEFAULT);
    let run = |_| {
        together(threads, 300_000, |thread| {
            let guard = CpuCachingGuard::new(Arc::clone(&instances[thread]));
            move |steps| {
                let _guard = &guard;
                for _ in 0..steps {
                    let own = current().expect("the guard lives");
                    let block = own.allocate(black_box(request)).expect("cases fit the machine");
                    own.free(block).expect("cases free what they took");
                }
            }
        })
    };
    Ok(median((0..7).map(run).collect()))
}
