//! A pause saves exactly the live bytes and releases all memory; a resume restores both.

use super::*;

const SIZES: [u64; 7] = [512, 3000, MIB, 2 * MIB, 5 * MIB, 700 * KIB, 12 * MIB];

/// Allocates blocks of mixed sizes on two streams in the tag and frees every third.
fn fill_tag(allocator: &Strategy, device: &dyn Driver) -> Vec<Allocation> {
    let mut blocks = Vec::new();
    for (at, bytes) in (0u64..).zip(SIZES.iter().chain(&SIZES)) {
        let stream = if at % 2 == 0 { HOME } else { SIDE };
        let block = allocator.take_in(TAG, *bytes, stream);
        write(device, block.address(), block.size_bytes(), 1, stream);
        blocks.push(block);
    }
    let mut at = 0;
    blocks
        .into_iter()
        .filter_map(|block| {
            at += 1;
            if at % 3 == 0 {
                allocator.give(block)
            } else {
                return Some(block);
            };
            None
        })
        .collect()
}

fn used(device: &dyn Driver) -> u64 {
    let info = device.memory_info().expect("it works");
    info.total_bytes - info.free_bytes
}

#[test]
fn contents_return_at_the_same_addresses() {
    for conf in BOTH {
        for tag in kinds_of_backup() {
            let host = host();
            let allocator = built(conf, host.clone());
            create(&allocator, tag.clone());
            let other = allocator.take(4 * MIB);
            let blocks = fill_tag(&allocator, &*host);
            for round in 0..3 {
                let before = info(&allocator);
                assert_eq!(before.state, TagState::Awake);
                let used_before = used(&*host);
                let paused = sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
                assert_eq!(paused.copied_bytes, before.live_bytes, "live bytes only");
                // Each share of the ring cuts one block at most.
                assert!(paused.copies <= blocks.len() as u64 + before.live_bytes / (4 * MIB));
                assert_eq!((paused.still_held_bytes, &paused.error), (0, &None));
                assert!(paused.unmapped_bytes <= before.mapped_bytes);
                let asleep = info(&allocator);
                assert_eq!(asleep.state, TagState::Asleep);
                assert_eq!((asleep.mapped_bytes, asleep.live_bytes), (0, before.live_bytes));
                assert_eq!(asleep.backed_bytes, before.live_bytes);
                assert_eq!(asleep.asleep_bytes, paused.unmapped_bytes);
                assert_eq!(used(&*host), used_before - before.mapped_bytes, "to the page");
                let kept = if tag.keep_backup { before.live_bytes } else { 0 };
                assert_eq!(asleep.kept_backup_bytes, kept);

                let mut bytes = vec![0; 100];
                let first = &blocks[0];
                sleeping(&allocator).read_backup(first.address() + 50, &mut bytes).unwrap();
                assert_eq!(bytes, pattern(first.address(), first.size_bytes(), 1)[50..150]);

                let resumed = sleeping(&allocator).resume(TAG).unwrap();
                assert_eq!(resumed.copied_bytes, paused.copied_bytes);
                assert_eq!(resumed.mapped_bytes, paused.unmapped_bytes);
                let awake = info(&allocator);
                assert_eq!((awake.state, awake.backed_bytes), (TagState::Awake, 0));
                assert_eq!((awake.pauses, awake.resumes), (round + 1, round + 1));
                for block in &blocks {
                    let (address, bytes) = (block.address(), block.size_bytes());
                    assert!(holds(&*host, address, bytes, 1, HOME), "{conf} {address:#x}");
                }
            }
            assert_eq!(host.calls("synchronize_device"), 0, "events suffice");
            blocks.into_iter().for_each(|block| allocator.give(block));
            allocator.give(allocator.take_in(TAG, 40 * MIB, HOME));
            allocator.give(other);
            drop(allocator);
            assert!(host.held().is_nothing(), "{:?}", host.held());
        }
    }
}

#[test]
fn a_backup_larger_than_the_ring_passes_through_it() {
    let host = Arc::new(Host::with_bytes(GIB));
    let allocator = built("", host.clone());
    create(&allocator, TagOptions::host("weights"));
    let sizes = [30 * MIB, 3 * MIB + 512, 47 * MIB, 512];
    let blocks = sizes.map(|bytes| allocator.take_in(TAG, bytes, HOME));
    blocks.iter().for_each(|b| write(&*host, b.address(), b.size_bytes(), 3, HOME));
    let paused = sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    assert_eq!(paused.copied_bytes, info(&allocator).live_bytes);
    let pinned_bytes = host.held().pinned_bytes;
    // Two buffers a thread, at most 16 threads.
    assert!(paused.copies > 10 && (8 * MIB..=128 * MIB).contains(&pinned_bytes));
    let mut bytes = vec![0; 20 << 20];
    sleeping(&allocator).read_backup(blocks[0].address() + 5, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(blocks[0].address(), 30 * MIB, 3)[5..5 + bytes.len()]);
    sleeping(&allocator).resume(TAG).unwrap();
    for block in blocks {
        assert!(holds(&*host, block.address(), block.size_bytes(), 3, HOME));
        allocator.give(block);
    }
    allocator.caching().empty_cache().unwrap();
    assert_eq!(host.held().pinned_bytes, 0, "the ring is released with the cache");
}

