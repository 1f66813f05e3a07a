//! Temporary blocks: those that are freed in the step in which they were allocated, or without steps soon
//! after their request.
//!
//! The code that makes many of them, or large ones, is where operations can be fused or a buffer can be
//! reused. One pass over the blocks finds them. It keeps only the blocks that live at one time, so its memory
//! does not grow with the length of the recording.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use schemars::JsonSchema;
use serde::Serialize;

use super::callers::Callers;
use super::growth::{RowKey, StepGrowth, key_of, labels};
use super::lives::{Block, Lives, NEVER};

/// The blocks that are freed in the step in which they were allocated, by code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Temporary {
    /// The number of steps; `null` if no steps were found.
    pub steps: Option<u64>,
    /// Without steps, a block counts if it was freed within this many events; `null` with steps.
    pub within_events: Option<u32>,
    /// The number of temporary blocks.
    pub blocks: u64,
    /// The number of all blocks that were allocated in the steps, or in the recording if there are none.
    pub blocks_of: u64,
    /// The requested bytes of all temporary blocks.
    pub requested_bytes: u64,
    /// The most requested bytes of temporary blocks that were live at once.
    pub most_live_bytes: u64,
    /// The code that requested most of these bytes; without stacks, the sizes of the blocks.
    pub rows: Vec<TemporaryRow>,
    /// The requested bytes of the code that is not listed.
    pub others_bytes: u64,
    /// The blocks of this code.
    pub others_blocks: u64,
    /// The result as a sentence.
    pub sentence: String,
}

/// The temporary blocks of one caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TemporaryRow {
    /// The label of the code; without stacks, the size of the blocks.
    pub asked_for_by: String,
    /// The number of blocks.
    pub blocks: u64,
    /// The requested bytes of all of them.
    pub requested_bytes: u64,
    /// The requested bytes of the largest one.
    pub largest_bytes: u64,
    /// The most requested bytes that were live at once.
    pub most_live_bytes: u64,
}

/// Without steps, a block that is freed within this many events is temporary.
const NEAR_EVENTS: u32 = 100;

/// The bytes of blocks whose frees are known, while the blocks are added in the order of their requests.
#[derive(Default)]
struct LiveSum {
    /// The moment of the free and the bytes of each live block.
    frees: BinaryHeap<Reverse<(u32, u64)>>,
    live_bytes: u64,
    most_live_bytes: u64,
}

impl LiveSum {
    fn add(&mut self, block: &Block) {
        while let Some(Reverse((freed, bytes))) = self.frees.peek().copied()
            && freed <= block.born
        {
            self.live_bytes -= bytes;
            self.frees.pop();
        }
        self.frees.push(Reverse((block.freed, block.requested_bytes)));
        self.live_bytes = self.live_bytes.saturating_add(block.requested_bytes);
        self.most_live_bytes = self.most_live_bytes.max(self.live_bytes);
    }
}

impl Temporary {
    /// Finds the temporary blocks. Lists at most `most_rows` callers.
    pub(crate) fn of(
        lives: &Lives,
        callers: &Callers<'_>,
        growth: Option<&StepGrowth>,
        most_rows: usize,
    ) -> Self {
        let ends = growth.map_or(&[][..], |growth| &growth.step_ends);
        let has_steps = ends.len() > 1;
        let mut all = Self {
            steps: has_steps.then(|| ends.len() as u64 - 1),
            within_events: (!has_steps).then_some(NEAR_EVENTS),
            ..Self::default()
        };
        let mut numbers: HashMap<RowKey, usize> = HashMap::new();
        let mut found: Vec<(RowKey, TemporaryRow, LiveSum)> = Vec::new();
        let mut sum = LiveSum::default();
        let mut step = 0;
        for block in lives.blocks.iter().filter(|block| !lives.lived_before(block)) {
            // The moment until which a temporary block is freed.
            let until = match has_steps {
                false => block.born.saturating_add(NEAR_EVENTS),
                true => {
                    while step < ends.len() && ends[step] < block.born {
                        step += 1;
                    }
                    match ends.get(step) {
                        Some(end) if step > 0 => *end,
                        Some(_) => continue,
                        None => break,
                    }
                }
            };
            all.blocks_of += 1;
            if block.freed == NEVER || block.freed > until {
                continue;
            }
            sum.add(block);
            let key = key_of(lives, callers, block);
            let at = *numbers.entry(key).or_insert_with(|| {
                found.push((key, TemporaryRow::default(), LiveSum::default()));
                found.len() - 1
            });
            let (_, row, live) = &mut found[at];
            row.blocks += 1;
            row.requested_bytes = row.requested_bytes.saturating_add(block.requested_bytes);
            row.largest_bytes = row.largest_bytes.max(block.requested_bytes);
            live.add(block);
        }
        all.most_live_bytes = sum.most_live_bytes;
        found.sort_by_key(|(key, row, _)| (Reverse(row.requested_bytes), *key));
        let add = |sum: (u64, u64), (_, row, _): &(RowKey, TemporaryRow, LiveSum)| {
            (sum.0 + row.blocks, sum.1.saturating_add(row.requested_bytes))
        };
        (all.blocks, all.requested_bytes) = found.iter().fold((0, 0), add);
        let others = found.split_off(most_rows.min(found.len()));
        (all.others_blocks, all.others_bytes) = others.iter().fold((0, 0), add);
        let keys = found.iter().map(|(key, ..)| *key).collect::<Vec<_>>();
        let rows = found.into_iter().zip(labels(&keys, lives, callers));
        let row = |((_, row, live), asked_for_by): ((_, TemporaryRow, LiveSum), String)| {
            TemporaryRow { asked_for_by, most_live_bytes: live.most_live_bytes, ..row }
        };
        all.rows = rows.map(row).collect();
        all.sentence = all.text();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compared, Memory, lives_of};
    use stratalloc::history::Action;
    use stratalloc::ids::StreamId;
    use stratalloc_recording::{Trace, TraceEvent};

