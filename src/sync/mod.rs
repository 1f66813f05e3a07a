//! State that threads share: what they read without a lock, and locks.
//!
//! `Swap` holds a value that is read at every call and replaced rarely. A reader stores the value's
//! address in a slot of its thread (`slots`), with a plain store. The writer, which is rare, executes a
//! barrier on all threads (`barrier`), so readers need none. [`Global`] is a process-wide lock. `Quota`
//! is a byte limit that all threads share. `OnceArc` is a value that is set once; a `GrowingMap` finds such
//! values by number. `ShortLock` is the lock of the hot path. [`Defer`] calls a function at the end of a
//! scope. None of these depends on the type of the value.
//!
//! `tests/models` runs these files in every order of threads that loom can construct.
//!
//! Unsafe code: the dereferences of `Swap` and `OnceArc`, the lock's implementation of `RawMutex`, two system
//! calls, and the walk over the calling thread's stack.

#![expect(unsafe_code, reason = "references that no lock guards, a lock, and calls of the kernel")]

mod barrier;
mod defer;
mod exit;
mod global;
mod growing;
mod once;
mod platform;
mod quota;
mod short_lock;
mod slots;
mod swap;
#[cfg(feature = "stacks")]
mod walk;

#[doc(hidden)]
pub use defer::Defer;
pub(crate) use exit::at_exit;
pub use global::hold_all;
#[doc(hidden)]
pub use global::{Global, Rank};
pub(crate) use growing::GrowingMap;
pub(crate) use once::OnceArc;
pub(crate) use quota::Quota;
pub(crate) use short_lock::{ShortGuard, ShortLock};
pub(crate) use swap::{All, Read, Swap};
#[cfg(feature = "stacks")]
pub(crate) use walk::walk;
