//! Random calls with random values. Each call returns, blocks never overlap, and nothing stays
//! allocated.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::without_provenance_mut;

use crate::{
    Pool, Status, Text, stratalloc_destroy, stratalloc_empty_cache, stratalloc_free,
    stratalloc_pool_release, stratalloc_pool_retain, stratalloc_pool_scope_close,
    stratalloc_pool_scope_open_stream, stratalloc_pool_scope_open_thread, stratalloc_record_stream,
    stratalloc_set_memory_fraction, stratalloc_torch_free, stratalloc_torch_malloc,
    stratalloc_torch_record_stream, stratalloc_torch_release_pool,
};
use quickcheck::{Arbitrary, Gen, QuickCheck};

use super::{allocate, create, text};

/// One random call and its arguments.
#[derive(Clone, Copy, Debug)]
struct Call {
    which: u8,
    number: u64,
    other: u64,
    /// Whether the call gets the valid handle. True in three of four calls.
    at_home: bool,
}

impl Arbitrary for Call {
    fn arbitrary(g: &mut Gen) -> Self {
        let edges = [0, 1, 511, 512, 1 << 20, 20 << 20, 1 << 40, 1 << 60, u64::MAX - 1, u64::MAX];
        let mut number = || match u8::arbitrary(g) % 4 {
            0 => u64::arbitrary(g),
            1 => *g.choose(&edges).expect("there are some"),
            _ => u64::from(u32::arbitrary(g)) % (4 << 20),
        };
        let (number, other) = (number(), number());
        Self { which: u8::arbitrary(g), number, other, at_home: u8::arbitrary(g) % 4 != 0 }
    }
}

fn pointer(number: u64) -> *mut c_void {
    without_provenance_mut(usize::try_from(number).expect("64 bits"))
}

/// Makes one call and updates `books`: the end of each live block, by its start.
fn run(call: Call, handle: u64, books: &mut BTreeMap<u64, u64>) {
    let Call { which, number, other, at_home } = call;
    let handle = if at_home { handle } else { handle ^ (number | 1 << 32) };
    let pool = Pool { capture: number % 3, user: other };
    let status = match which % 12 {
        0..=3 => match allocate(handle, number, usize::try_from(other % 5).expect("small")) {
            Ok(block) if !block.is_null() => {
                let start = block.addr() as u64;
                let before = books.range(..start + number).next_back();
                assert!(before.is_none_or(|(_, end)| *end <= start), "{start:#x} is in two hands");
                books.insert(start, start + number);
                Status::Ok
            }
            Ok(_) => Status::Ok,
            Err(status) => status,
        },
        4 | 5 => {
            let nth = usize::try_from(number).expect("64 bits") % books.len().max(1);
            let known = books.keys().nth(nth).copied();
            let address = if other % 3 == 0 { number } else { known.unwrap_or(number) };
            let status = stratalloc_free(handle, pointer(address));
            let live = books.contains_key(&address) || address == 0;
            assert_eq!(status == Status::Ok, live && at_home, "{address:#x}");
            if status == Status::Ok {
                books.remove(&address);
            }
            status
        }
        6 => {
            let known = books.keys().next().copied();
            stratalloc_record_stream(handle, pointer(known.unwrap_or(number)), pointer(other % 5))
        }
        7 => stratalloc_empty_cache(handle),
        8 => stratalloc_pool_scope_open_thread(handle, pool),
        9 => stratalloc_pool_scope_open_stream(handle, pool, pointer(number % 5)),
        10 => match stratalloc_pool_retain(handle, pool) {
            Status::Ok => stratalloc_pool_release(handle, pool),
            other => other,
        },
        _ => match stratalloc_pool_scope_close(handle, pool) {
            Status::BadPool => {
                // The memory limit is removed at once, so that later requests do not fail.
                stratalloc_set_memory_fraction(handle, f64::from_bits(number));
                stratalloc_set_memory_fraction(handle, 1.0)
            }
            other => other,
        },
    };
    assert_ne!(status, Status::Internal, "{call:?}: {}", super::last_error());
    if !at_home {
        assert_eq!(status, Status::UnknownHandle, "{call:?}");
    }
}

fn any_calls(calls: Vec<Call>) -> bool {
    for (conf, device) in [("", "sim"), ("expandable_segments:True", "sim"), ("", "host")] {
        let handle = create(conf, device).expect("a legal allocator");
        let mut books = BTreeMap::new();
        for call in &calls {
            // The device `host` uses real memory, so sizes are limited.
            let call = match device {
                "host" => Call { number: call.number % (8 << 20), ..*call },
                _ => *call,
            };
            run(call, handle, &mut books);
        }
        for address in books.into_keys() {
            assert_eq!(stratalloc_free(handle, pointer(address)), Status::Ok);
        }
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
    true
}

#[test]
fn any_calls_come_back() {
    QuickCheck::new().tests(60).quickcheck(any_calls as fn(Vec<Call>) -> bool);
}

#[test]
fn wild_calls_of_pytorchs_symbols_come_back() {
    fn property(number: u64, device: i32, size: usize) -> bool {
        // Only ordinals of devices that do not exist. Others would be opened.
        let device = if (0..128).contains(&device) { -1 } else { device };
        stratalloc_torch_free(pointer(number), size, device, pointer(number));
        stratalloc_torch_record_stream(pointer(number), pointer(number));
        stratalloc_torch_release_pool(device, Pool { capture: number, user: number });
        stratalloc_torch_malloc(size, device, pointer(number)).is_null()
    }
    QuickCheck::new().tests(200).quickcheck(property as fn(u64, i32, usize) -> bool);
}

#[test]
fn many_threads_share_allocators_that_come_and_go() {
    const ROUNDS: u64 = 300;
    let shared = create("", "sim").expect("sim opens");
    std::thread::scope(|scope| {
        for thread in 0..6 {
            scope.spawn(move || {
                let mut before = 0;
                for round in 0..ROUNDS {
                    let own = create("", "sim").expect("sim opens");
                    assert_ne!(own, before, "a handle is never used twice");
                    let sizes = [1 + (round * 613 + thread * 7919) % 300_000, 4096];
                    for handle in [shared, own] {
                        let blocks = sizes.map(|size| allocate(handle, size, 0).expect("it fits"));
                        assert_ne!(blocks[0], blocks[1]);
                        assert_eq!(stratalloc_free(handle, blocks[0]), Status::Ok);
                        assert_eq!(stratalloc_free(handle, blocks[1]), Status::Ok);
                    }
                    assert_eq!(stratalloc_destroy(own), Status::Ok);
                    assert_eq!(allocate(own, 1, 0), Err(Status::UnknownHandle));
                    before = own;
                }
            });
        }
    });
    let text = text(shared, Text::Statistics).unwrap();
    let counters: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(counters.as_object().map(serde_json::Map::len), Some(127));
    assert_eq!(counters["allocation.all.current"], 0);
    assert_eq!(counters["allocation.all.allocated"], 6 * ROUNDS * 2);
    assert_eq!(stratalloc_destroy(shared), Status::Ok);
}
