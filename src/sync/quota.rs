//! A byte limit that threads charge without writing to shared memory while many bytes are free.
//!
//! Each thread reserves a **part** of the free bytes and changes it with plain stores. A thread
//! acquires the lock only when its part is too small or has become large. If the bytes outside all
//! parts are too few as well, the thread collects all parts, and executes the heavy fence of `barrier`
//! for that. As long as bytes are scarce after that, every call acquires the lock. So the limit is
//! exact: it is never exceeded, and a request is refused only if it does not fit.

use super::platform::{AtomicBool, AtomicU64, Mutex, Ordering, yield_now};
use super::{barrier, slots};

/// The number of threads that may have a part. Further threads always acquire the lock.
const PARTS: usize = 64;
/// The largest part is the limit divided by this.
const PART_SHARE: u64 = 128;
/// Bytes are plentiful again when the limit divided by this is free.
const PLENTY_SHARE: u64 = 4;

/// The free bytes that one thread has reserved. Aligned, so that no two parts share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    /// Whether the part's thread may be changing it now.
    is_changing: AtomicBool,
    free_bytes: AtomicU64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Quota {
    limit_bytes: u64,
    part_max_bytes: u64,
    /// True while bytes are scarce: threads must not change their parts. Changed under the lock.
    is_scarce: AtomicBool,
    parts: Box<[Part]>,
    /// Bytes held by callers plus bytes reserved in parts.
    out_bytes: Mutex<u64>,
}

