//! The report of a failed request: the stacks that hold the memory, and the configuration.

use stratalloc::history::Context;

use super::{build_over, history, sim};
use crate::common::prelude::*;

/// A stack that is a separate object for each request and has one of two frames.
#[derive(Debug)]
struct Numbered(u64);

impl Stack for Numbered {
    fn frames(&self) -> Vec<Frame> {
        let function = if self.0.is_multiple_of(4) { "optimizer" } else { "forward\u{1b}[2J" };
        vec![Frame { function: function.to_owned(), file: "train.py".to_owned(), line: 12 }]
    }
}

#[test]
fn the_largest_holders_are_named_with_count_and_age() {
    for conf in [
        "backend:native,max_split_size_mb:64",
        "backend:cudaMallocAsync",
        "backend:native,layers:[limit:50MiB]",
    ] {
        let allocator = build_over(conf, sim(64 * MIB));
        let history = history(&allocator);
        let next = AtomicU64::new(0);
        let gather = move || -> Option<Arc<dyn Stack>> {
            Some(Arc::new(Numbered(next.fetch_add(1, Ordering::Relaxed))))
        };
        history.set_stack_provider(Some(Arc::new(gather)));
        history.start(&RecordOptions::at_most(1).with_stacks(StackLevel::OfLiveBlocks));
        let live: Vec<_> = (0..8).map(|_| allocator.take(4 * MIB)).collect();
        let report = allocator.fail(60 * MIB, HOME);
        let reported: Vec<_> =
            report.live.iter().map(|l| (l.bytes, l.blocks, &*l.frames)).collect();
        let frames = ["forward?[2J (train.py:12)", "optimizer (train.py:12)"].map(str::to_owned);
        assert_eq!(reported, [(24 * MIB, 6, &frames[..1]), (8 * MIB, 2, &frames[1..])], "{conf}");
        let text = report.to_string();
        assert!(text.contains("Live: 24.00 MiB in 6 blocks, up to 0.0 s old: forward?"), "{text}");
        assert!(
            text.contains(&format!("In force: {conf}").replace("backend:native,", "")),
            "{text}"
        );
        live.into_iter().for_each(|block| allocator.give(block));
    }
}

#[test]
fn scopes_alone_name_holders_too() {
    let allocator = build_over("backend:native", sim(64 * MIB));
    history(&allocator).start(&RecordOptions::at_most(1).with_stacks(StackLevel::OfLiveBlocks));
    let _weights = {
        let _scope = Context::scope("weights");
        allocator.take(40 * MIB)
    };
    let report = allocator.fail(60 * MIB, HOME);
    assert_eq!((report.live.len(), report.live[0].frames.clone()), (1, vec!["weights".to_owned()]));
}

#[test]
fn a_request_larger_than_the_device_is_reported_as_that() {
    let allocator = build_over("backend:native", sim(64 * MIB));
    let text = allocator.fail(65 * MIB, HOME).to_string();
    let expected = "out of memory on device 0: tried to allocate 65.00 MiB.\n\
                    The device has 64.00 MiB in total: no setting makes room for this request.\n";
    assert_eq!(text, expected);
}
