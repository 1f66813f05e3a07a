//! Two fences that order a store before a load: a light one for the side that runs often, and a heavy
//! one for the side that runs rarely.
//!
//! On Linux, the heavy fence is membarrier(2), which makes every running thread of the process execute
//! a full fence. So the light fence only has to stop the compiler from reordering. On other systems,
//! and where the kernel refuses to register the process, both are full fences. The choice is made once
//! per process.
//!
//! Source: membarrier(2), `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.

use std::sync::OnceLock;

use super::platform::{Ordering, compiler_fence, fence, membarrier};

/// Returns true if [`light`] needs no processor fence. The result never changes.
pub(super) fn is_asymmetric() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(membarrier::register)
}

/// Orders this thread's earlier stores before its later loads, with respect to threads that call
/// [`heavy`]. `asymmetric` is the result of [`is_asymmetric`].
#[inline]
pub(super) fn light(asymmetric: bool) {
    if asymmetric {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// Orders this thread's earlier stores before its later loads, with respect to threads that call
/// [`light`]. Returns false if the kernel refused the call. In that case nothing is ordered.
pub(super) fn heavy() -> bool {
    fence(Ordering::SeqCst);
    !is_asymmetric() || membarrier::order_all()
}
