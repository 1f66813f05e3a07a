//! A cudarc slice over memory that cudarc does not free.
//!
//! cudarc's functions take a `CudaSlice`, or types that implement its traits. [`CudaVec`] is a
//! `CudaSlice` together with a keeper: an object that owns the memory and keeps the stream alive. The
//! drop of a `CudaVec` first leaks the slice. That makes the stream wait for the slice's last reader
//! and writer, which cudarc tracks, and frees nothing. Then it drops the keeper, so the slice's
//! reference to the stream is dropped first.
//!
//! To learn a slice's address, this file does not call `device_ptr`: cudarc would count that as a read
//! and forget the previous reader. Only the implementations of `DevicePtr` and `DevicePtrMut` call it, for
//! callers that use the memory.
#![expect(unsafe_code, reason = "cudarc's contracts for slices and kernel arguments")]

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    LaunchArgs, PushKernelArg, SyncOnDrop, sys,
};

use super::api::{api, got, kind_of};
use crate::driver::{DeviceInfo, DriverResult};
use crate::error::DriverError;
use crate::ids::{DeviceId, StreamId};

/// Returns the id of a cudarc stream.
#[must_use]
pub fn stream_of(stream: &CudaStream) -> StreamId {
    StreamId(stream.cu_stream() as u64)
}

/// Returns whether a stream belongs to the primary context of the driver's device.
pub(crate) fn is_on(info: &DeviceInfo, stream: &CudaStream) -> DriverResult<bool> {
    is_primary_context(info, stream.context().cu_ctx() as u64, primary_context)
}

fn is_primary_context(
    info: &DeviceInfo,
    context: u64,
    primary: impl FnOnce(DeviceId) -> DriverResult<u64>,
) -> DriverResult<bool> {
    Ok(info.driver == "cuda" && primary(info.device)? == context)
}

/// Returns the handle of a device's primary context. It does not change as long as the context is
/// retained.
fn primary_context(device: DeviceId) -> DriverResult<u64> {
    let (api, ordinal) = (api()?, i32::try_from(device.0).unwrap_or(i32::MAX));
    let handle = got(|handle| api.device_get(handle, ordinal))?;
    let context = got(|context| api.context_retain(context, handle))?;
    api.context_release(handle).ok()?;
    Ok(context)
}

/// Returns the address of a slice, and the slice. Leaking the slice in between makes its stream wait for
/// all uses that cudarc tracks.
pub(crate) fn with_address<T>(slice: CudaSlice<T>) -> DriverResult<(u64, CudaSlice<T>)> {
    let (stream, len) = (Arc::clone(slice.stream()), slice.len());
    can_make_events(&stream)?;
    let address = slice.leak();
    // SAFETY: `leak` has just given up the memory, so nothing else owns it. It has room for `len`
    // values.
    Ok((address, unsafe { stream.upgrade_device_ptr(address, len) }))
}

/// Returns an error if cudarc cannot create events. cudarc panics if it cannot create the events of a
/// slice, which happens on a lost device or when cudarc has kept an earlier error.
fn can_make_events(stream: &CudaStream) -> DriverResult<()> {
    let made = stream.context().new_event(None).map(drop);
    made.map_err(|cudarc::driver::DriverError(code)| {
        let message = "cudarc cannot create an event".to_owned();
        let code = code as u32;
        DriverError::new(kind_of(code), "cuEventCreate", i64::from(code), message)
    })
}

/// A buffer for cudarc's functions. It dereferences to a `CudaSlice`, and can be passed to kernels,
/// cuBLAS and similar libraries.
pub struct CudaVec<T> {
    address: u64,
    /// `Some` until the drop.
    slice: Option<CudaSlice<T>>,
    /// Owns the memory and keeps the slice's stream alive. Dropped after the slice.
    keeps: Option<Box<dyn Any + Send + Sync>>,
}

impl<T> CudaVec<T> {
    /// Creates a slice of `len` values at `address`. The slice is valid as long as `keeps` lives, so
    /// `keeps` must also keep the stream alive.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when cudarc cannot create events. `keeps` is dropped then.
    pub(crate) fn over(
        stream: &Arc<CudaStream>,
        address: u64,
        len: usize,
        keeps: Box<dyn Any + Send + Sync>,
    ) -> DriverResult<Self> {
        can_make_events(stream)?;
        // SAFETY: the memory is valid as long as `keeps`, which is dropped after the slice. The slice
        // never frees it, because the drop leaks the slice.
        let slice = unsafe { stream.upgrade_device_ptr(address, len) };
        Ok(Self { address, slice: Some(slice), keeps: Some(keeps) })
    }

    fn inside(&self) -> &CudaSlice<T> {
        self.slice.as_ref().expect("the slice is present until the drop")
    }

    fn inside_mut(&mut self) -> &mut CudaSlice<T> {
        self.slice.as_mut().expect("the slice is present until the drop")
    }

    /// Returns the device address of the first value.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns a mutable cudarc view of all values.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.inside_mut().as_view_mut()
    }

    /// Returns a cudarc view of all values.
    #[must_use]
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.inside().as_view()
    }

    /// Leaks the slice and returns the owner of the memory. The slice's stream waits for the slice's
    /// readers and writers.
    pub(crate) fn into_keeper(mut self) -> Box<dyn Any + Send + Sync> {
        self.keeps.take().expect("the keeper is present until the drop")
    }
}

impl<T> Drop for CudaVec<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            let _address = slice.leak();
        }
    }
}

impl<T> Deref for CudaVec<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.inside()
    }
}

impl<T> fmt::Debug for CudaVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaVec").field("len", &self.inside().len()).finish_non_exhaustive()
    }
}

impl<T> DeviceSlice<T> for CudaVec<T> {
    fn len(&self) -> usize {
        self.inside().len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.inside().stream()
    }
}

impl<T> DevicePtr<T> for CudaVec<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.inside().device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for CudaVec<T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.inside_mut().device_ptr_mut(stream)
    }
}

// SAFETY: pushes the inner slice as the argument. The slice lives as long as the reference to the
// `CudaVec`.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b CudaVec<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, vec: &'b CudaVec<T>) -> &mut Self {
        self.arg(vec.inside())
    }
}

// SAFETY: as for the shared reference above.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b mut CudaVec<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, vec: &'b mut CudaVec<T>) -> &mut Self {
        self.arg(vec.inside_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_streams_of_the_devices_primary_context_are_its_own() {
        let info = |driver| DeviceInfo {
            device: DeviceId(3),
            name: String::new(),
            driver,
            total_bytes: 0,
        };
        let primary = |device: DeviceId| Ok(0x100 + u64::from(device.0));
        assert_eq!(is_primary_context(&info("cuda"), 0x103, primary), Ok(true));
        assert_eq!(is_primary_context(&info("cuda"), 0x102, primary), Ok(false));
        assert_eq!(is_primary_context(&info("sim"), 0x103, primary), Ok(false));
    }
}
