//! User-defined allocators, three ways: a Rust type with keys of its own, closures, a shared library.
//!
//! `registered` has the registry and the keys, `closures` what the framework does around a user's
//! functions, `captures` what it leaves alone beside one, `pools` private pools over them, `per_thread` a
//! stream that is another one on each thread, `histories` all at random, `library` loads compiled C and
//! C++, `hostile` loads what cannot be loaded.

mod captures;
mod closures;
mod histories;
#[cfg(all(feature = "pluggable", target_os = "linux"))]
mod hostile;
#[cfg(all(feature = "pluggable", target_os = "linux"))]
mod library;
mod per_thread;
mod pools;
mod registered;

use crate::common::prelude::*;

/// A simulated device whose events finish when the test says so.
fn sim() -> Arc<Sim> {
    Arc::new(Sim::new(SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() }))
}

/// What a configuration string builds, on a device of its own.
fn build(text: &str) -> Result<Strategy, BuildError> {
    let config = config(text);
    registry::build(&config, sim(), BuildOptions::default())
}

/// A user who hands out numbers, remembers what he was told, and has so many bytes.
#[derive(Debug, Default)]
struct User {
    said: Mutex<Vec<String>>,
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

    fn say(&self, word: String) {
        self.said.lock().push(word);
    }

    /// What he was told since the last question.
    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.said.lock())
    }

    fn callbacks(self: &Arc<Self>) -> Callbacks {
        let (a, f) = (Arc::clone(self), Arc::clone(self));
        let allocate = move |bytes, _, stream| {
            let live = a.live_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if live > a.most_bytes.load(Ordering::Relaxed) {
                a.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
                return None;
            }
            a.say(format!("alloc {bytes} {stream}"));
            Some(a.next.fetch_add(bytes.next_multiple_of(512), Ordering::Relaxed))
        };
        let free = move |_, bytes, _, stream| {
            f.say(format!("free {bytes} {stream}"));
            f.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        };
        Callbacks::new(allocate, free)
    }
}

/// The user's functions over a device.
fn over(driver: Arc<dyn Driver>, callbacks: Callbacks) -> PluggableAllocator {
    PluggableAllocator::new("mine", driver, callbacks, &Settings::default(), 1)
}
