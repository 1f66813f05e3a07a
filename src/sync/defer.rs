//! A function call at the end of a scope.

/// Calls its function when it is dropped, also when the scope ends with a panic.
#[must_use = "dropping it calls the function"]
pub struct Defer<A: FnMut()>(pub A);

impl<A: FnMut()> Drop for Defer<A> {
    fn drop(&mut self) {
        (self.0)();
    }
}
