//! Tests of counts and ratios, of features that a layer hides, and of blocks whose memory the caller
//! frees.

use std::ffi::c_void;

use crate::{
    Pool, Status, stratalloc_block_count, stratalloc_destroy, stratalloc_device_count,
    stratalloc_fragmentation, stratalloc_free, stratalloc_memory_fraction, stratalloc_pool_create,
    stratalloc_record_free, stratalloc_set_memory_fraction, stratalloc_switch,
};

use super::{allocate, create, last_error};

const KIB: u64 = 1 << 10;

fn block_count(handle: u64) -> u64 {
    let mut count = 77;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { stratalloc_block_count(handle, &raw mut count) }, Status::Ok);
    count
}

fn fragmentation(handle: u64) -> f64 {
    let mut part = 77.0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { stratalloc_fragmentation(handle, &raw mut part) }, Status::Ok);
    part
}

#[test]
fn live_blocks_are_counted_and_free_ranges_compared() {
    for conf in ["backend:native", "layers:[statistics]", "expandable_segments:True"] {
        let handle = create(conf, "sim").unwrap();
        assert_eq!((block_count(handle), fragmentation(handle)), (0, 0.0), "{conf}");
        // Both blocks fit in one segment of 2 MiB.
        let sizes = [1000 * KIB, 500 * KIB];
        let [first, second] = sizes.map(|bytes| allocate(handle, bytes, 0).unwrap());
        assert_eq!((block_count(handle), fragmentation(handle)), (2, 0.0), "{conf}");
        assert_eq!(stratalloc_free(handle, first), Status::Ok);
        // Two ranges are free: 1000 KiB of the freed block, and 548 KiB after the second block.
        let found = fragmentation(handle);
        assert!((found - (1.0 - 1000.0 / 1548.0)).abs() < 1e-9, "{conf}: {found}");
        assert_eq!(stratalloc_free(handle, second), Status::Ok);
        assert_eq!((block_count(handle), fragmentation(handle)), (0, 0.0), "{conf}");
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
        let (mut count, mut part) = (5, 5.0);
        // SAFETY: the pointers are to local variables.
        let counted = unsafe { stratalloc_block_count(handle, &raw mut count) };
        // SAFETY: as above.
        let compared = unsafe { stratalloc_fragmentation(handle, &raw mut part) };
        assert_eq!((counted, compared), (Status::UnknownHandle, Status::UnknownHandle));
        assert_eq!((count, part), (5, 5.0), "a call that fails stores nothing");
    }
}

fn memory_fraction(handle: u64) -> f64 {
    let mut fraction = 77.0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { stratalloc_memory_fraction(handle, &raw mut fraction) }, Status::Ok);
    fraction
}

#[test]
fn the_memory_fraction_that_is_set_is_read_back_with_every_backend() {
    let confs = ["backend:native", "backend:cudaMallocAsync", "backend:cpu", "backend:pinned"];
    for device in ["sim", "host"] {
        for conf in confs {
            let handle = create(conf, device).unwrap();
            for conf in confs {
                let conf = std::ffi::CString::new(conf).unwrap();
                // SAFETY: the string is terminated.
                assert_eq!(unsafe { stratalloc_switch(handle, conf.as_ptr()) }, Status::Ok);
                for fraction in [0.01, 0.25, 0.5, 0.9] {
                    assert_eq!(stratalloc_set_memory_fraction(handle, fraction), Status::Ok);
                    let found = memory_fraction(handle);
                    assert!((found - fraction).abs() < 1e-8, "{conf:?} on {device}: {found}");
                    assert_eq!(stratalloc_set_memory_fraction(handle, found), Status::Ok);
                    assert_eq!(memory_fraction(handle).to_bits(), found.to_bits());
                }
            }
            assert_eq!(stratalloc_set_memory_fraction(handle, 1.0), Status::Ok);
            assert_eq!(memory_fraction(handle).to_bits(), 1f64.to_bits());
            assert_eq!(stratalloc_destroy(handle), Status::Ok);
        }
    }
}

#[test]
fn devices_are_counted_also_where_there_is_no_driver() {
    let mut count = -1;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { stratalloc_device_count(&raw mut count) }, Status::Ok, "{}", last_error());
    assert!(count >= 0);
    let expected = stratalloc::driver::Cuda::count().unwrap_or(0);
    assert_eq!(u32::try_from(count), Ok(expected));
    // SAFETY: a null pointer is refused.
    let refused = unsafe { stratalloc_device_count(std::ptr::null_mut()) };
    assert_eq!(refused, Status::InvalidArgument);
}

#[test]
fn pools_that_a_layer_hides_are_refused_in_the_name_of_the_layer() {
    for (layer, device) in [("align:4KiB", "sim"), ("guard", "host")] {
        let handle = create(&format!("backend:native,layers:[{layer}]"), device).unwrap();
        let mut pool = Pool::default();
        // SAFETY: the pointer is to a local variable.
        let status = unsafe { stratalloc_pool_create(handle, 0, &raw mut pool) };
        assert_eq!(status, Status::NotSupported);
        let expected =
            format!("layers:[{layer}] has no private pools: it moves the blocks of backend:native");
        assert_eq!(last_error(), expected);
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
}

unsafe extern "C" {
    fn free(memory: *mut c_void);
}

#[test]
fn memory_of_a_block_that_was_forgotten_is_the_callers_to_free() {
    let handle = create("backend:cpu", "host").unwrap();
    let block = allocate(handle, 4096, 0).unwrap();
    assert_eq!(stratalloc_record_free(handle, block), Status::Ok, "{}", last_error());
    assert_eq!(stratalloc_free(handle, block), Status::UnknownAddress);
    assert_eq!(stratalloc_record_free(handle, block), Status::UnknownAddress);
    assert_eq!(block_count(handle), 0);
    // SAFETY: the block is memory of the C library, and nothing else frees it.
    unsafe { free(block) };
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
    for conf in ["backend:native", "backend:cpu,layers:[statistics]"] {
        let handle = create(conf, "host").unwrap();
        let block = allocate(handle, 4096, 0).unwrap();
        assert_eq!(stratalloc_record_free(handle, block), Status::NotSupported, "{conf}");
        assert_eq!(stratalloc_free(handle, block), Status::Ok);
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
}
