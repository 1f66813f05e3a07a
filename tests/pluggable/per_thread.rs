//! Per-thread default streams. A block must neither be reused nor freed by the user's functions before
//! the work of the thread that freed it has finished.

use super::{User, over};
use crate::common::prelude::*;
use crate::common::threaded::{OWN, Threaded, threaded};

const MAIN: StreamId = StreamId(64);
const POOL: PoolId = PoolId { capture: 0, user: 77 };

const TAKEN: &str = "alloc 4096 2";
const GIVEN_BACK: &str = "free 4096 2";

struct Fixture {
    user: Arc<User>,
    device: Arc<Threaded>,
    own: PluggableAllocator,
}

impl Fixture {
    /// Returns an allocator with a private pool that has one user.
    fn new() -> Self {
        let (user, device) = (User::with_bytes(u64::MAX / 2), threaded(1 << 30));
        let own = over(Arc::clone(&device) as Arc<dyn Driver>, user.callbacks());
        let fixture = Self { user, device, own };
        fixture.pools().create_pool(POOL, PoolOptions::default()).expect("a new pool");
        fixture
    }

    fn pools(&self) -> &dyn PrivatePools {
        self.own.private_pools()
    }

    fn crossing(&self) -> &dyn CrossStream {
        self.own.cross_stream()
    }

    fn take(&self, pool: PoolId) -> Allocation {
        self.own.take_in(pool, 4096, OWN)
    }

    fn give(&self, block: Allocation) {
        self.own.give(block);
    }

    /// Allocates a block, frees it, and returns its address.
    fn probe(&self) -> u64 {
        let block = self.take(POOL);
        let address = block.address();
        self.give(block);
        address
    }

    /// Allocates a block, records an event on its stream, frees the block, and returns the event.
    fn use_up(&self, pool: PoolId) -> EventId {
        let block = self.take(pool);
        let done = self.device.create_event().expect("it has events");
        self.device.record_event(done, OWN).expect("the stream is there");
        self.give(block);
        done
    }

    fn empty(&self) -> bool {
        self.own.caching().empty_cache().is_ok()
    }

    fn empty_elsewhere(&self) -> bool {
        on_new_thread(|| self.empty())
    }

    fn process(&self) {
        self.crossing().process_events().expect("the device is well");
    }

    fn synchronizations(&self) -> u64 {
        self.device.inner().calls("synchronize_device")
    }
}

#[test]
fn an_idle_block_belongs_to_no_thread() {
    let fixture = Fixture::new();
    let address = fixture.probe();
    assert_ne!(on_new_thread(|| fixture.take(POOL).address()), address, "the work may run still");
    fixture.device.interceptor().finish_own();
    // Any thread may query the event of the free. Afterwards any thread may get the block.
    on_new_thread(|| fixture.process());
    let mine = fixture.take(POOL);
    assert_eq!(mine.address(), address, "the thread that freed it");
    fixture.give(mine);
    fixture.device.interceptor().finish_own();
    fixture.process();
    assert_eq!(on_new_thread(|| fixture.probe()), address, "another thread");
    assert_eq!(fixture.user.take_calls(), [TAKEN; 2]);
}

#[test]
fn a_block_that_waited_for_another_stream_too_belongs_to_no_thread() {
    let fixture = Fixture::new();
    let block = fixture.take(POOL);
    let address = block.address();
    fixture.crossing().record_stream(&block, MAIN).unwrap();
    fixture.give(block);
    fixture.device.inner().complete_stream(MAIN);
    fixture.device.interceptor().finish_own();
    on_new_thread(|| fixture.process());
    assert_eq!(fixture.probe(), address, "not kept for the thread that looked first");
}

#[test]
fn the_users_function_comes_behind_the_freeing_threads_work() {
    for uses in [&[][..], &[MAIN]] {
        let fixture = Fixture::new();
        let block = fixture.take(PoolId::DEFAULT);
        uses.iter().for_each(|used| fixture.crossing().record_stream(&block, *used).unwrap());
        fixture.give(block);
        uses.iter().for_each(|used| fixture.device.inner().complete_stream(*used));
        let process = || {
            on_new_thread(|| fixture.process());
            fixture.user.calls.lock().clone()
        };
        assert_eq!(process(), [TAKEN], "{uses:?}");
        fixture.device.interceptor().finish_own();
        assert_eq!(process(), [TAKEN, GIVEN_BACK], "{uses:?}");
    }
}

