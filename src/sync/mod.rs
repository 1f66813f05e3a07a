//! State that threads share and read without a lock.
//!
//! `Swap` holds a value that is read at every call and replaced rarely. A reader stores the value's
//! address in a slot of its thread (`slots`), with a plain store. The writer, which is rare, executes a
//! barrier on all threads (`barrier`), so readers need none. [`Global`] is a process-wide lock. `Quota`
//! is a byte limit that all threads share. `OnceArc` is a value that is set once. [`Defer`] calls a
//! function at the end of a scope. None of these depends on the type of the value.
//!
//! Unsafe code: the dereferences of `Swap` and `OnceArc`, two system calls, and the walk over the calling
//! thread's stack.

#![expect(unsafe_code, reason = "a reference that no lock guards, and a call of the kernel")]

mod barrier;
mod defer;
mod exit;
mod global;
mod once;
mod quota;
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
pub(crate) use once::OnceArc;
pub(crate) use quota::Quota;
pub(crate) use swap::{All, Read, Swap};
#[cfg(feature = "stacks")]
pub(crate) use walk::walk;
