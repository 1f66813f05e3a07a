//! What threads share and read without a lock.
//!
//! [`Swap`] holds a value that is read at every call and replaced rarely. Readers announce themselves in
//! a slot of their thread (`slots`) with plain stores; the writer pays for both sides (`barrier`). Nothing
//! here knows what the value is. The only unsafe parts are one dereference and one system call.

#![expect(unsafe_code, reason = "a reference that no lock guards, and a call of the kernel")]

mod barrier;
mod slots;
mod swap;

pub(crate) use swap::{All, Read, Swap};
