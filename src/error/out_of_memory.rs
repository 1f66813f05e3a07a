//! The report of a request that got no memory, and its text.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::DriverError;
use crate::ids::{DeviceId, PoolId, StreamId};
use crate::size::{bytes_that_compare, exact_bytes, human_bytes};

/// The report of a failed request: all numbers that explain it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The device.
    pub device: DeviceId,
    /// The stream of the request.
    pub stream: StreamId,
    /// The pool of the request.
    pub pool: PoolId,
    /// The requested size.
    pub requested_bytes: u64,
    /// The requested size after rounding.
    pub rounded_bytes: u64,
    /// The size of the segment that the driver would have had to allocate.
    pub segment_bytes: u64,
    /// Free memory of the device. `None` if the driver did not report it.
    pub device_free_bytes: Option<u64>,
    /// Total memory of the device. `None` if the driver did not report it.
    pub device_total_bytes: Option<u64>,
    /// The limit on the bytes that this allocator reserves, if it has one. For `cudaMallocAsync`, and if
    /// `layers::limit` refused the request, it is a limit on the bytes of live blocks instead.
    pub limit_bytes: Option<u64>,
    /// Bytes of live blocks, without those of tags that are not awake.
    pub allocated_bytes: u64,
    /// Bytes reserved from the driver. 0 if unknown; the text then omits the cached bytes.
    pub reserved_bytes: u64,
    /// Free bytes in small pools.
    pub cached_small_bytes: u64,
    /// Free bytes in large pools.
    pub cached_large_bytes: u64,
    /// Free bytes in private pools, which are included in the two values above.
    pub cached_private_bytes: u64,
    /// The free bytes of each stream and pool that has any, at most 5, sorted by the largest range.
    pub free: Vec<FreeRanges>,
    /// Bytes that callers freed but that unfinished work of other streams still uses.
    pub draining_bytes: u64,
    /// The driver's error, if the driver was called and failed.
    pub driver: Option<DriverError>,
    /// The processes that use most of the device's memory, largest first, at most 5. Empty if the
    /// driver was not called for memory or cannot list processes.
    pub holders: Vec<Holder>,
    /// The call stacks with the most live bytes, largest first, at most 10. Empty unless the history
    /// records stacks or names of scopes.
    pub live: Vec<LiveBytes>,
    /// The current configuration, without default values.
    pub configuration: Option<String>,
    /// The file with a snapshot, or the reason why it was not written. `None` if no snapshot is
    /// configured.
    pub snapshot: Option<Result<PathBuf, String>>,
    /// Settings and changes that would most likely have helped, as sentences.
    pub hints: Vec<String>,
}

/// Live blocks that were allocated from one place of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveBytes {
    /// The sum of the requested sizes of the blocks, in bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The age of the oldest block.
    pub oldest: Duration,
    /// The innermost frames of the call stack.
    pub frames: Vec<String>,
}

impl fmt::Display for LiveBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, oldest) = (human_bytes(self.bytes), self.oldest.as_secs_f64());
        let (blocks, plural) = (self.blocks, if self.blocks == 1 { "block" } else { "blocks" });
        let no_frames = self.frames.is_empty();
        let asked = if no_frames { "unknown call stack" } else { &self.frames.join(" < ") };
        write!(f, "{held} in {blocks} {plural}, up to {oldest:.1} s old: {asked}")
    }
}

/// The free memory for requests on one stream in one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeRanges {
    /// The stream. Requests on other streams cannot use this memory.
    pub stream: StreamId,
    /// The pool.
    pub pool: PoolId,
    /// The sum of the ranges, in bytes.
    pub bytes: u64,
    /// The number of ranges. One request is served from one range.
    pub ranges: u64,
    /// The largest range, in bytes.
    pub largest_bytes: u64,
    /// The number of blocks in the same segments that are live or wait for other streams. They separate
    /// the ranges and prevent the release of the segments.
    pub between_blocks: u64,
    /// The bytes of these blocks.
    pub between_bytes: u64,
}

/// A process that holds memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process id as the driver reports it. In a container this may be the id on the host.
    pub process: u32,
    /// The memory that the process holds on the device, in bytes.
    pub used_bytes: u64,
}

impl Holder {
    /// Returns true if the process id is that of this process.
    #[must_use]
    pub(crate) fn is_this_process(&self) -> bool {
        self.process == std::process::id()
    }
}

impl OutOfMemory {
    /// The most processes in a report.
    pub(crate) const HOLDERS_MAX: usize = 5;
    /// The most pairs of stream and pool in a report.
    pub(crate) const FREE_MAX: usize = 5;
    /// The most call stacks in a report.
    pub(crate) const LIVE_MAX: usize = 10;

    /// Creates a report of a failed request for `bytes` on `stream`. All other numbers are 0, and the
    /// text omits them.
    #[must_use]
    pub fn of(bytes: u64, stream: StreamId) -> Self {
        let (requested_bytes, rounded_bytes, segment_bytes) = (bytes, bytes, bytes);
        Self { stream, requested_bytes, rounded_bytes, segment_bytes, ..Self::default() }
    }

