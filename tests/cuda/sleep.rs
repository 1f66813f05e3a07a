//! Tags on a real device: contents, free memory and graphs over a pause and a resume.

use stratalloc::allocator::{PauseOptions, Sleeping, TagOptions, TagState};
use stratalloc::driver::{PinnedMemory, PinnedRange};

use super::*;

#[test]
fn pinned_memory_makes_the_round_trip() {
    let Some((_alone, cuda)) = device() else { return };
    let stream = cuda.create_stream().unwrap();
    let block = cuda.allocate(4 * MIB).unwrap();
    let pinned = cuda.pin(8 * MIB).unwrap();
    let range = |offset_bytes| PinnedRange { pinned, offset_bytes, size_bytes: 4 * MIB };
    cuda.fill(block, 5, 4 * MIB, stream).unwrap();
    cuda.copy_out(range(4 * MIB), block, stream).unwrap();
    cuda.fill(block, 0, 4 * MIB, stream).unwrap();
    cuda.copy_in(block, range(4 * MIB), stream).unwrap();
    assert!(holds(&cuda, block, 4 * MIB, 5, stream));
    let mut bytes = [0; 100];
    cuda.read_pinned(pinned, 8 * MIB - 100, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 100]);
    cuda.write_pinned(pinned, 0, &[3; 100]).unwrap();
    let few = PinnedRange { pinned, offset_bytes: 0, size_bytes: 100 };
    cuda.copy_in(block, few, stream).unwrap();
    assert!(holds(&cuda, block, 100, 3, stream));
    for offset in [4 * MIB + 1, u64::MAX] {
        let refused = cuda.copy_out(range(offset), block, stream).unwrap_err();
        assert_eq!(refused.kind(), DriverErrorKind::InvalidValue);
    }
    cuda.unpin(pinned).unwrap();
    cuda.unpin(pinned).unwrap_err();
    cuda.free(block, 4 * MIB).unwrap();
    cuda.destroy_stream(stream).unwrap();
}

/// A graph captured over the memory of a tag gives the same bytes after each pause.
#[test]
fn contents_addresses_and_graphs_survive_pauses() {
    let Some((_alone, cuda)) = device() else { return };
    for (conf, keep_backup) in BOTH.into_iter().flat_map(|conf| [(conf, false), (conf, true)]) {
        let strategy = strategy(&cuda, conf);
        let tags: &dyn Sleeping = engine(&strategy);
        let pools: &dyn PrivatePools = engine(&strategy);
        let stream = cuda.create_stream().unwrap();
        let pool = PoolId::next_user();
        let tag = Some(TagOptions { keep_backup, ..TagOptions::host("weights") });
        pools.create_pool(pool, PoolOptions { tag, ..PoolOptions::default() }).unwrap();
        let blocks = [3 * MIB, 70 * MIB, 512].map(|bytes| strategy.take_in(pool, bytes, stream));
        let result = strategy.take_in(pool, 3 * MIB, stream);
        let values: Vec<(u64, u64, u8)> =
            (1..).zip(&blocks).map(|(n, block)| (block.address(), block.size_bytes(), n)).collect();
        for (address, bytes, value) in &values {
            cuda.fill(*address, *value, *bytes, stream).unwrap();
        }
        Capture::begin(&*cuda, stream).unwrap();
        cuda.copy(result.address(), blocks[0].address(), 3 * MIB, stream).unwrap();
        let graph = cuda.end_capture(stream).unwrap();
        for _ in 0..3 {
            let before = cuda.memory_info().unwrap().free_bytes;
            let mapped = tags.tag_info(pool).unwrap().mapped_bytes;
            let paused = tags.pause(pool, &PauseOptions::default()).unwrap();
            assert_eq!(paused.copied_bytes, tags.tag_info(pool).unwrap().live_bytes);
            let after = cuda.memory_info().unwrap().free_bytes;
            println!("{conf} {keep_backup}: {mapped} mapped, {} more are free", after - before);
            assert_eq!(tags.tag_info(pool).unwrap().state, TagState::Asleep);
            tags.resume(pool).unwrap();
            for (address, bytes, value) in &values {
                assert!(holds(&cuda, *address, *bytes, *value, stream), "{conf}");
            }
            cuda.fill(result.address(), 0, 3 * MIB, stream).unwrap();
            graph.launch(stream).unwrap();
            assert!(holds(&cuda, result.address(), 3 * MIB, 1, stream), "{conf}");
        }
        drop(graph);
        blocks.into_iter().chain([result]).for_each(|block| strategy.give(block));
        drop(strategy);
        cuda.destroy_stream(stream).unwrap();
    }
}
