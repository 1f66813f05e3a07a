//! A device without its optional parts: no virtual memory, no pools, no capture.

use std::sync::Arc;

use stratalloc::driver::{Intercepted, Interceptor, Parts};

/// A device of type `D` that hides its optional parts.
pub(crate) type Plain<D> = Intercepted<Arc<D>, NoParts>;

pub(crate) fn plain<D>(inner: Arc<D>) -> Arc<Plain<D>> {
    Arc::new(Intercepted::with(inner, NoParts))
}

#[derive(Debug)]
pub(crate) struct NoParts;

impl Interceptor for NoParts {
    fn parts<'a>(&'a self, _: Parts<'a>) -> Parts<'a> {
        Parts::default()
    }
}
