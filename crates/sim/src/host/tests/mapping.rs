//! Reserved space, pieces mapped in it, and refused calls.

use quickcheck::{Arbitrary, Gen};

use super::*;
use stratalloc::driver::{Exportable, PhysicalId};

const PAGE: u64 = 2 * MIB;

/// Creates a piece and maps it with access.
fn mapped(host: &Host, address: u64, size_bytes: u64) -> PhysicalId {
    let piece = host.create(size_bytes, Exportable::No).unwrap();
    host.map(address, size_bytes, piece).unwrap();
    host.set_access(address, size_bytes, DeviceId(0)).unwrap();
    piece
}

fn refused<T: std::fmt::Debug>(result: DriverResult<T>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue, "{error}");
    error.message().to_owned()
}

#[test]
fn two_mappings_of_one_piece_are_the_same_bytes() {
    let host = host();
    let base = host.reserve(4 * PAGE).unwrap();
    assert_eq!(base % PAGE, 0);
    let piece = mapped(&host, base, PAGE);
    host.map(base + 2 * PAGE, PAGE, piece).unwrap();
    host.set_access(base + 2 * PAGE, PAGE, DeviceId(0)).unwrap();
    host.fill(base + 100, 7, 8, A).unwrap();
    assert_eq!(bytes(&host, base + 2 * PAGE + 99, 10, A), [0, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
    host.unmap(base, PAGE).unwrap();
    assert_eq!(bytes(&host, base + 2 * PAGE + 100, 8, A), [7; 8], "the other mapping stays");
}

#[test]
fn work_runs_over_the_border_of_neighbouring_pieces_only() {
    let host = host();
    let base = host.reserve(4 * PAGE).unwrap();
    mapped(&host, base, PAGE);
    mapped(&host, base + PAGE, 2 * PAGE);
    host.copy_from_host(base + PAGE - 2, &[1, 2, 3, 4], A).unwrap();
    host.copy(base + 8, base + PAGE - 2, 4, A).unwrap();
    assert_eq!(bytes(&host, base + 8, 4, A), [1, 2, 3, 4]);
    host.copy(base + PAGE - 3, base + 8, 4, A).unwrap();
    assert_eq!(bytes(&host, base + PAGE - 3, 5, A), [1, 2, 3, 4, 4]);
    refused(host.fill(base + 3 * PAGE - 1, 1, 2, A));
    refused(host.fill(base - 1, 1, 2, A));
    host.unmap(base + PAGE, 2 * PAGE).unwrap();
    refused(host.fill(base + PAGE - 1, 1, 2, A));
    let closed = host.create(PAGE, Exportable::No).unwrap();
    host.map(base + PAGE, PAGE, closed).unwrap();
    refused(host.fill(base + PAGE, 1, 1, A));
}

#[test]
fn memory_counts_until_a_piece_is_neither_held_nor_mapped() {
    let host = host();
    let free = || host.memory_info().unwrap().free_bytes;
    let base = host.reserve(1024 * PAGE).unwrap();
    assert_eq!(free(), 64 * MIB, "address space costs nothing");
    let piece = mapped(&host, base, 4 * PAGE);
    host.release(piece).unwrap();
    assert_eq!(free(), 56 * MIB);
    host.unmap(base, 4 * PAGE).unwrap();
    assert_eq!(free(), 64 * MIB);
    let piece = host.create(4 * PAGE, Exportable::No).unwrap();
    let region = host.allocate(50 * MIB).unwrap();
    let short = host.create(4 * PAGE, Exportable::No).unwrap_err();
    assert!(
        short.is_out_of_memory() && short.message().contains(&(6 * MIB).to_string()),
        "{short}"
    );
    assert!(host.allocate(8 * MIB).unwrap_err().is_out_of_memory(), "both count together");
    host.release(piece).unwrap();
    host.free(region, 50 * MIB).unwrap();
    assert_eq!(free(), 64 * MIB);
}

#[test]
fn released_memory_goes_back_to_the_system_and_its_place_is_used_again() {
    let host = host();
    let base = host.reserve(8 * PAGE).unwrap();
    let first = mapped(&host, base, PAGE);
    let second = mapped(&host, base + PAGE, 2 * PAGE);
    host.fill(base, 5, 3 * PAGE, A).unwrap();
    host.synchronize_stream(A).unwrap();
    assert_eq!(host.stored_bytes(), (3 * PAGE, 3 * PAGE));
    host.release(first).unwrap();
    assert_eq!(host.stored_bytes().0, 3 * PAGE, "it is mapped still");
    host.unmap(base, PAGE).unwrap();
    assert_eq!(host.stored_bytes(), (2 * PAGE, 3 * PAGE), "a hole");
    host.unmap(base + PAGE, 2 * PAGE).unwrap();
    assert_eq!(host.stored_bytes().0, 2 * PAGE, "it is held still");
    host.release(second).unwrap();
    assert_eq!(host.stored_bytes(), (0, 3 * PAGE));
    mapped(&host, base, 3 * PAGE);
    assert_eq!(host.stored_bytes(), (0, 3 * PAGE), "the joined hole serves it");
    assert_eq!(bytes(&host, base + PAGE, 4, A), [0; 4]);
}

#[test]
fn pieces_that_work_is_going_to_touch_are_not_taken_off() {
    let host = host();
    let base = host.reserve(2 * PAGE).unwrap();
    mapped(&host, base, PAGE);
    mapped(&host, base + PAGE, PAGE);
    let gate = host.hold(A);
    host.fill(base + PAGE, 4, 16, A).unwrap();
    let message = refused(host.unmap(base, 2 * PAGE));
    assert!(message.contains(&format!("{:#x}", base + PAGE)), "{message}");
    host.fill(base, 2, 16, B).unwrap();
    assert_eq!(bytes(&host, base, 16, B), [2; 16], "the first piece is still there");
    gate.open();
    assert_eq!(bytes(&host, base + PAGE, 16, A), [4; 16]);
    host.unmap(base, 2 * PAGE).unwrap();
}

/// An operation on a window of pages, two of which may be the same piece.
#[derive(Clone, Copy, Debug)]
enum Op {
    Fill { at: u64, count: u64, byte: u8, stream: u8 },
    Copy { to: u64, from: u64, count: u64, stream: u8 },
    Remap { page: u64, to: u64 },
}

/// Pages of the window. There are as many pieces; some may be mapped twice and some nowhere.
const PAGES: u64 = 4;
/// Accesses begin within this distance of a page boundary, so that many cross one.
const NEAR: u64 = 32;
const NEAR_COUNT: usize = 32;

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let near = |g: &mut Gen| {
            let page = u64::arbitrary(g) % (PAGES - 1) + 1;
            page * PAGE + u64::arbitrary(g) % (2 * NEAR) - NEAR
        };
        let (stream, count) = (u8::arbitrary(g) % 4, u64::arbitrary(g) % NEAR + 1);
        match u8::arbitrary(g) % 5 {
            0 | 1 => Self::Fill { at: near(g), count, byte: u8::arbitrary(g), stream },
            2 | 3 => Self::Copy { to: near(g), from: near(g), count, stream },
            _ => {
                let page = |g: &mut Gen| u64::arbitrary(g) % PAGES;
                Self::Remap { page: page(g), to: page(g) }
            }
        }
    }
}

