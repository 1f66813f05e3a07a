//! `backend:pinned`, called by a program that announces each stream that it uses.
//!
//! For that backend only announced streams count. The suite uses a block on the stream of its request without
//! announcing it, so this allocator announces that stream.

use stratalloc_conformance::configured;

use crate::common::prelude::*;

#[derive(Debug)]
struct Announcing(Box<dyn DeviceAllocator>);

/// Returns a constructor of `backend:pinned` with further keys.
pub(crate) fn pinned(keys: &str) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync {
    let text = format!("backend:pinned,{keys}");
    move |driver| Ok(Box::new(Announcing(configured(&text)(driver)?)))
}

impl DeviceAllocator for Announcing {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let allocation = self.0.allocate(request)?;
        let cross = self.0.control().cross_stream.expect("the backend has it");
        match cross.record_stream(&allocation, request.stream) {
            Ok(()) => Ok(allocation),
            Err(HandleError::Driver(error)) => {
                self.0.free(allocation).expect("no stream uses it");
                Err(error.into())
            }
            Err(error) => panic!("the block is live: {error}"),
        }
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.0.free(allocation)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.0.free_raw(address)
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.0.record_stream_raw(address, stream)
    }

    fn control(&self) -> Control<'_> {
        self.0.control()
    }
}
