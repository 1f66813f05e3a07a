//! The atomics, locks and calls of the system that the structures of this folder are made of.
//!
//! `tests/models` compiles the same structures with a module of the same names over loom, which runs every
//! order in which threads can execute them.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
};
pub(super) use std::thread::{sleep, yield_now};
pub(super) use std::thread_local;

pub(super) use parking_lot::{Mutex, RwLock};

/// Calls of membarrier(2). Each returns false if the kernel has refused.
#[cfg(all(target_os = "linux", not(miri)))]
pub(super) mod membarrier {
    fn call(command: libc::c_int) -> bool {
        // SAFETY: the call takes three numbers, and accesses no memory of the process.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        answer == 0
    }

    pub(in crate::sync) fn register() -> bool {
        call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
    }

    pub(in crate::sync) fn order_all() -> bool {
        call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(super) mod membarrier {
    pub(in crate::sync) fn register() -> bool {
        false
    }

    pub(in crate::sync) fn order_all() -> bool {
        false
    }
}