#[test]
fn nothing_is_freed_that_a_capture_forbids_to_wait_for() {
    for pool in [POOL, PoolId::DEFAULT] {
        let fixture = Fixture::new();
        let done = on_new_thread(|| fixture.use_up(pool));
        fixture.pools().release_pool(POOL).unwrap();
        fixture.device.begin(OWN).unwrap();
        assert!(!fixture.empty(), "a capturing thread may not wait");
        assert_eq!(fixture.user.take_calls(), [TAKEN], "the other thread's work may run still");
        assert!(!on_new_thread(|| fixture.device.query_event(done)).unwrap());
        assert!(fixture.empty_elsewhere());
        assert_eq!(fixture.user.take_calls(), [GIVEN_BACK]);
        assert!(on_new_thread(|| fixture.device.query_event(done)).unwrap(), "it was waited for");
        assert!(fixture.device.end(OWN).is_ok(), "the capture is whole");
    }
}

#[test]
fn an_unfinished_event_does_not_affect_another_threads_stream() {
    let fixture = Fixture::new();
    let blocks = [fixture.take(POOL), fixture.take(POOL), fixture.take(POOL)];
    let mut blocks = blocks.into_iter();
    let mut next = || blocks.next().expect("three");
    let (first, second, third) = (next(), next(), next());
    fixture.give(first);
    fixture.give(second);
    let address = third.address();
    on_new_thread(|| {
        fixture.give(third);
        fixture.device.interceptor().finish_own();
    });
    let queries = fixture.device.inner().calls("query_event");
    fixture.process();
    assert_eq!(
        fixture.device.inner().calls("query_event") - queries,
        2,
        "one for each thread's stream"
    );
    assert_eq!(fixture.probe(), address);
}

#[test]
fn a_block_freed_in_a_capture_comes_back_when_its_thread_has_gone() {
    for used in [None, Some(MAIN)] {
        let fixture = Fixture::new();
        on_new_thread(|| {
            fixture.device.begin(OWN).unwrap();
            let block = fixture.take(PoolId::DEFAULT);
            used.iter().for_each(|used| fixture.crossing().record_stream(&block, *used).unwrap());
            fixture.give(block);
            fixture.device.end(OWN).unwrap();
        });
        fixture.process();
        assert_eq!(
            fixture.user.take_calls(),
            [TAKEN],
            "no other thread can query whether the capture has ended"
        );
        let events = || fixture.device.inner().calls("record_event");
        let before = events();
        assert!(fixture.empty_elsewhere());
        assert_eq!(fixture.user.take_calls(), [GIVEN_BACK], "{used:?}: the device was waited for");
        assert_eq!(
            events() - before,
            used.iter().count() as u64,
            "none on a third thread's stream"
        );
        assert!(fixture.own.caching().layout().is_empty());
    }
}

#[test]
fn a_block_freed_in_a_capture_is_kept_until_the_capture_ends() {
    let fixture = Fixture::new();
    fixture.device.begin(OWN).unwrap();
    let CaptureStatus::Active { capture } = fixture.device.capture_status(OWN).unwrap() else {
        panic!("it was begun");
    };
    fixture.pools().open_scope(POOL, ScopeFilter::Capture(capture)).unwrap();
    let block = fixture.own.take_on(4096, OWN);
    let address = block.address();
    fixture.give(block);
    let waits = fixture.synchronizations();
    assert!(fixture.empty_elsewhere());
    assert_eq!(fixture.synchronizations(), waits, "the capture is known");
    fixture.pools().close_scope(POOL).unwrap();
    assert!(!fixture.empty_elsewhere(), "the device refuses to be waited for");
    assert_ne!(on_new_thread(|| fixture.take(POOL).address()), address);
    // Whether the capture succeeds does not matter here.
    let _ = fixture.device.end(OWN);
    fixture.process();
    fixture.device.interceptor().finish_own();
    fixture.process();
    assert_eq!(fixture.probe(), address);
}

#[test]
fn a_live_block_cannot_be_taken_back_by_a_checkpoint() {
    let fixture = Fixture::new();
    let checkpoint = fixture.own.checkpoints().checkpoint(POOL).unwrap();
    let block = fixture.take(POOL);
    let address = block.address();
    let restored = on_new_thread(|| fixture.own.checkpoints().restore(&checkpoint).map(|_| ()));
    assert_eq!(restored, Err(PoolError::UsedElsewhere { pool: POOL, address }));
    fixture.give(block);
    assert!(fixture.own.checkpoints().restore(&checkpoint).is_ok(), "it waits on");
    assert_ne!(on_new_thread(|| fixture.probe()), address);
}
