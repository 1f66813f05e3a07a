//! Malformed and hostile files. The readers must not panic, hang or overflow the stack.

use super::super::interpret::DEVICES_MAX;
use super::super::{Failure, Limits, PickleProblem, Trace, TraceError, read, read_bytes};
use super::read_from;
use super::writer::snapshot;

fn problem(pickle: &[u8]) -> (PickleProblem, u64) {
    match read_from(pickle) {
        Err(TraceError { failure: Failure::Pickle { at, problem }, .. }) => (problem, at),
        other => panic!("{other:?}"),
    }
}

fn refused(bytes: &[u8]) -> String {
    read_from(bytes).unwrap_err().to_string()
}

#[test]
fn opcodes_that_construct_objects_are_refused_by_name_and_offset() {
    for (opcode, name) in [
        (b'c', "GLOBAL"),
        (b'R', "REDUCE"),
        (b'b', "BUILD"),
        (b'i', "INST"),
        (b'o', "OBJ"),
        (b'P', "PERSID"),
        (b'Q', "BINPERSID"),
        (0x81, "NEWOBJ"),
        (0x82, "EXT1"),
        (0x83, "EXT2"),
        (0x84, "EXT4"),
        (0x92, "NEWOBJ_EX"),
        (0x93, "STACK_GLOBAL"),
        (0x96, "BYTEARRAY8"),
        (0x97, "NEXT_BUFFER"),
        (0x98, "READONLY_BUFFER"),
    ] {
        let bytes = [b"\x80\x04NN(N".as_slice(), &[opcode], b"os\nsystem\n."].concat();
        assert_eq!(problem(&bytes), (PickleProblem::Constructs(name), 6));
    }
    let text = refused(b"\x80\x02cos\nsystem\n.");
    assert_eq!(
        text,
        "file: opcode GLOBAL would construct an object and is refused (decoded byte 2)"
    );
}

#[test]
fn every_first_opcode_is_read_or_refused() {
    for opcode in 0..=u8::MAX {
        for tail in [
            b"".as_slice(),
            b".",
            b"\x01\x01\x01\x01\x01\x01\x01\x01\x01.",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff.",
        ] {
            for head in [b"\x80\x04".as_slice(), b"\x80\x04]", b"\x80\x04}(NN", b"\x80\x04)((]N"] {
                let bytes = [head, &[opcode], tail].concat();
                assert!(read_from(&bytes).is_err() || bytes.ends_with(b"."));
            }
        }
    }
    assert_eq!(problem(b"\x80\x04\xff"), (PickleProblem::Unused(0xff), 2));
    assert_eq!(problem(b"\x80\x04I1\n."), (PickleProblem::Unused(b'I'), 2));
    assert_eq!(problem(b"\x80\x06N."), (PickleProblem::Protocol(6), 0));
    assert_eq!(problem(b"\x80\x04h\x05."), (PickleProblem::Memo(5), 2));
    assert_eq!(problem(b"\x80\x04].."), (PickleProblem::Trailing, 4));
}

