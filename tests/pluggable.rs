//! User-defined allocators in three forms: a Rust type with its own keys, closures, a shared library.
//!
//! `registered` tests the registry and the keys, `closures` what the library adds around a user's
//! functions, `captures` graph captures, `pools` private pools, `per_thread` the per-thread default
//! stream, and `histories` random histories. `library` loads compiled C and C++. `hostile` tests
//! libraries that cannot be loaded.

mod captures;
mod closures;
mod histories;
#[cfg(target_os = "linux")]
mod hostile;
#[cfg(target_os = "linux")]
mod library;
mod per_thread;
mod pools;
mod registered;

use crate::common::prelude::*;

/// Returns a simulated device whose events finish when the test completes them or a call waits for them.
fn sim() -> Arc<Sim> {
    Arc::new(Sim::new(SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() }))
}

/// Builds an allocator from a configuration string, on a new device.
fn build(text: &str) -> Result<Strategy, BuildError> {
    let config = config(text);
    registry::build(&config, sim(), BuildOptions::default())
}

/// A user's functions. They return made-up addresses, record each call, and fail beyond `most_bytes`.
#[derive(Debug, Default)]
struct User {
    calls: Mutex<Vec<String>>,
    live_bytes: AtomicU64,
    most_bytes: AtomicU64,
    next: AtomicU64,
}

impl User {
    fn with_bytes(most: u64) -> Arc<Self> {
        let user = Self::default();
        user.most_bytes.store(most, Ordering::Relaxed);
        user.next.store(1 << 40, Ordering::Relaxed);
        Arc::new(user)
    }

    fn record_call(&self, word: String) {
        self.calls.lock().push(word);
    }

    /// Returns the calls recorded since this was last called.
    fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    fn callbacks(self: &Arc<Self>) -> Callbacks {
        let (a, f) = (Arc::clone(self), Arc::clone(self));
        let allocate = move |bytes, _, stream| {
            let live = a.live_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if live > a.most_bytes.load(Ordering::Relaxed) {
                a.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
                return None;
            }
            a.record_call(format!("alloc {bytes} {stream}"));
            Some(a.next.fetch_add(bytes.next_multiple_of(512), Ordering::Relaxed))
        };
        let free = move |_, bytes, _, stream| {
            f.record_call(format!("free {bytes} {stream}"));
            f.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        };
        Callbacks::new(allocate, free)
    }
}

/// Returns an allocator with the user's functions on a device.
fn over(driver: Arc<dyn Driver>, callbacks: Callbacks) -> PluggableAllocator {
    PluggableAllocator::new("mine", driver, callbacks, &Settings::default(), 1)
}
