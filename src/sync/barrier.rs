//! Two fences that order a store before a load: a light one for those who do it often, a heavy one for
//! those who do it rarely.
//!
//! On Linux the kernel can make every thread of the process pass a full fence at the writer's request;
//! then the light side is a fence for the compiler only, which saves 5 ns (AMD EPYC). Elsewhere, and where
//! the kernel refuses at the start, both are full fences. One decision for the life of the process.
//!
//! Source: membarrier(2), `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence, fence};

/// Whether the kernel takes the light side's part. The same answer for ever.
pub(super) fn is_asymmetric() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(kernel::register)
}

/// Orders what this thread stored before what it loads next, given that the other side is
/// [`heavy`]. `asymmetric` is what [`is_asymmetric`] answered.
#[inline]
pub(super) fn light(asymmetric: bool) {
    if asymmetric {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// Orders what this thread stored before what it loads next, against every [`light`] of other threads.
/// False if the kernel refused now: then nothing is ordered.
pub(super) fn heavy() -> bool {
    fence(Ordering::SeqCst);
    !is_asymmetric() || kernel::order_all()
}

#[cfg(all(target_os = "linux", not(miri)))]
mod kernel {
    fn call(command: libc::c_int) -> bool {
        // SAFETY: the call takes three numbers and touches no memory of ours.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        answer == 0
    }

    pub(super) fn register() -> bool {
        call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
    }

    pub(super) fn order_all() -> bool {
        call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod kernel {
    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn order_all() -> bool {
        false
    }
}