    /// Returns the size that the driver would have had to allocate, or the requested size if it is larger.
    fn tried_bytes(&self) -> u64 {
        self.segment_bytes.max(self.requested_bytes)
    }

    /// Returns the function that formats the sizes which are compared with the limit and with the free
    /// memory, so that no two sizes which differ are shown with the same text.
    pub(crate) fn bytes_in_reason(&self) -> fn(u64) -> String {
        let tried = self.tried_bytes();
        let after = |held_bytes: u64| held_bytes.saturating_add(tried);
        let held = [self.reserved_bytes, self.allocated_bytes].map(after);
        let pairs = held.map(|after| (Some(after), self.limit_bytes));
        let is_hidden =
            pairs.into_iter().chain([(Some(tried), self.device_free_bytes)]).any(|pair| {
                let (Some(left), Some(right)) = pair else { return false };
                bytes_that_compare(left, right)(left) != human_bytes(left)
            });
        if is_hidden { exact_bytes } else { human_bytes }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (h, compared) = (human_bytes, self.bytes_in_reason());
        if let Some(total) = self.device_total_bytes.filter(|total| self.requested_bytes > *total) {
            let h = bytes_that_compare(self.requested_bytes, total);
            let (asked, all) = (h(self.requested_bytes), h(total));
            writeln!(f, "out of memory on device {}: tried to allocate {asked}.", self.device)?;
            let why = "no setting makes room for this request";
            return writeln!(f, "The device has {all} in total: {why}.");
        }
        write!(f, "out of memory on device {}", self.device)?;
        // A report that was created from a driver error alone has no request.
        if self.requested_bytes > 0 {
            let tried = compared(self.tried_bytes());
            let asked = h(self.requested_bytes);
            write!(f, ": tried to allocate {tried} for a request of {asked}")?;
            if self.rounded_bytes > 0 {
                write!(f, " ({} rounded)", h(self.rounded_bytes))?;
            }
            write!(f, " on stream {}", self.stream)?;
        }
        writeln!(f, ".")?;
        if let (Some(free), Some(total)) = (self.device_free_bytes, self.device_total_bytes) {
            let free = compared(free);
            writeln!(f, "The device has {} in total, of which {free} is free.", h(total))?;
        }
        let has_cache = self.reserved_bytes > 0;
        let held = compared(self.allocated_bytes);
        match self.limit_bytes.map(compared) {
            Some(limit) if has_cache || self.allocated_bytes == 0 => {
                writeln!(f, "This allocator may reserve {limit}.")?;
            }
            Some(limit) => writeln!(f, "Callers may hold {limit} and hold {held}.")?,
            None => {}
        }
        if has_cache {
            writeln!(
                f,
                "It holds {}: {held} allocated, {} cached in large and {} in small pools, {} waiting \
                 for other streams.",
                compared(self.reserved_bytes),
                h(self.cached_large_bytes),
                h(self.cached_small_bytes),
                h(self.draining_bytes)
            )?;
        }
        if self.pool != PoolId::DEFAULT {
            writeln!(f, "The request was for pool {}.", self.pool)?;
        }
        if self.cached_private_bytes > 0 {
            let private = h(self.cached_private_bytes);
            writeln!(f, "Private pools hold {private} of the cached memory.")?;
        }
        for free in &self.free {
            writeln!(f, "{free}")?;
        }
        if self.free.is_empty() && self.cached_large_bytes + self.cached_small_bytes > 0 {
            writeln!(f, "The driver does not report the layout of the cached memory.")?;
        } else if self.free.is_empty() && has_cache {
            writeln!(f, "No block is free.")?;
        }
        if let Some(driver) = &self.driver {
            writeln!(f, "Driver error: {driver}.")?;
        }
        for holder in &self.holders {
            let this = if holder.is_this_process() { " (this one)" } else { "" };
            let (process, held) = (holder.process, h(holder.used_bytes));
            writeln!(f, "Process {process}{this} holds {held} of the device.")?;
        }
        for live in &self.live {
            writeln!(f, "Live: {live}")?;
        }
        if let Some(configuration) = &self.configuration {
            writeln!(f, "In force: {configuration}")?;
        }
        match &self.snapshot {
            Some(Ok(path)) => writeln!(f, "Snapshot: {}", path.display())?,
            Some(Err(why)) => writeln!(f, "Snapshot: not written: {why}")?,
            None => {}
        }
        for hint in &self.hints {
            writeln!(f, "Hint: {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Display for FreeRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let h = human_bytes;
        write!(f, "Free on stream {}", self.stream)?;
        if self.pool != PoolId::DEFAULT {
            write!(f, " of pool {}", self.pool)?;
        }
        write!(f, ": {}", h(self.bytes))?;
        if self.ranges > 1 {
            write!(f, " in {} ranges, the largest {}", self.ranges, h(self.largest_bytes))?;
        }
        match self.between_blocks {
            0 => f.write_str("."),
            1 => write!(f, ", beside a block in use of {}.", h(self.between_bytes)),
            n => write!(f, ", beside {n} blocks in use of {} in total.", h(self.between_bytes)),
        }
    }
}
