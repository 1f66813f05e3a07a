//! A lock for the hot path, whose release is a plain store.
//!
//! A lock that wakes waiting threads must find out at its release whether any thread waits, which takes an
//! atomic read-modify-write: half of the cost of an uncontended lock. This lock wakes no thread. A thread
//! that waits spins, then yields, then sleeps, and begins again. Each sleep takes twice as long as the one
//! before, up to [`SLEEP_MAX`]. So a thread may notice the release late, by about as much as it has waited
//! but at most 1 ms. Threads get the lock in no particular order.
//!
//! It is for state that threads mostly hold for less than a microsecond. The event queue is held longer
//! while the driver is asked for its events, about half a microsecond for each.

use std::time::Duration;

use parking_lot::lock_api::{GuardNoSend, Mutex, MutexGuard, RawMutex};

use super::platform::{AtomicBool, Ordering, sleep, spin_loop, yield_now};

/// A value with such a lock.
pub(crate) type ShortLock<T> = Mutex<RawShortLock, T>;
/// The access of the thread that holds the lock.
pub(crate) type ShortGuard<'a, T> = MutexGuard<'a, RawShortLock, T>;

/// The lock without a value.
#[derive(Debug)]
pub(crate) struct RawShortLock {
    is_held: AtomicBool,
}

/// How often a waiting thread spins, first 2 times, then 4, up to 64.
const SPINS: u32 = 6;
/// How often it then yields, before it sleeps.
const YIELDS: u32 = 16;
const SLEEP_MIN: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_millis(1);

// SAFETY: only the thread whose `try_lock` changed `is_held` from false to true holds the lock, until its
// `unlock`. The exchange acquires what the store of the last `unlock` released.
unsafe impl RawMutex for RawShortLock {
    const INIT: Self = Self { is_held: AtomicBool::new(false) };

    type Guard = GuardNoSend;

    #[inline(always)]
    fn lock(&self) -> GuardNoSend {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    #[inline(always)]
    fn try_lock(&self) -> Option<GuardNoSend> {
        let (free, held) = (false, true);
        let result =
            self.is_held.compare_exchange(free, held, Ordering::Acquire, Ordering::Relaxed);
        result.is_ok().then(GuardNoSend::new)
    }

    #[inline(always)]
    unsafe fn unlock(&self, _guard: GuardNoSend) {
        self.is_held.store(false, Ordering::Release);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.is_held.load(Ordering::Relaxed)
    }
}

impl RawShortLock {
    /// Waits until this thread holds the lock.
    #[cold]
    #[inline(never)]
    fn wait(&self) -> GuardNoSend {
        let mut tries = 0;
        let mut pause = SLEEP_MIN;
        loop {
            tries += 1;
            if tries <= SPINS {
                (0..1 << tries).for_each(|_| spin_loop());
            } else if tries <= SPINS + YIELDS {
                yield_now();
            } else {
                sleep(pause);
                pause = (pause * 2).min(SLEEP_MAX);
                tries = 0;
            }
            // While the lock is held, loads disturb its holder less than exchanges.
            if !self.is_locked()
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        let (threads, rounds) = (4, if cfg!(miri) { 20 } else { 20_000 });
        let count = ShortLock::new((0, 0));
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let mut count = count.lock();
                        assert_eq!(count.0, count.1);
                        count.0 += 1;
                        spin_loop();
                        count.1 += 1;
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), (threads * rounds, threads * rounds));
    }

    #[test]
    fn a_thread_waits_until_the_holder_releases_the_lock() {
        let lock = ShortLock::new(1);
        thread::scope(|scope| {
            let mut held = lock.lock();
            let waiting = scope.spawn(|| *lock.lock());
            assert!(lock.try_lock().is_none());
            // Long enough that the other thread sleeps.
            thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            *held = 2;
            drop(held);
            assert_eq!(waiting.join().unwrap(), 2);
        });
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn a_panic_of_the_holder_releases_the_lock() {
        let lock = ShortLock::new(());
        let panics = std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("as planned");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(!lock.is_locked());
    }
}