impl Quota {
    /// Creates a quota with all bytes free.
    pub(crate) fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            part_max_bytes: limit_bytes / PART_SHARE,
            is_scarce: AtomicBool::default(),
            parts: (0..PARTS).map(|_| Part::default()).collect(),
            out_bytes: Mutex::new(0),
        }
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Returns the bytes that callers hold. Exact when no call overlaps.
    pub(crate) fn held_bytes(&self) -> u64 {
        let out = self.out_bytes.lock();
        let free = |part: &Part| part.free_bytes.load(Ordering::Relaxed);
        out.saturating_sub(self.parts.iter().map(free).sum())
    }

    /// Takes bytes from the quota.
    ///
    /// # Errors
    ///
    /// The bytes that are already held, if taking `bytes` would exceed the limit.
    #[inline]
    pub(crate) fn take(&self, bytes: u64) -> Result<(), u64> {
        if self.change_part(|free| free.checked_sub(bytes)) {
            return Ok(());
        }
        self.take_from_rest(bytes)
    }

    /// Returns bytes to the quota.
    #[inline]
    pub(crate) fn put_back(&self, bytes: u64) {
        if !self.change_part(|free| self.as_part(free, bytes)) {
            self.return_to_rest(bytes);
        }
    }

    /// Takes bytes from the quota even if that exceeds the limit.
    pub(crate) fn force(&self, bytes: u64) {
        let mut out = self.out_bytes.lock();
        *out = out.saturating_add(bytes);
    }

    fn as_part(&self, free: u64, more: u64) -> Option<u64> {
        free.checked_add(more).filter(|sum| *sum <= self.part_max_bytes)
    }

    /// Replaces the calling thread's part by the result of `change`. Returns false if `change` returns
    /// `None`, or if the thread has no part or may not change it now.
    #[inline]
    fn change_part(&self, change: impl FnOnce(u64) -> Option<u64>) -> bool {
        let Some(slot) = slots::own() else {
            return false;
        };
        let Some(part) = self.parts.get(slot.number) else {
            return false;
        };
        part.is_changing.store(true, Ordering::Relaxed);
        // Pairs with the barrier in `collect`. Either `collect` sees `is_changing`, or this thread sees
        // `is_scarce`.
        barrier::light(slot.is_asymmetric());
        let next = match self.is_scarce.load(Ordering::Acquire) {
            true => None,
            false => change(part.free_bytes.load(Ordering::Relaxed)),
        };
        if let Some(next) = next {
            part.free_bytes.store(next, Ordering::Relaxed);
        }
        part.is_changing.store(false, Ordering::Release);
        next.is_some()
    }

    #[cold]
    #[inline(never)]
    fn take_from_rest(&self, bytes: u64) -> Result<(), u64> {
        let mut out = self.out_bytes.lock();
        let with =
            |sum: u64, more: u64| sum.checked_add(more).filter(|sum| *sum <= self.limit_bytes);
        if !self.is_scarce.load(Ordering::Relaxed) {
            let more = self.part_max_bytes / 2;
            if let Some(sum) = with(*out, bytes).filter(|sum| with(*sum, more).is_some()) {
                let keeps = self.change_part(|free| self.as_part(free, more));
                *out = if keeps { sum + more } else { sum };
                return Ok(());
            }
            self.collect(&mut out);
        }
        let taken = with(*out, bytes).ok_or(*out);
        *out = taken.unwrap_or(*out);
        self.check_scarcity(*out);
        taken.map(drop)
    }

    #[cold]
    #[inline(never)]
    fn return_to_rest(&self, bytes: u64) {
        let mut out = self.out_bytes.lock();
        let mut returned = bytes;
        self.change_part(|free| {
            returned += free - free / 2;
            Some(free / 2)
        });
        *out = out.saturating_sub(returned);
        self.check_scarcity(*out);
    }

    /// Sets all parts to 0 and forbids changes to them, so that all free bytes are outside parts. Waits
    /// for threads that are changing their part.
    fn collect(&self, out: &mut u64) {
        self.is_scarce.store(true, Ordering::SeqCst);
        if !barrier::heavy() {
            // The kernel refused the barrier. The parts stay, and their bytes count as held.
            self.is_scarce.store(false, Ordering::Release);
            return;
        }
        for part in &self.parts {
            while part.is_changing.load(Ordering::Acquire) {
                yield_now();
            }
            *out = out.saturating_sub(part.free_bytes.swap(0, Ordering::Relaxed));
        }
    }

    /// Allows parts again if enough bytes are free. The caller holds the lock.
    fn check_scarcity(&self, out: u64) {
        let free = self.limit_bytes.saturating_sub(out);
        if free >= self.limit_bytes / PLENTY_SHARE && self.is_scarce.load(Ordering::Relaxed) {
            self.is_scarce.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn one_thread_gets_all_of_it_and_not_a_byte_more() {
        let quota = Quota::new(1000);
        assert_eq!(quota.take(600), Ok(()));
        assert_eq!(quota.take(401), Err(600));
        assert_eq!(quota.take(u64::MAX), Err(600));
        assert_eq!(quota.take(400), Ok(()));
        assert_eq!((quota.take(1), quota.held_bytes()), (Err(1000), 1000));
        quota.force(50);
        assert_eq!((quota.take(0), quota.held_bytes()), (Err(1050), 1050));
        quota.put_back(650);
        assert_eq!((quota.take(600), quota.held_bytes()), (Ok(()), 1000));
    }

    #[test]
    fn free_bytes_of_one_thread_are_available_to_another() {
        let (quota, turn) = (Quota::new(1 << 20), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                quota.take(100).unwrap();
                quota.put_back(100);
                assert!(*quota.out_bytes.lock() > 0, "the thread keeps a part");
                turn.wait();
                turn.wait();
                assert_eq!(quota.take(1), Err(1 << 20));
                turn.wait();
                turn.wait();
                assert_eq!(quota.take(1), Ok(()));
            });
            turn.wait();
            assert_eq!(quota.held_bytes(), 0);
            assert_eq!(quota.take(1 << 20), Ok(()));
            turn.wait();
            turn.wait();
            quota.put_back(1 << 20);
            turn.wait();
        });
        assert_eq!(quota.held_bytes(), 1);
    }

    /// Runs four threads, each of which allocates up to `share_bytes`, frees everything, and starts
    /// again. Returns the number of refused requests. No thread frees anything before all threads have
    /// allocated their share once. So requests are refused if the four shares exceed the limit.
    fn crowd(limit_bytes: u64, share_bytes: u64, block_max_bytes: u64) -> u64 {
        let quota = Quota::new(limit_bytes);
        let (held, held_peak, refused) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let all_are_full = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (quota, held, held_peak) = (&quota, &held, &held_peak);
                let (refused, all_are_full) = (&refused, &all_are_full);
                scope.spawn(move || {
                    let (mut random, mut own, mut taken) = (thread + 1_u64, 0, Vec::new());
                    let (mut fills, mut first) = (true, true);
                    for _ in 0..100_000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let bytes = (random >> 40) % block_max_bytes + 1;
                        if !fills {
                            if std::mem::take(&mut first) {
                                all_are_full.wait();
                            }
                            let bytes = taken.pop().unwrap_or(0);
                            own -= bytes;
                            held.fetch_sub(bytes, Ordering::SeqCst);
                            quota.put_back(bytes);
                            fills = taken.is_empty();
                        } else if own + bytes > share_bytes {
                            fills = false;
                        } else if quota.take(bytes).is_ok() {
                            let sum = held.fetch_add(bytes, Ordering::SeqCst) + bytes;
                            held_peak.fetch_max(sum, Ordering::SeqCst);
                            own += bytes;
                            taken.push(bytes);
                        } else {
                            refused.fetch_add(1, Ordering::Relaxed);
                            fills = false;
                        }
                    }
                    held.fetch_sub(own, Ordering::SeqCst);
                    taken.iter().for_each(|bytes| quota.put_back(*bytes));
                });
            }
        });
        let held_peak = held_peak.into_inner();
        assert!(held_peak <= limit_bytes, "{held_peak} bytes were held");
        assert_eq!(quota.held_bytes(), 0);
        refused.into_inner()
    }

    #[test]
    fn requests_are_refused_only_if_they_do_not_fit_and_the_limit_holds() {
        assert_eq!(crowd(4_000_000, 1_000_000, 300_000), 0);
        assert_eq!(crowd(4_000_000, 1_000_000, 4_000), 0);
        assert_eq!(crowd(4_000, 1_000, 10), 0);
        assert!(crowd(4_000_000, 3_000_000, 4_000) > 0);
    }
}
