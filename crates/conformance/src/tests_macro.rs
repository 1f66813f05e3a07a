//! The macro that generates the tests.

/// Generates one test for each property and each device, in a module named by the first argument.
///
/// The second argument is a constructor: a closure, or anything else that takes a driver as for
/// [`registry::register`](stratalloc::registry::register) and returns the allocator. It can use names of the
/// surrounding module. `CONFORMANCE_RUNS=1000 cargo test` sets [`Options::scripts`](crate::Options::scripts)
/// to 1000. The `host` device is host memory and needs Linux. `cuda` is a part of the first CUDA device;
/// without one its tests print that they were skipped.
///
/// ```
/// # mod example {
/// use stratalloc_conformance::configured;
///
/// stratalloc_conformance::conformance_tests!(native, configured("backend:native"));
/// # }
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($name:ident, $build:expr) => {
        #[cfg(test)]
        mod $name {
            #[allow(unused_imports, reason = "the constructor may name what is around it")]
            use super::*;

            $crate::conformance_tests!(@device sim, Sim, $name, $build);
            #[cfg(target_os = "linux")]
            $crate::conformance_tests!(@device host, Host, $name, $build);
            #[cfg(target_os = "linux")]
            $crate::conformance_tests!(@device cuda, Cuda, $name, $build);
        }
    };
    (@device $module:ident, $device:ident, $name:ident, $build:expr) => {
        mod $module {
            #[allow(unused_imports, reason = "the constructor may name what is around it")]
            use super::*;

            $crate::conformance_tests!(@tests $device, $name, $build, [
                live_blocks_never_overlap: LiveBlocksNeverOverlap,
                blocks_are_large_enough: BlocksAreLargeEnough,
                bytes_stay_intact: BytesStayIntact,
                reuse_waits_for_work: ReuseWaitsForWork,
                illegal_requests_are_refused: IllegalRequestsAreRefused,
                wrong_handles_are_refused: WrongHandlesAreRefused,
                counters_equal_a_recount: CountersEqualARecount,
                emptying_the_cache_keeps_live_blocks: EmptyingTheCacheKeepsLiveBlocks,
                everything_is_released: EverythingIsReleased,
                running_out_is_an_error: RunningOutIsAnError,
                pressure_hooks_are_called: PressureHooksAreCalled,
                driver_failures_lose_nothing: DriverFailuresLoseNothing,
                limits_are_respected: LimitsAreRespected,
                bare_addresses_are_checked: BareAddressesAreChecked,
                private_pools_are_apart: PrivatePoolsAreApart,
                threads_get_blocks_of_their_own: ThreadsGetBlocksOfTheirOwn,
            ]);
        }
    };
    (@tests $device:ident, $name:ident, $build:expr, [$($test:ident: $property:ident,)*]) => {
        $(
            #[test]
            fn $test() {
                $crate::assert_holds(
                    stringify!($name),
                    &$crate::constructor($build),
                    $crate::Property::$property,
                    $crate::Device::$device,
                );
            }
        )*

        // Compilation fails if a property has no test here.
        const TESTED: &[$crate::Property] =
            &[$($crate::Property::$property),*];
        const _: () = assert!(TESTED.len() == $crate::Property::ALL.len());
    };
}
