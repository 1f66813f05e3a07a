//! The context of an entry describes what requested it. Tests stack levels, scopes, and stack providers that
//! misbehave.

use std::panic;

use stratalloc::history::Context;
#[cfg(feature = "stacks")]
use stratalloc::history::RustStacks;

use super::{recorded, unrecorded};
use crate::common::prelude::*;

const CONFS: [&str; 4] =
    ["backend:native", "backend:cudaMallocAsync", "backend:cpu", "backend:pinned"];

#[test]
fn each_level_gathers_its_stacks_and_all_are_released() {
    let levels = [
        (StackLevel::Never, [false, false, false]),
        (StackLevel::OfLiveBlocks, [true, false, false]),
        (StackLevel::OfAllocations, [true, true, false]),
        (StackLevel::OfFrees, [true, true, true]),
    ];
    for conf in CONFS {
        for (level, [of_blocks, of_allocations, of_frees]) in levels {
            let (allocator, history) = unrecorded(conf);
            let (provider, alive) = Counted::provider("step");
            history.set_stack_provider(Some(provider));
            history.start(&RecordOptions::default().with_stacks(level));
            let kept = allocator.take(4096);
            allocator.free(allocator.take(512)).unwrap();
            for entry in history.entries().iter() {
                let expected = match entry.event.action {
                    Action::Alloc | Action::SegmentAlloc => of_allocations,
                    _ => of_frees,
                };
                let frames = entry.context.as_ref().map(Context::frames).unwrap_or_default();
                assert_eq!(!frames.is_empty(), expected, "{conf} {level:?} {entry:?}");
            }
            let snapshot = allocator.recording().snapshot();
            let holders = snapshot.segments.iter().flat_map(|segment| &segment.holders);
            let held: Vec<_> = holders.flatten().flat_map(Context::frames).collect();
            assert_eq!(held.len(), usize::from(of_blocks), "{conf} {level:?}");
            assert!(held.iter().all(|frame| frame.function == "step"));
            drop((snapshot, held));
            allocator.give(kept);
            history.stop();
            assert_eq!(alive.load(Ordering::Relaxed), 0, "{conf} {level:?}");
        }
    }
}

#[test]
fn a_block_that_is_freed_lets_its_stack_go() {
    let (allocator, history) = unrecorded("backend:native");
    let (provider, alive) = Counted::provider("step");
    history.set_stack_provider(Some(provider));
    history.start(&RecordOptions::at_most(1).with_stacks(StackLevel::OfLiveBlocks));
    let first = allocator.take(512);
    for _ in 0..10_000 {
        allocator.free(allocator.take(512)).unwrap();
    }
    // Only the first block is live, so only its stack exists.
    assert_eq!(alive.load(Ordering::Relaxed), 1);
    allocator.give(first);
}

#[test]
fn scopes_nest_and_say_what_a_thread_does() {
    let (allocator, history) = recorded("backend:native");
    history.set_metadata(Some("epoch 3"));
    let block = {
        let _training = Context::scope("training");
        let _optimizer = Context::scope("optimizer");
        let _compiled = Context::compiled("region 0/1");
        allocator.take(512)
    };
    allocator.give(block);
    let entries = history.entries();
    let contexts: Vec<_> = entries.iter().map(|entry| entry.context.clone().unwrap()).collect();
    let names = |context: &Context| -> Vec<String> {
        context.frames().into_iter().map(|frame| frame.function).collect()
    };
    assert_eq!(names(&contexts[1]), ["optimizer", "training"]);
    assert_eq!(contexts[1].compile_context(), Some("region 0/1"));
    assert_eq!(contexts[2].compile_context(), None);
    assert!(names(&contexts[2]).is_empty());
    assert!(contexts.iter().all(|context| context.metadata() == Some("epoch 3")));
}

#[test]
fn a_provider_may_panic() {
    let (allocator, history) = unrecorded("backend:native");
    let angry = || -> Option<Arc<dyn Stack>> { panic::panic_any("no stack today") };
    history.set_stack_provider(Some(Arc::new(angry)));
    history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
    allocator.free(allocator.take(512)).unwrap();
    assert_eq!(history.entries().len(), 4);
    assert!(history.entries().iter().all(|entry| entry.context.is_none()));
}

/// A stack that owns a block of the same allocator and frees it on drop.
#[derive(Debug)]
struct Holding {
    allocator: Switchable,
    block: Mutex<Option<Allocation>>,
}

impl Stack for Holding {
    fn frames(&self) -> Vec<Frame> {
        Vec::new()
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        if let Some(block) = self.block.lock().take() {
            self.allocator.give(block);
        }
    }
}

