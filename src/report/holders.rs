//! Who holds the live bytes at a moment: by stack, or by stream and size where nobody recorded stacks.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::lives::{Block, Lives};
use crate::replay::StackId;

/// Blocks of one stack, or of one size on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) stack: Option<StackId>,
    /// The place of the stream; the first block's where a stack has several.
    pub(crate) stream: u32,
    /// What each block asked for; 0 where they differ.
    pub(crate) each_bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) requested_bytes: u64,
    /// How many events came after the oldest of them.
    pub(crate) oldest_events: u32,
    /// How many events came after the newest of them.
    pub(crate) newest_events: u32,
}

/// All live blocks at one moment, largest holders first.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    pub(crate) blocks: u64,
    pub(crate) requested_bytes: u64,
    pub(crate) has_stacks: bool,
    pub(crate) holders: Vec<Holder>,
}

impl Holders {
    pub(crate) fn of(lives: &Lives, moment: u32) -> Self {
        let is_live = |block: &&Block| block.born <= moment && moment < block.freed;
        let live = || lives.blocks.iter().filter(is_live);
        let has_stacks = live().any(|block| block.stack.is_some());
        let mut found: BTreeMap<(Option<StackId>, u32, u64), Holder> = BTreeMap::new();
        let mut all = Self { has_stacks, ..Self::default() };
        for block in live() {
            let age = moment - block.born;
            let key = match has_stacks {
                true => (block.stack, 0, 0),
                false => (None, block.stream, block.requested_bytes),
            };
            let holder = found.entry(key).or_insert(Holder {
                stack: block.stack,
                stream: block.stream,
                each_bytes: block.requested_bytes,
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
        all.holders = found.into_values().collect();
        all.holders.sort_by_key(|holder| Reverse(holder.requested_bytes));
        all
    }
}
