//! Per-thread default streams: a block is neither reused nor freed to the user's functions before the
//! work of the thread that freed it is done.

use super::{User, over};
use crate::common::prelude::*;
use crate::common::threaded::{OWN, Threaded, threaded};

const MAIN: StreamId = StreamId(64);
const POOL: PoolId = PoolId { capture: 0, user: 77 };

const TAKEN: &str = "alloc 4096 2";
const GIVEN_BACK: &str = "free 4096 2";

struct Bed {
    user: Arc<User>,
    device: Arc<Threaded>,
    own: PluggableAllocator,
}

impl Bed {
    /// Returns an allocator with a private pool that has one user.
    fn new() -> Self {
        let (user, device) = (User::with_bytes(u64::MAX / 2), threaded(1 << 30));
        let own = over(Arc::clone(&device) as Arc<dyn Driver>, user.callbacks());
        let bed = Self { user, device, own };
        bed.pools().create_pool(POOL, PoolOptions::default()).expect("a new pool");
        bed
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
    fn look(&self) -> u64 {
        let block = self.take(POOL);
        let address = block.address();
        self.give(block);
        address
    }

    /// Allocates and frees a block, with work before the free. Returns an event recorded after that
    /// work.
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
        elsewhere(|| self.empty())
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
    let bed = Bed::new();
    let address = bed.look();
    assert_ne!(elsewhere(|| bed.take(POOL).address()), address, "the work may run still");
    bed.device.interceptor().finish_own();
    // Any thread may poll the event. Afterwards any thread may get the block.
    elsewhere(|| bed.process());
    let mine = bed.take(POOL);
    assert_eq!(mine.address(), address, "the thread that freed it");
    bed.give(mine);
    bed.device.interceptor().finish_own();
    bed.process();
    assert_eq!(elsewhere(|| bed.look()), address, "another thread");
    assert_eq!(bed.user.heard(), [TAKEN; 2]);
}

#[test]
fn a_block_that_waited_for_another_stream_too_belongs_to_no_thread() {
    let bed = Bed::new();
    let block = bed.take(POOL);
    let address = block.address();
    bed.crossing().record_stream(&block, MAIN).unwrap();
    bed.give(block);
    bed.device.inner().complete_stream(MAIN);
    bed.device.interceptor().finish_own();
    elsewhere(|| bed.process());
    assert_eq!(bed.look(), address, "not kept for the thread that looked first");
}

#[test]
fn the_users_function_comes_behind_the_freeing_threads_work() {
    for uses in [&[][..], &[MAIN]] {
        let bed = Bed::new();
        let block = bed.take(PoolId::DEFAULT);
        uses.iter().for_each(|used| bed.crossing().record_stream(&block, *used).unwrap());
        bed.give(block);
        uses.iter().for_each(|used| bed.device.inner().complete_stream(*used));
        let process = || {
            elsewhere(|| bed.process());
            bed.user.said.lock().clone()
        };
        assert_eq!(process(), [TAKEN], "{uses:?}");
        bed.device.interceptor().finish_own();
        assert_eq!(process(), [TAKEN, GIVEN_BACK], "{uses:?}");
    }
}

#[test]
fn nothing_is_given_back_that_a_capture_forbids_to_wait_for() {
    for pool in [POOL, PoolId::DEFAULT] {
        let bed = Bed::new();
        let done = elsewhere(|| bed.use_up(pool));
        bed.pools().release_pool(POOL).unwrap();
        bed.device.begin(OWN).unwrap();
        assert!(!bed.empty(), "who captures may not wait");
        assert_eq!(bed.user.heard(), [TAKEN], "the other thread's work may run still");
        assert!(!elsewhere(|| bed.device.query_event(done)).unwrap());
        assert!(bed.empty_elsewhere());
        assert_eq!(bed.user.heard(), [GIVEN_BACK]);
        assert!(elsewhere(|| bed.device.query_event(done)).unwrap(), "it was waited for");
        assert!(bed.device.end(OWN).is_ok(), "the capture is whole");
    }
}

#[test]
fn an_event_that_has_not_passed_says_nothing_of_another_threads_stream() {
    let bed = Bed::new();
    let blocks = [bed.take(POOL), bed.take(POOL), bed.take(POOL)];
    let mut blocks = blocks.into_iter();
    let mut next = || blocks.next().expect("three");
    let (first, second, third) = (next(), next(), next());
    bed.give(first);
    bed.give(second);
    let address = third.address();
    elsewhere(|| {
        bed.give(third);
        bed.device.interceptor().finish_own();
    });
    let asked = bed.device.inner().calls("query_event");
    bed.process();
    assert_eq!(bed.device.inner().calls("query_event") - asked, 2, "one for each thread's stream");
    assert_eq!(bed.look(), address);
}

#[test]
fn a_block_freed_in_a_capture_comes_back_when_its_thread_has_gone() {
    for used in [None, Some(MAIN)] {
        let bed = Bed::new();
        elsewhere(|| {
            bed.device.begin(OWN).unwrap();
            let block = bed.take(PoolId::DEFAULT);
            used.iter().for_each(|used| bed.crossing().record_stream(&block, *used).unwrap());
            bed.give(block);
            bed.device.end(OWN).unwrap();
        });
        bed.process();
        assert_eq!(bed.user.heard(), [TAKEN], "nobody else can tell whether the capture has ended");
        let events = || bed.device.inner().calls("record_event");
        let before = events();
        assert!(bed.empty_elsewhere());
        assert_eq!(bed.user.heard(), [GIVEN_BACK], "{used:?}: the device was waited for");
        assert_eq!(
            events() - before,
            used.iter().count() as u64,
            "none on a third thread's stream"
        );
        assert!(bed.own.caching().layout().is_empty());
    }
}

#[test]
fn a_block_freed_in_a_capture_is_kept_until_the_capture_ends() {
    let bed = Bed::new();
    bed.device.begin(OWN).unwrap();
    let CaptureStatus::Active { capture } = bed.device.capture_status(OWN).unwrap() else {
        panic!("it was begun");
    };
    bed.pools().open_scope(POOL, ScopeFilter::Capture(capture)).unwrap();
    let block = bed.own.take_on(4096, OWN);
    let address = block.address();
    bed.give(block);
    let waits = bed.synchronizations();
    assert!(bed.empty_elsewhere());
    assert_eq!(bed.synchronizations(), waits, "the capture is known");
    bed.pools().close_scope(POOL).unwrap();
    assert!(!bed.empty_elsewhere(), "the device refuses to be waited for");
    assert_ne!(elsewhere(|| bed.take(POOL).address()), address);
    // The result of the capture does not matter here.
    let _ = bed.device.end(OWN);
    bed.process();
    bed.device.interceptor().finish_own();
    bed.process();
    assert_eq!(bed.look(), address);
}

#[test]
fn a_live_block_cannot_be_taken_back_by_a_checkpoint() {
    let bed = Bed::new();
    let checkpoint = bed.own.checkpoints().checkpoint(POOL).unwrap();
    let block = bed.take(POOL);
    let address = block.address();
    let restored = elsewhere(|| bed.own.checkpoints().restore(&checkpoint).map(|_| ()));
    assert_eq!(restored, Err(PoolError::UsedElsewhere { pool: POOL, address }));
    bed.give(block);
    assert!(bed.own.checkpoints().restore(&checkpoint).is_ok(), "it waits on");
    assert_ne!(elsewhere(|| bed.look()), address);
}
