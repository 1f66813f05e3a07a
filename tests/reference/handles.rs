//! Handles and requests that are refused: a clean error, and nothing has changed.

use stratalloc::size::EIB;

use crate::common::prelude::*;

/// A second handle of the same block: what safe code cannot have by accident.
fn twin(of: &Allocation) -> Allocation {
    Allocation::new(of.address(), of.size_bytes(), of.owner(), of.token())
}

/// A bed with live, free and draining blocks of both kinds.
fn lived_in() -> (Bed, Vec<Allocation>) {
    let bed = Bed::new(GIB, "");
    let mut live: Vec<_> =
        [512, 4096, MIB, 3 * MIB, 30 * MIB].into_iter().map(|bytes| bed.take(bytes)).collect();
    bed.give(live.remove(1));
    let draining = bed.take(2 * MIB);
    bed.record(&draining, SIDE);
    bed.give(draining);
    (bed, live)
}

#[track_caller]
fn refuses(bed: &Bed, handle: Allocation) -> HandleError {
    let before = bed.state();
    let expected = twin(&handle);
    let recorded = bed.cross_stream().record_stream(&handle, SIDE).expect_err("refused");
    let refused = bed.free(handle).expect_err("refused");
    assert_eq!(refused.allocation, expected, "the handle comes back as it was");
    assert_eq!(refused.reason, recorded, "both calls say the same");
    assert_eq!(bed.state(), before, "nothing has changed");
    bed.check();
    recorded
}

#[test]
fn a_request_of_nothing_or_of_more_than_an_exbibyte_changes_nothing() {
    let (bed, _live) = lived_in();
    for bytes in [0, EIB + 1, 1 << 63, u64::MAX] {
        let before = bed.state();
        let error = bed.ask(bytes, HOME).unwrap_err();
        match error {
            AllocError::ZeroBytes => assert_eq!(bytes, 0),
            AllocError::TooLarge { requested_bytes } => assert_eq!(requested_bytes, bytes),
            other => panic!("{bytes}: {other}"),
        }
        bed.ask(bytes, SIDE).unwrap_err();
        assert_eq!(bed.state(), before);
    }
    assert_eq!(bed.fail(EIB, HOME).segment_bytes, EIB, "an exbibyte is merely out of memory");
}

#[test]
fn a_foreign_handle_names_both_allocators() {
    let (bed, live) = lived_in();
    let (other, others) = lived_in();
    assert_eq!(
        refuses(&bed, twin(&others[0])),
        HandleError::Foreign { owner: others[0].owner(), asked: live[0].owner() }
    );
    other.give(others.into_iter().next().unwrap());
}

#[test]
fn a_second_free_is_refused_also_when_the_block_lives_again() {
    let (bed, mut live) = lived_in();
    for index in [0, live.len() - 2] {
        let block = live.remove(index);
        let (stale, address) = (twin(&block), block.address());
        let bytes = block.size_bytes();
        bed.give(block);
        assert_eq!(refuses(&bed, twin(&stale)), HandleError::Stale { address });
        let heir = bed.take(bytes);
        assert_eq!(heir.address(), address, "the block lives again");
        assert_eq!(refuses(&bed, stale), HandleError::Stale { address });
        bed.give(heir);
    }
}

#[test]
fn a_draining_block_and_a_released_segment_have_no_valid_handles() {
    let (bed, mut live) = lived_in();
    let block = live.pop().unwrap();
    let stale = twin(&block);
    bed.record(&block, SIDE);
    bed.give(block);
    let address = stale.address();
    assert_eq!(refuses(&bed, twin(&stale)), HandleError::Stale { address });
    bed.empty_cache();
    assert_eq!(refuses(&bed, stale), HandleError::Stale { address });
}

#[test]
fn forged_tokens_and_addresses_are_refused_and_never_panic() {
    let (bed, live) = lived_in();
    let real = &live[0];
    let Token([heap, slot, generation]) = real.token();
    for token in [
        [heap + 1, slot, generation],
        [u32::MAX, slot, generation],
        [u32::MAX - 1, u32::MAX, u32::MAX],
        [heap, slot + 1, generation],
        [heap, u32::MAX, generation],
        [heap, u32::MAX - 1, generation],
        [heap, 1 << 20, generation],
        [heap, slot, generation.wrapping_add(1)],
        [heap, slot, generation.wrapping_sub(1)],
    ] {
        let forged = Allocation::new(real.address(), real.size_bytes(), real.owner(), Token(token));
        assert_eq!(refuses(&bed, forged), HandleError::Stale { address: real.address() });
    }
    for address in [0, real.address() + 512, real.address() - 512, u64::MAX] {
        let forged = Allocation::new(address, real.size_bytes(), real.owner(), real.token());
        assert_eq!(refuses(&bed, forged), HandleError::Stale { address });
    }
}

#[test]
fn bare_addresses_that_start_no_live_block_are_refused() {
    let (bed, mut live) = lived_in();
    let raw = &bed;
    let freed = live.pop().unwrap();
    let freed_at = freed.address();
    bed.give(freed);
    let mut strangers = vec![0, 1, 512, freed_at, live[0].address() + 1, u64::MAX, u64::MAX - 511];
    for segment in bed.layout() {
        strangers.push(segment.address + segment.size_bytes);
        strangers.push(segment.address.wrapping_sub(512));
        strangers.extend(segment.blocks.iter().map(|block| block.address + 256));
    }
    strangers.retain(|address| live.iter().all(|block| block.address() != *address));
    for address in strangers {
        let before = bed.state();
        let unknown = HandleError::UnknownAddress { address };
        assert_eq!(raw.free_raw(address), Err(unknown.clone()));
        assert_eq!(raw.record_stream_raw(address, SIDE), Err(unknown));
        assert_eq!(bed.state(), before);
    }
    for block in live {
        raw.free_raw(block.address()).unwrap();
        raw.free_raw(block.address()).unwrap_err();
    }
    bed.check();
}

#[test]
fn a_handle_of_an_allocator_that_is_gone_is_foreign_to_its_successor() {
    let orphan = {
        let bed = Bed::new(GIB, "");
        bed.take(512)
    };
    let bed = Bed::new(GIB, "");
    let block = bed.take(512);
    assert_eq!((block.address(), block.token()), (orphan.address(), orphan.token()));
    assert!(matches!(refuses(&bed, orphan), HandleError::Foreign { .. }));
}