#[test]
fn providers_and_their_stacks_may_allocate_and_free() {
    for conf in CONFS {
        let (allocator, history) = unrecorded(conf);
        let own = allocator.clone();
        let gather = move || -> Option<Arc<dyn Stack>> {
            let block = own.try_allocate(512, StreamId(0)).ok();
            Some(Arc::new(Holding { allocator: own.clone(), block: Mutex::new(block) }))
        };
        history.set_stack_provider(Some(Arc::new(gather)));
        history.start(&RecordOptions::at_most(100).with_stacks(StackLevel::OfFrees));
        for _ in 0..2000 {
            allocator.free(allocator.take(512)).unwrap();
        }
        history.set_stack_provider(None);
        history.stop();
        let live = allocator.recording().snapshot();
        let requested = live.segments.iter().flat_map(|segment| &segment.layout.blocks);
        let state = stratalloc::history::BlockStateName::ActiveAllocated;
        assert_eq!(requested.filter(|block| block.state == state).count(), 0, "{conf}");
    }
}

#[test]
fn trackers_hear_of_each_entry_and_may_allocate_and_go() {
    for conf in CONFS {
        let (allocator, history) = recorded(conf);
        let entries_seen = Arc::new(Mutex::new(Vec::new()));
        let (log, own) = (Arc::clone(&entries_seen), allocator.clone());
        let id = history.add_tracker(Arc::new(move |entry| {
            log.lock().push(entry.event.action);
            own.free(own.take(64)).expect("it is live");
        }));
        let angry = history.add_tracker(Arc::new(|_| panic::panic_any("not today")));
        let block = allocator.take(4096);
        assert_eq!(entries_seen.lock().last(), Some(&Action::Alloc), "{conf}");
        allocator.give(block);
        let last: Vec<_> = entries_seen.lock().iter().rev().take(2).copied().collect();
        assert_eq!(last, [Action::FreeCompleted, Action::FreeRequested], "{conf}");
        assert!(history.remove_tracker(id) && history.remove_tracker(angry));
        assert!(!history.remove_tracker(id));
        let before = entries_seen.lock().len();
        allocator.free(allocator.take(4096)).unwrap();
        assert_eq!(entries_seen.lock().len(), before, "{conf}");
    }
}

#[test]
fn annotations_say_where_something_begins_and_ends() {
    let (allocator, history) = unrecorded("backend:native");
    history.annotate([("name", "before anything is recorded")]);
    history.start(&RecordOptions::default());
    {
        let _step = history.annotated("step \"1\"\n</script>");
        allocator.free(allocator.take(4096)).expect("it is live");
    }
    let snapshot = allocator.recording().snapshot();
    let annotations: Vec<_> =
        snapshot.annotations.iter().map(|annotations| annotations.words.clone()).collect();
    let word = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let of = |stage| vec![word("name", "step \"1\"\n</script>"), word("stage", stage)];
    assert_eq!(annotations, [of("START"), of("END")]);
    let between = snapshot.annotations[0].time_us..=snapshot.annotations[1].time_us;
    assert!(snapshot.entries.iter().all(|entry| between.contains(&entry.time_us())));
    history.clear();
    assert!(allocator.recording().snapshot().annotations.is_empty());
    for _ in 0..65_537 {
        history.annotate([("name", "again")]);
    }
    assert_eq!(allocator.recording().snapshot().annotations.len(), 65_536);
}

/// Not inlined, so that its frame exists even in builds without debug information for inlined functions.
#[cfg(feature = "stacks")]
#[inline(never)]
fn take_a_thousand(allocator: &Switchable) -> Vec<Allocation> {
    (0..1000).map(|_| take_one(allocator)).collect()
}

/// Not inlined, as above.
#[cfg(feature = "stacks")]
#[inline(never)]
fn take_one(allocator: &Switchable) -> Allocation {
    allocator.take(512)
}

#[cfg(feature = "stacks")]
#[test]
fn stacks_of_the_program_are_held_once_and_begin_at_the_request() {
    for conf in ["backend:native", "backend:cudaMallocAsync", "layers:[statistics,limit:1GiB]"] {
        let (allocator, history) = unrecorded(conf);
        let provider = Arc::new(RustStacks::new());
        history.set_stack_provider(Some(Arc::clone(&provider) as _));
        history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
        let blocks = take_a_thousand(&allocator);
        assert_eq!(provider.held(), 1, "{conf}");
        let entries = history.entries();
        let allocated = entries.iter().find(|entry| entry.event.action == Action::Alloc).unwrap();
        let frames = allocated.context.as_ref().unwrap().frames();
        let first = &frames[0].function;
        // If there are only line tables, the name of an inlined function has no module path.
        let is_own = first.starts_with("main::") || first.starts_with("take");
        assert!(is_own && first.contains("take"), "{conf}: {frames:?}");
        let is_caller = |frame: &Frame| frame.function.ends_with("take_a_thousand");
        assert!(frames.iter().any(is_caller), "{conf}: {frames:?}");
        drop(entries);
        blocks.into_iter().for_each(|block| allocator.give(block));
        assert_eq!(provider.held(), 2, "{conf}: the frees are another place");
        history.stop();
        assert_eq!(provider.held(), 0, "{conf}");
    }
}