/// The piece of each page, and the bytes of each piece near its start and its end.
struct Model {
    pages: Vec<usize>,
    pieces: Vec<std::collections::HashMap<u64, u8>>,
}

impl Model {
    fn byte(&mut self, at: u64) -> &mut u8 {
        let page = usize::try_from(at / PAGE).unwrap();
        self.pieces[self.pages[page]].entry(at % PAGE).or_insert(0)
    }
}

quickcheck::quickcheck! {
    /// Fills and copies run in order, on several streams. Between them, pages change their pieces.
    fn aliased_and_remapped_pages_equal_a_model(ops: Vec<Op>) -> bool {
        let host = host();
        let count = usize::try_from(PAGES).unwrap();
        let base = host.reserve(PAGES * PAGE).unwrap();
        let pieces: Vec<_> = (0..PAGES).map(|page| mapped(&host, base + page * PAGE, PAGE)).collect();
        let none = std::collections::HashMap::new();
        let mut model = Model { pages: (0..count).collect(), pieces: vec![none; count] };
        let event = host.create_event().unwrap();
        for op in ops {
            if let Op::Fill { stream, .. } | Op::Copy { stream, .. } = op {
                host.wait_event(StreamId(stream.into()), event).unwrap();
            }
            match op {
                Op::Fill { at, count, byte, stream } => {
                    host.fill(base + at, byte, count, StreamId(stream.into())).unwrap();
                    (at..at + count).for_each(|at| *model.byte(at) = byte);
                }
                Op::Copy { to, from, count, .. } if to.abs_diff(from) < count => {
                    host.copy(base + to, base + from, count, A).unwrap_err();
                }
                Op::Copy { to, from, count, stream } => {
                    host.copy(base + to, base + from, count, StreamId(stream.into())).unwrap();
                    // In ascending order, as the device copies. Pages of the same piece can make the ranges
                    // overlap.
                    (0..count).for_each(|n| *model.byte(to + n) = *model.byte(from + n));
                }
                Op::Remap { page, to } => {
                    host.synchronize_device().unwrap();
                    let own = model.pages[usize::try_from(to).unwrap()];
                    host.unmap(base + page * PAGE, PAGE).unwrap();
                    host.map(base + page * PAGE, PAGE, pieces[own]).unwrap();
                    host.set_access(base + page * PAGE, PAGE, DeviceId(0)).unwrap();
                    model.pages[usize::try_from(page).unwrap()] = own;
                }
            }
            if let Op::Fill { stream, .. } | Op::Copy { stream, .. } = op {
                host.record_event(event, StreamId(stream.into())).unwrap();
            }
        }
        host.synchronize_event(event).unwrap();
        (1..PAGES).all(|page| {
            let from = page * PAGE - NEAR;
            let found = bytes(&host, base + from, 3 * NEAR_COUNT, A);
            found.iter().zip(from..).all(|(byte, at)| *byte == *model.byte(at))
        })
    }
}
