//! A function call at the end of a scope.

/// Calls its function when it is dropped, including when a panic unwinds the scope.
#[must_use = "dropping it calls the function"]
pub struct Defer<A: FnMut()>(pub A);

impl<A: FnMut()> Drop for Defer<A> {
    fn drop(&mut self) {
        (self.0)();
    }
}
