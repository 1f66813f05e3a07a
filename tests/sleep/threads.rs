//! Several threads allocate, free and access blocks of tags while others pause and resume these.

use parking_lot::RwLock;

use super::*;
use stratalloc::allocator::WhileAsleep;

const WORKERS: u64 = 6;
const STREAMS: [StreamId; 3] = [HOME, SIDE, FAR];

/// Requests and frees run at any time. Memory is accessed only while the reader lock is held, because the
/// pausing threads hold the writer lock as long as a tag sleeps.
#[test]
fn workers_keep_their_bytes_while_tags_sleep_and_wake() {
    for conf in BOTH {
        let host = Arc::new(Host::with_bytes(GIB));
        let allocator = built(conf, host.clone());
        let tags = [TAG, PoolId { user: 78, ..TAG }];
        for (at, pool) in (0..).zip(tags) {
            let name = format!("tag {at}");
            let keep_backup = at == 0;
            let requests = WhileAsleep::Wait;
            let tag = TagOptions { keep_backup, requests, ..TagOptions::host(name) };
            allocator.private_pools().create_pool(pool, tagged(tag)).unwrap();
        }
        let awake = RwLock::new(());
        let working = AtomicUsize::new(usize::try_from(WORKERS).unwrap());
        thread::scope(|scope| {
            for worker in 0..WORKERS {
                let (host, allocator, awake, working) = (&host, &allocator, &awake, &working);
                scope.spawn(move || {
                    work(worker, host, allocator, &tags, awake);
                    working.fetch_sub(1, SeqCst);
                });
            }
            for pool in tags {
                let (allocator, awake, working) = (&allocator, &awake, &working);
                scope.spawn(move || {
                    while working.load(SeqCst) > 0 {
                        let _asleep = awake.write();
                        pause_and_resume_twice(allocator, pool);
                    }
                });
            }
        });
        for pool in tags {
            let tag = sleeping(&allocator).tag_info(pool).unwrap();
            assert_eq!((tag.state, tag.live_bytes, tag.backed_bytes), (TagState::Awake, 0, 0));
            assert!(tag.pauses > 0 && tag.pauses == tag.resumes);
        }
        drop(allocator);
        assert!(host.held().is_nothing(), "{:?}", host.held());
    }
}

/// Two threads at once: one of them does the work, the other does nothing.
fn pause_and_resume_twice(allocator: &Strategy, pool: PoolId) {
    let tags = sleeping(allocator);
    thread::scope(|scope| {
        scope.spawn(|| tags.pause(pool, &PauseOptions::default()).expect("it can"));
        tags.pause(pool, &PauseOptions::default()).expect("it can");
    });
    assert_eq!(tags.tag_info(pool).expect("it is a tag").state, TagState::Asleep);
    thread::scope(|scope| {
        scope.spawn(|| tags.resume(pool).expect("it can"));
        tags.resume(pool).expect("it can");
    });
}

fn work(worker: u64, host: &Host, allocator: &Strategy, tags: &[PoolId], awake: &RwLock<()>) {
    let mut rng = Rng::new(worker + 1);
    let mut held: Vec<(Allocation, u64, StreamId)> = Vec::new();
    for step in 0..runs(150) {
        if held.len() > 6 || (!held.is_empty() && rng.below(3) == 0) {
            let (block, seed, stream) = held.swap_remove(rng.below(held.len()));
            {
                let _reads = awake.read();
                assert!(holds_ends(host, &block, seed, stream), "{:#x}", block.address());
                if rng.below(2) == 0 {
                    allocator.record(&block, STREAMS[rng.below(3)]);
                }
            }
            allocator.give(block);
            continue;
        }
        let stream = STREAMS[rng.below(3)];
        let bytes = [512, 3000, 300 * KIB, 1500 * KIB][rng.below(4)];
        let block = allocator.take_in(tags[rng.below(tags.len())], bytes, stream);
        let _writes = awake.read();
        let seed = worker * 1000 + step;
        write_ends(host, &block, seed, stream);
        held.push((block, seed, stream));
    }
    held.into_iter().for_each(|(block, ..)| allocator.give(block));
}
