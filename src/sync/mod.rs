//! What threads share and read without a lock.
//!
//! [`Swap`] holds a value that is read at every call and replaced rarely. Readers announce themselves in
//! a slot of their thread (`slots`) with plain stores; the writer pays for both sides (`barrier`). Nothing
//! here knows what the value is. The only unsafe parts are one dereference, two
//! calls of the system, and the walk over a thread's own stack.
//! [`Global`] is the lock of what the whole process shares. [`Quota`] is a number of bytes that all threads
//! take from. [`Defer`] calls a function at the end of a scope.

#![expect(unsafe_code, reason = "a reference that no lock guards, and a call of the kernel")]

mod barrier;
mod defer;
mod exit;
mod global;
mod quota;
mod slots;
mod swap;
#[cfg(feature = "stacks")]
mod walk;

pub(crate) use defer::Defer;
pub(crate) use exit::at_exit;
#[cfg(feature = "ffi")]
pub(crate) use global::hold_all;
pub(crate) use global::{Global, Rank};
pub(crate) use quota::Quota;
pub(crate) use swap::{All, Read, Swap};
#[cfg(feature = "stacks")]
pub(crate) use walk::walk;