#[test]
fn a_pause_without_backup_lists_what_it_drops() {
    for conf in BOTH {
        let host = host();
        let allocator = built(conf, host.clone());
        create(&allocator, TagOptions::dropped("cache"));
        let blocks = [3 * MIB, 100, 30 * MIB].map(|bytes| allocator.take_in(TAG, bytes, HOME));
        let paused = sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        let dropped: BTreeMap<_, _> =
            paused.dropped.iter().map(|block| (block.address, block.size_bytes)).collect();
        let live = blocks.iter().map(|block| (block.address(), block.size_bytes()));
        assert_eq!(dropped, live.collect());
        assert_eq!((paused.copied_bytes, paused.copies), (0, 0));
        assert_eq!(used(&*host), 0);
        let [first, ..] = &blocks;
        let refused = sleeping(&allocator).read_backup(first.address(), &mut [0]);
        assert!(refused.unwrap_err().to_string().contains("no backup"));
        assert_eq!(sleeping(&allocator).resume(TAG).unwrap().copied_bytes, 0);
        blocks.into_iter().for_each(|block| allocator.give(block));
    }
}

#[test]
fn the_backup_can_be_chosen_at_each_pause() {
    let host = host();
    let allocator = built("", host.clone());
    create(&allocator, TagOptions::dropped("cache"));
    let block = allocator.take_in(TAG, 3 * MIB, HOME);
    write(&*host, block.address(), block.size_bytes(), 9, HOME);
    let options = PauseOptions { backup: Some(Backup::Host), ..PauseOptions::default() };
    assert_eq!(sleeping(&allocator).pause(TAG, &options).unwrap().copied_bytes, 3 * MIB);
    sleeping(&allocator).resume(TAG).unwrap();
    assert!(holds(&*host, block.address(), block.size_bytes(), 9, HOME));
    allocator.give(block);
}

/// Work that is submitted before the pause runs before the copies, on each stream that uses the tag.
#[test]
fn a_pause_waits_for_the_streams_of_the_tag_and_of_its_blocks() {
    let host = host();
    let allocator = built("", host.clone());
    create(&allocator, TagOptions::host("weights"));
    let [own, used, named] = [HOME, SIDE, FAR].map(|_| allocator.take_in(TAG, MIB, HOME));
    allocator.record(&used, SIDE);
    let gates = [HOME, SIDE, FAR].map(|stream| host.hold(stream));
    for (block, stream) in [(&own, HOME), (&used, SIDE), (&named, FAR)] {
        host.fill(block.address(), 0xAB, MIB, stream).unwrap();
    }
    let options = PauseOptions { streams: vec![FAR], ..PauseOptions::default() };
    thread::scope(|scope| {
        let pausing = scope.spawn(|| sleeping(&allocator).pause(TAG, &options).unwrap());
        while info(&allocator).state != TagState::Pausing {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20));
        assert_eq!(info(&allocator).state, TagState::Pausing, "work is held back");
        gates.into_iter().for_each(drop);
        assert_eq!(pausing.join().unwrap().copied_bytes, 3 * MIB);
    });
    assert_eq!(host.calls("synchronize_device"), 0);
    for block in [&own, &used, &named] {
        let mut bytes = vec![0; 1 << 20];
        sleeping(&allocator).read_backup(block.address(), &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0xAB));
    }
    sleeping(&allocator).resume(TAG).unwrap();
    [own, used, named].into_iter().for_each(|block| allocator.give(block));
}

#[test]
fn two_tags_share_no_page_and_pause_independently() {
    for conf in BOTH {
        let host = host();
        let allocator = built(conf, host.clone());
        create(&allocator, TagOptions::host("weights"));
        let other = PoolId { user: 78, ..TAG };
        let pools = allocator.private_pools();
        pools.create_pool(other, tagged(TagOptions::host("cache"))).unwrap();
        let first = allocator.take_in(TAG, 700, HOME);
        let second = allocator.take_in(other, 700, HOME);
        write(&*host, first.address(), 700, 1, HOME);
        write(&*host, second.address(), 700, 2, HOME);
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        assert!(holds(&*host, second.address(), 700, 2, HOME));
        let states: Vec<_> =
            sleeping(&allocator).tags().into_iter().map(|(pool, tag)| (pool, tag.state)).collect();
        assert_eq!(states, [(TAG, TagState::Asleep), (other, TagState::Awake)]);
        sleeping(&allocator).pause(other, &PauseOptions::default()).unwrap();
        sleeping(&allocator).resume(TAG).unwrap();
        assert!(holds(&*host, first.address(), 700, 1, HOME));
        allocator.give(second);
        allocator.give(first);
    }
}