    /// Returns the lives of a program: an address and a size allocate a block, an address alone frees it.
    fn lives(events: &[(u64, Option<u64>)]) -> Lives {
        let event = |&(address, size): &(u64, Option<u64>)| {
            let action = if size.is_some() { Action::Alloc } else { Action::FreeRequested };
            TraceEvent::new(action, address << 20, size.unwrap_or(0), StreamId(0))
        };
        let trace = Trace { events: events.iter().map(event).collect(), ..Trace::default() };
        lives_of(&trace, None, &Memory::default(), 8)
    }

    fn found(lives: &Lives, ends: &[u32], most_rows: usize) -> Temporary {
        let stacks = stratalloc_recording::Stacks::default();
        let callers = Callers::of(&stacks, Compared::Code);
        let growth = StepGrowth { step_ends: ends.to_vec(), ..StepGrowth::default() };
        Temporary::of(lives, &callers, (!ends.is_empty()).then_some(&growth), most_rows)
    }

    #[test]
    fn a_block_is_temporary_if_the_step_that_allocates_it_frees_it() {
        let events = [
            (1, Some(10)), // before the first step
            (2, Some(20)),
            (3, Some(30)),
            (2, None),
            (4, Some(20)),
            (4, None),
            (1, None),
            (5, Some(20)), // the second step
            (3, None),
            (5, None),
            (6, Some(7)), // after the last step
            (6, None),
        ];
        let all = found(&lives(&events), &[1, 7, 10], 10);
        // The block of 30 bytes is freed by the next step.
        assert_eq!(
            (all.steps, all.within_events, all.blocks, all.blocks_of),
            (Some(2), None, 3, 4)
        );
        assert_eq!((all.requested_bytes, all.most_live_bytes), (60, 20));
        let row = &all.rows[..];
        assert_eq!(row.len(), 1, "{row:?}");
        assert_eq!((row[0].blocks, row[0].largest_bytes, row[0].most_live_bytes), (3, 20, 20));
        assert!(row[0].asked_for_by.contains("20 bytes"), "{row:?}");
    }

    #[test]
    fn without_steps_a_block_is_temporary_for_a_hundred_events() {
        let mut events =
            vec![(1, Some(100)), (2, Some(200)), (2, None), (3, Some(50)), (4, Some(50))];
        events.extend([(4, None), (3, None)]);
        events.extend((0..60).flat_map(|at| [(10 + at, Some(1)), (10 + at, None)]));
        events.push((1, None));
        let all = found(&lives(&events), &[], 2);
        assert_eq!((all.steps, all.within_events), (None, Some(100)));
        assert_eq!((all.blocks, all.blocks_of, all.requested_bytes), (63, 64, 360));
        assert_eq!(all.most_live_bytes, 200);
        let sizes: Vec<_> = all.rows.iter().map(|row| (row.blocks, row.most_live_bytes)).collect();
        assert_eq!(sizes, [(1, 200), (2, 100)]);
        assert_eq!((all.others_blocks, all.others_bytes), (60, 60));
    }
}