#[test]
fn deep_nesting_neither_overflows_nor_hangs() {
    const DEPTH: usize = 1_000_000;
    let around = |open: &[u8], middle: &[u8], close: &[u8]| {
        [&open.repeat(DEPTH), middle, &close.repeat(DEPTH)].concat()
    };
    let pickled = |body: Vec<u8>| [b"\x80\x04", body.as_slice(), b"."].concat();
    for body in [
        around(b"]", b"N", b"a"),
        around(b"]\x94", b"N", b"a"),
        around(b"(", b"N", b"t"),
        around(b"(", b"N", b"l"),
        around(b"", b")", b"\x85"),
        around(b"}K\x00", b"N", b"s"),
    ] {
        refused(&pickled(body));
    }
    assert!(refused(&pickled(b"(".repeat(2000))).contains("1000 marks"));
    let deep_json = around(b"[", b"", b"]");
    refused(&deep_json);
    refused(&around(br#"{"segments":"#, b"1", b"}"));
    let in_a_field = [br#"[{"address":"#.as_slice(), &deep_json, b"}]"].concat();
    assert!(refused(&in_a_field).contains("recursion limit"));
    let ignored = [br#"{"other":"#.as_slice(), &deep_json, b"}"].concat();
    assert!(refused(&ignored).contains("the key segments"));
}

#[test]
fn containers_that_hold_themselves_end_as_a_mismatch() {
    refused(b"\x80\x02]q\x00h\x00a.");
    refused(b"\x80\x02]q\x00(h\x00h\x00h\x00e.");
    refused(b"\x80\x02}q\x00X\x08\x00\x00\x00segmentsh\x00s.");
    let traces =
        b"\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]q\x00h\x00au.";
    assert!(refused(traces).contains("device_traces[0][0]: expected a trace entry"));
    // A list that is appended to itself through the memo, 10,000 times.
    let mut doubling = b"\x80\x02]q\x00".to_vec();
    doubling.extend(b"(h\x00h\x00e".repeat(10_000));
    doubling.push(b'.');
    refused(&doubling);
}

#[test]
fn shared_lists_do_not_multiply() {
    // Each list contains the previous one ten times. Copying would make 10^100 values.
    let mut bytes = b"\x80\x04]\x94".to_vec();
    for i in 0..100 {
        bytes.extend(b"]\x94(");
        bytes.extend([b'h', i].repeat(10));
        bytes.push(b'e');
    }
    bytes.push(b'.');
    refused(&bytes);
}

#[test]
fn a_list_that_many_devices_share_is_compared_once() {
    // 3,000 devices with one list, in which one entry is 30,000 times. The text makes room in the budget.
    let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x04textX\x00\x00\x10\x00".to_vec();
    bytes.extend([b'a'; 1 << 20]);
    bytes.extend(
        b"\x8c\x0ddevice_traces](]\x94(}\x94(\x8c\x06action\x8c\x05alloc\x8c\x06streamK\x00",
    );
    bytes.extend(b"\x8c\x04addrK\x00\x8c\x04sizeK\x01u");
    bytes.extend(b"h\x01".repeat(29_999));
    bytes.push(b'e');
    bytes.extend(b"h\x00".repeat(2_999));
    bytes.extend(b"eu.");
    let trace = read_from(&bytes).unwrap();
    assert_eq!(trace.devices.len(), DEVICES_MAX);
    assert!(trace.devices.iter().all(|device| device.events == 30_000));
}

#[test]
fn lengths_are_not_believed() {
    for bytes in [
        b"\x80\x04X\xff\xff\xff\xffabc".as_slice(),
        b"\x80\x04B\xff\xff\xff\xffabc",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc",
        b"\x80\x04\x8a\xffabc",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        assert_eq!(problem(bytes).0, PickleProblem::Ends);
    }
}

#[test]
fn integers_of_any_length_are_understood_or_refused() {
    let size = |long: &[u8]| {
        let head =
            b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]](}(\x8c\x06action\x8c\x05alloc\
            \x8c\x06streamK\x00\x8c\x04addrK\x00\x8c\x04size";
        read_from(&[head, long, b"ueau."].concat())
    };
    let bytes_of = |trace: Result<Trace, TraceError>| trace.unwrap().events[0].size_bytes;
    let long1 = |digits: &[u8]| [&[0x8a, u8::try_from(digits.len()).unwrap()], digits].concat();
    assert_eq!(bytes_of(size(&long1(b""))), 0);
    assert_eq!(bytes_of(size(&long1(b"\x01\x02"))), 0x201);
    assert_eq!(bytes_of(size(&long1(&[7; 7]))), 0x07_0707_0707_0707);
    let mut wide = [0xff; 9];
    wide[8] = 0;
    assert_eq!(bytes_of(size(&long1(&wide))), u64::MAX);
    let mut padded = [0; 255];
    padded[0] = 5;
    assert_eq!(bytes_of(size(&long1(&padded))), 5);
    for (digits, found) in [
        ([0xff_u8; 255].as_slice(), "found -1"),
        (&[0x80], "found -128"),
        (&[0x7f; 255], "beyond 64 bits"),
        (&[0x80; 255], "beyond 64 bits"),
        (&[0, 0, 0, 0, 0, 0, 0, 0, 1], "beyond 64 bits"),
        (&[0, 0, 0, 0, 0, 0, 0, 0, 0xff], "beyond 64 bits"),
    ] {
        let error = size(&long1(digits)).unwrap_err().to_string();
        assert!(error.contains("device_traces[0][0].size"), "{error}");
        assert!(error.contains(found), "{error}");
    }
}

#[test]
fn memo_numbers_may_be_anything() {
    let bytes = b"\x80\x04]r\xff\xff\xff\xff0j\xff\xff\xff\xff.";
    assert!(read_from(bytes).unwrap().segments.is_empty());
    assert_eq!(problem(b"\x80\x04]j\xfe\xff\xff\xff.").0, PickleProblem::Memo(u32::MAX - 1));
}

#[test]
fn the_limit_on_bytes_holds() {
    let bytes = snapshot().pickle();
    let with = |limits: Limits| read_bytes("file", bytes.as_slice(), &limits, None);
    let small = Limits { decoded_bytes: 100, ..Limits::default() };
    let error = with(small).unwrap_err();
    assert!(matches!(error.failure, Failure::TooLarge { limit_bytes: 100 }), "{error}");
    let exact = Limits { decoded_bytes: bytes.len() as u64, ..Limits::default() };
    assert!(with(exact).is_ok());
    let json = snapshot().json();
    let tight = Limits { decoded_bytes: json.len() as u64 - 1, ..Limits::default() };
    let error = read_bytes("file", json.as_slice(), &tight, None).unwrap_err();
    assert!(matches!(error.failure, Failure::TooLarge { .. }), "{error}");
}

#[test]
fn files_that_are_neither_are_named_by_their_first_bytes() {
    for (bytes, found) in [
        (b"".as_slice(), "it is empty"),
        (b"PK\x03\x04rest", "zip or tar archive"),
        (b"hello", "68 65 6c 6c 6f"),
        (b"(dp0\n.", "28 64 70"),
        (b"  ", "it is empty"),
    ] {
        let error = refused(bytes);
        assert!(error.contains(found), "{error}");
    }
    let error = read(std::path::Path::new("/no/such/file"), &Limits::default()).unwrap_err();
    assert!(error.to_string().starts_with("/no/such/file: cannot be opened"));
    for magic in [b"\xfd7zXZ\0".as_slice(), b"\x1f\x8b", b"\x28\xb5\x2f\xfd"] {
        let error = read_from(&[magic, &[0xff; 40]].concat()).unwrap_err();
        assert!(matches!(error.failure, Failure::Read { .. }), "{error}");
    }
}

pub(super) fn flipped(mut bytes: Vec<u8>, flips: &[(u16, u8)]) -> Vec<u8> {
    let len = bytes.len();
    for &(at, bits) in flips {
        bytes[usize::from(at) % len] ^= bits;
    }
    bytes
}

quickcheck::quickcheck! {
    fn damaged_pickles_never_panic(flips: Vec<(u16, u8)>) -> bool {
        let _ = read_from(&flipped(snapshot().pickle(), &flips));
        true
    }

    fn damaged_json_never_panics(flips: Vec<(u16, u8)>) -> bool {
        let _ = read_from(&flipped(snapshot().json(), &flips));
        true
    }

    fn noise_never_panics(noise: Vec<u8>) -> bool {
        let _ = read_from(&[b"\x80\x04", noise.as_slice()].concat());
        let _ = read_from(&[b"\x1f\x8b\x08\x00", noise.as_slice()].concat());
        let _ = read_from(&[b"\xfd7zXZ\0", noise.as_slice()].concat());
        let _ = read_from(&[b"\x28\xb5\x2f\xfd", noise.as_slice()].concat());
        true
    }
}

#[test]
fn one_damaged_byte_anywhere_never_panics() {
    for whole in [snapshot().pickle(), snapshot().json()] {
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff, 0x2e] {
                let mut damaged = whole.clone();
                damaged[at] ^= bits;
                let _ = read_from(&damaged);
            }
        }
    }
}
