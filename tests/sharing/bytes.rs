//! The format of a handle's bytes: decoding inverts encoding, and hostile bytes give an error.

use quickcheck::quickcheck;
use stratalloc::sharing::PAGES_MAX;

use super::tools::{forged, handle, seal, wrong};
use crate::common::prelude::*;

#[test]
fn a_handle_round_trips_and_contains_no_secret() {
    let handle = handle(false);
    let back = SharedHandle::from_bytes(handle.as_bytes()).unwrap();
    assert_eq!(back, handle);
    assert_eq!(back.size_bytes(), 45 * MIB + 512);
    assert_eq!(back.process(), std::process::id());
    let shown = format!("{back:?}");
    let expected = format!(
        "SharedHandle {{ process: {}, size_bytes: {}, .. }}",
        std::process::id(),
        45 * MIB + 512
    );
    assert_eq!(shown, expected);
}

#[test]
fn the_layout_is_fixed() {
    let handle = handle(false);
    let bytes = handle.as_bytes();
    assert_eq!(bytes.len(), 88 + 3 * 32 + 8);
    assert_eq!(&bytes[..12], b"stratshr\x01\x00\x02\x00");
    assert_eq!(bytes[12..16], std::process::id().to_le_bytes());
    assert_eq!(bytes[24..32], 0u64.to_le_bytes(), "the block begins with its first page");
    assert_eq!(bytes[32..40], (45 * MIB + 512).to_le_bytes());
    assert_eq!(bytes[72..80], (20 * MIB).to_le_bytes());
    assert_eq!(bytes[80..84], 3u32.to_le_bytes());
}

#[test]
fn every_truncation_and_every_extension_is_refused() {
    for handle in [handle(false), handle(true)] {
        let bytes = handle.as_bytes();
        for len in 0..bytes.len() {
            wrong(&bytes[..len]);
            if len >= 8 {
                let mut sealed = bytes[..len].to_vec();
                seal(&mut sealed);
                wrong(&sealed);
            }
        }
    }
    let handle = handle(false);
    let bytes = handle.as_bytes();
    let longer: Vec<u8> = bytes.iter().copied().chain([0; 32]).collect();
    let expected = bytes.len() as u64;
    assert_eq!(wrong(&longer), FormatError::Length { len: longer.len(), expected });
}

#[test]
fn every_flipped_bit_is_seen() {
    for handle in [handle(false), handle(true)] {
        for bit in 0..handle.as_bytes().len() * 8 {
            let mut bytes = handle.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            wrong(&bytes);
        }
    }
}

#[test]
fn each_mistake_has_its_own_error() {
    let handle = handle(false);
    let good = handle.as_bytes();
    let with = |at: usize, bytes: &[u8]| wrong(&forged(good, at, bytes));
    assert_eq!(with(0, b"X"), FormatError::Magic);
    assert_eq!(with(8, &[2, 0]), FormatError::Version { version: 2, known: 1 });
    assert_eq!(with(8, &[0, 0]), FormatError::Version { version: 0, known: 1 });
    assert_eq!(with(10, &[9]), FormatError::Kind { kind: 9 });
    assert_eq!(with(11, &[1]), FormatError::Reserved { at: 11 });
    assert_eq!(with(84, &[0, 0, 5]), FormatError::Reserved { at: 86 });
    assert_eq!(with(88 + 28, &[1]), FormatError::Reserved { at: 88 + 28 });
    let most = PAGES_MAX as u64;
    assert_eq!(with(80, &[0; 4]), FormatError::PageCount { pages: 0, most });
    let many = u32::MAX;
    let pages = u64::from(many);
    assert_eq!(with(80, &many.to_le_bytes()), FormatError::PageCount { pages, most });
    let expected = 88 + most * 32 + 8;
    let at_most = u32::try_from(most).unwrap().to_le_bytes();
    assert_eq!(with(80, &at_most), FormatError::Length { len: good.len(), expected });
    // Inconsistent sizes, including some for which sums and products would overflow.
    for (at, value) in [
        (24, 20 * MIB),
        (24, u64::MAX),
        (32, 0),
        (32, 40 * MIB),
        (32, 60 * MIB + 1),
        (32, u64::MAX),
        (72, 0),
        (72, u64::MAX),
        (72, u64::MAX / 3 + 1),
        (72, 80 * MIB),
    ] {
        let error = with(at, &value.to_le_bytes());
        assert!(matches!(error, FormatError::Extent { .. }), "{at} {value:#x}: {error:?}");
    }
    let mut bytes = good.to_vec();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    assert_eq!(wrong(&bytes), FormatError::Checksum);
}

quickcheck! {
    fn whatever_is_read_is_written_back_equally(spoils: Vec<(usize, u8)>, sealed: bool) -> bool {
        let mut bytes = handle(false).as_bytes().to_vec();
        for (at, byte) in spoils {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if sealed {
            seal(&mut bytes);
        }
        SharedHandle::from_bytes(&bytes).is_ok_and(|handle| handle.as_bytes() == bytes)
            || SharedHandle::from_bytes(&bytes).is_err()
    }

    fn noise_is_refused(bytes: Vec<u8>) -> bool {
        SharedHandle::from_bytes(&bytes).is_err()
    }
}
