//! What holds without a device; with one see `tests/cuda.rs`.

use super::Cuda;
use crate::error::DriverErrorKind;
use crate::ids::DeviceId;

#[test]
fn a_machine_without_a_driver_says_so() {
    match Cuda::count() {
        Ok(count) => assert!(Cuda::open(DeviceId(count)).is_err(), "there are {count}"),
        Err(error) => {
            assert_eq!(error.kind, DriverErrorKind::NotSupported);
            assert!(!error.message.is_empty(), "{error}");
            assert_eq!(Cuda::open(DeviceId(0)).unwrap_err(), error);
        }
    }
}