/// Under `native` a segment of a tag has the size that a fixed segment would have, and it is split by the
/// same rule.
#[test]
fn segments_of_a_tag_have_the_sizes_of_the_setting() {
    let sizes = |conf: &str, tag: bool| {
        let host = host();
        let allocator = built(conf, host);
        let pools = allocator.private_pools();
        let options =
            if tag { tagged(TagOptions::host("weights")) } else { PoolOptions::default() };
        pools.create_pool(TAG, options).unwrap();
        let bytes = [512, 3000, 5 * MIB, 9 * MIB, 14 * MIB, 31 * MIB, MIB + 1, 18 * MIB];
        let blocks = bytes.map(|bytes| allocator.take_in(TAG, bytes, HOME));
        // An oversize block, which `max_split_size_mb` does not split.
        let oversize = allocator.take_in(TAG, 40 * MIB, HOME);
        allocator.give(oversize);
        let small = allocator.take_in(TAG, 11 * MIB, HOME);
        let layout = pools.pool_layout(TAG).unwrap();
        assert!(layout.iter().all(|segment| segment.expandable == tag));
        // A mapped range of a reservation is one segment, wherever the addresses are.
        let mut found: Vec<Vec<u64>> = layout
            .iter()
            .map(|segment| segment.blocks.iter().map(|block| block.size_bytes).collect())
            .collect();
        found.sort();
        blocks.into_iter().chain([small]).for_each(|block| allocator.give(block));
        found
    };
    for conf in ["", "max_split_size_mb:20"] {
        assert_eq!(sizes(conf, true), sizes(conf, false), "{conf}");
    }
}

#[test]
fn a_stream_that_was_destroyed_needs_a_wait_that_scopes_forbid() {
    let host = host();
    let allocator = built("", host.clone());
    create(&allocator, TagOptions::host("weights"));
    let stream = host.create_stream().unwrap();
    let block = allocator.take_in(TAG, MIB, stream);
    host.destroy_stream(stream).unwrap();
    let pools = allocator.private_pools();
    let other = PoolScope::open(pools, PoolId::next_user(), ScopeFilter::this_thread()).unwrap();
    let refused = sleeping(&allocator).pause(TAG, &PauseOptions::default());
    assert_eq!(refused, Err(SleepError::NeedsSynchronization { pool: TAG }));
    drop(other);
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    sleeping(&allocator).resume(TAG).unwrap();
    allocator.give(block);
}

#[test]
fn numbers_of_other_pools_leave_out_what_sleeps() {
    let host = Arc::new(Host::with_bytes(64 * MIB));
    let allocator = built("", host);
    create(&allocator, TagOptions::host("weights"));
    let sleeps = [30 * MIB; 2].map(|bytes| allocator.take_in(TAG, bytes, HOME));
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    assert_eq!(allocator.stats().cached_bytes(), 0);
    assert_eq!(allocator.stats().paused_bytes, 60 * MIB);
    let other = allocator.take(30 * MIB);
    let Err(SleepError::OutOfMemory(report)) = sleeping(&allocator).resume(TAG) else {
        panic!("34 of 60 MiB are free")
    };
    // The first piece was created, and released before the report.
    assert_eq!((report.missing_bytes, report.device_free_bytes), (26 * MIB, Some(34 * MIB)));
    let Err(AllocError::OutOfMemory(report)) = allocator.try_allocate(60 * MIB, HOME) else {
        panic!("34 MiB are free")
    };
    assert_eq!((report.reserved_bytes, report.allocated_bytes), (30 * MIB, 30 * MIB));
    allocator.give(other);
    sleeps.into_iter().for_each(|block| allocator.give(block));
}

#[test]
fn a_long_read_of_a_backup_needs_one_block() {
    for tag in kinds_of_backup() {
        let host = host();
        let allocator = built("expandable_segments:True", host.clone());
        create(&allocator, tag);
        let blocks = [18 * MIB, 2 * MIB].map(|bytes| allocator.take_in(TAG, bytes, HOME));
        blocks.iter().for_each(|b| write(&*host, b.address(), b.size_bytes(), 5, HOME));
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        let [address, second] = [blocks[0].address(), blocks[1].address()];
        assert_eq!(second, address + 18 * MIB, "they are neighbours");
        let mut bytes = vec![0; 18 << 20];
        sleeping(&allocator).read_backup(address, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(address, 18 * MIB, 5));
        let beyond = sleeping(&allocator).read_backup(address + 2 * MIB, &mut bytes);
        assert_eq!(beyond, Err(SleepError::NoBackup { address: address + 2 * MIB }));
        blocks.into_iter().for_each(|block| allocator.give(block));
    }
}
