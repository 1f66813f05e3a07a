//! The holders of the live bytes at a moment. Blocks are grouped by caller, or by stream and size if no
//! stacks are recorded.

use std::cmp::Reverse;
use std::collections::HashMap;

use stratalloc_analysis::Callers;
use stratalloc_analysis::lives::{Block, Lives};
use stratalloc_recording::StackId;

/// The blocks of one caller, or the blocks of one size on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The stack of one of the blocks.
    pub stack: Option<StackId>,
    /// Whether the blocks were allocated before the recording began.
    pub lived_before: bool,
    /// The index of the stream. If the caller has several, that of the first block.
    pub stream: u32,
    /// The requested bytes of each block; 0 if they differ.
    pub each_bytes: u64,
    pub blocks: u64,
    pub requested_bytes: u64,
    /// The number of events after the oldest block's request.
    pub(crate) oldest_events: u32,
    /// The number of events after the newest block's request.
    pub(crate) newest_events: u32,
}

/// All live blocks at one moment.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    pub blocks: u64,
    pub requested_bytes: u64,
    pub has_stacks: bool,
    /// The holders with a caller, or if there are none, by size; largest first.
    pub holders: Vec<Holder>,
    /// If there are callers: the blocks without a recorded stack, and those from before the recording.
    pub(crate) without_stack: Vec<Holder>,
}

/// The key by which blocks are grouped.
#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key {
    Caller(u32),
    NoStack,
    LivedBefore,
    Size { stream: u32, each_bytes: u64 },
}

impl Holders {
    pub(crate) fn of(lives: &Lives, callers: &Callers<'_>, moment: u32) -> Self {
        let is_live = |block: &&Block| block.born <= moment && moment < block.freed;
        let live = || lives.blocks.iter().filter(is_live);
        let has_stacks = live().any(|block| block.stack.is_some());
        let mut found: HashMap<Key, Holder> = HashMap::new();
        let mut all = Self { has_stacks, ..Self::default() };
        for block in live() {
            let age = moment - block.born;
            let lived_before = lives.lived_before(block);
            let (stream, each_bytes) = (block.stream, block.requested_bytes);
            let key = match (has_stacks, block.stack) {
                (false, _) => Key::Size { stream, each_bytes },
                (true, Some(stack)) => Key::Caller(callers.of_stack(stack)),
                (true, None) if lived_before => Key::LivedBefore,
                (true, None) => Key::NoStack,
            };
            let holder = found.entry(key).or_insert(Holder {
                stack: block.stack,
                lived_before,
                stream,
                each_bytes,
                blocks: 0,
                requested_bytes: 0,
                oldest_events: age,
                newest_events: age,
            });
            holder.blocks += 1;
            holder.requested_bytes = holder.requested_bytes.saturating_add(block.requested_bytes);
            holder.oldest_events = holder.oldest_events.max(age);
            holder.newest_events = holder.newest_events.min(age);
            if holder.each_bytes != block.requested_bytes {
                holder.each_bytes = 0;
            }
            all.blocks += 1;
            all.requested_bytes = all.requested_bytes.saturating_add(block.requested_bytes);
        }
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let (without_stack, with_stack): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|(key, _)| matches!(key, Key::NoStack | Key::LivedBefore));
        all.without_stack = without_stack.into_iter().map(|(_, holder)| holder).collect();
        all.holders = with_stack.into_iter().map(|(_, holder)| holder).collect();
        all.holders.sort_by_key(|holder| Reverse(holder.requested_bytes));
        all
    }
}
