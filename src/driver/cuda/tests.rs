//! Tests that need no device. Tests that need one are in `tests/cuda.rs`.

use super::api::Api;
use super::{Abilities, Cuda, DeviceInfo};
use crate::error::DriverErrorKind;
use crate::ids::DeviceId;
use crate::size::MIB;

#[test]
fn a_machine_without_a_driver_is_an_error() {
    match Cuda::count() {
        Ok(count) => assert!(Cuda::open(DeviceId(count)).is_err(), "there are {count}"),
        Err(error) => {
            assert_eq!(error.kind(), DriverErrorKind::NotSupported);
            assert!(!error.message().is_empty(), "{error}");
            assert_eq!(Cuda::open(DeviceId(0)).unwrap_err(), error);
        }
    }
}

/// Defines a function that returns a fake library. Each listed function of the library evaluates the
/// given expression.
macro_rules! library {
    ($($name:ident($($argument:tt)*) = $answer:expr;)*) => {
        fn library() -> crate::driver::cuda::api::Api {
            let mut api = crate::driver::cuda::api::Api::none();
            $(
                extern "C" fn $name($($argument)*) -> u32 { $answer }
                api.$name = Some($name);
            )*
            api
        }
    };
}
pub(super) use library;

/// Returns a device over a fake library. The handle of the device's context is 0.
pub(super) fn device_over(api: Api, can: Abilities) -> Cuda {
    let info =
        DeviceInfo { device: DeviceId(0), name: String::new(), driver: "cuda", total_bytes: MIB };
    Cuda {
        api: Box::leak(Box::new(api)),
        info,
        device: 0,
        context: 0,
        can,
        granularity_bytes: 2 * MIB,
        bus: None,
        streams: Default::default(),
        own_pools: Default::default(),
        fabric: Default::default(),
        direct: Default::default(),
        gates: Default::default(),
        slabs: Default::default(),
        captures_expected: 0.into(),
        has_host_memory: false.into(),
        others: Default::default(),
        bridge: Default::default(),
    }
}
