//! The holders of the live bytes at a moment: bytes by recorded stack, by size and by age.

use std::cmp::Reverse;
use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::callers::Callers;
use super::categories::Category;
use super::lives::{Block, Lives, NEVER};
use super::passes::{Fate, Passes};
use super::recording::Recording;
use super::words::part;
use stratalloc::ids::StreamId;
use stratalloc_recording::StackId;

/// The bytes of live blocks by the data of the recording that shows these blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FoundBy {
    /// Of blocks whose requests were recorded.
    pub request_bytes: u64,
    /// Of blocks from before the recording that are still live in the final layout.
    pub layout_bytes: u64,
    /// Of blocks from before the recording whose free was recorded.
    pub free_bytes: u64,
}

impl FoundBy {
    fn of(block: &Block) -> Self {
        let mut found = Self::default();
        let bytes = match (block.born, block.freed) {
            (0, NEVER) => &mut found.layout_bytes,
            (0, _) => &mut found.free_bytes,
            _ => &mut found.request_bytes,
        };
        *bytes = block.requested_bytes;
        found
    }

    fn add(&mut self, other: &Self) {
        self.request_bytes = self.request_bytes.saturating_add(other.request_bytes);
        self.layout_bytes = self.layout_bytes.saturating_add(other.layout_bytes);
        self.free_bytes = self.free_bytes.saturating_add(other.free_bytes);
    }
}

/// Live blocks of one recorded stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Holder {
    /// The recorded stack, in [`Trace::stacks`](stratalloc_recording::Trace::stacks); `None` if none was
    /// recorded for these blocks.
    #[serde(skip)]
    pub stack: Option<StackId>,
    /// Whether the blocks were allocated before the recording began and have no recorded stack.
    #[serde(skip)]
    pub lived_before: bool,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// The age of the newest block: the number of requests made after its own. `null` in JSON if all blocks
    /// are from before the recording, whose requests were not counted.
    pub newest_requests: Option<u32>,
    /// The age of the oldest block; `null` if any block is from before the recording.
    pub oldest_requests: Option<u32>,
    /// The data that shows the blocks. Its fields add up to `requested_bytes`. The stack of blocks in
    /// `layout_bytes` is that of the final layout.
    pub found_by: FoundBy,
}

/// Blocks of one size on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SizeClass {
    /// Requested bytes of all blocks.
    pub requested_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Requested bytes of each block.
    pub each_bytes: u64,
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    #[schemars(with = "u64")]
    pub stream: StreamId,
}

impl SizeClass {
    /// Returns the classes, those that hold the most bytes first, from the number of blocks of each size and
    /// stream.
    pub(super) fn all_of(blocks: HashMap<(u64, StreamId), u64>) -> Vec<Self> {
        let class = |((each_bytes, stream), blocks): ((u64, StreamId), u64)| {
            let requested_bytes = each_bytes.saturating_mul(blocks);
            Self { each_bytes, stream, blocks, requested_bytes }
        };
        let mut all: Vec<_> = blocks.into_iter().map(class).collect();
        let order = |class: &Self| (Reverse(class.requested_bytes), class.each_bytes, class.stream);
        all.sort_unstable_by_key(order);
        all
    }
}

/// Blocks of one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CategoryBytes {
    /// The purpose.
    pub category: &'static str,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The part of all live bytes, from 0 to 1.
    pub share: f64,
    /// The bytes whose purpose the lives of the blocks show, not the stacks alone.
    pub by_life_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Live blocks of one recorded stack whose lives show the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FateBytes {
    stack: Option<StackId>,
    lived_before: bool,
    fate: Fate,
    requested_bytes: u64,
    blocks: u64,
}

impl FateBytes {
    /// Returns the category of the request, and that of the blocks.
    fn categories(&self, callers: &Callers<'_>) -> (Category, Category) {
        let of_stack = callers.category_of(self.stack);
        (of_stack, of_stack.with(self.fate))
    }
}

/// Blocks of similar age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AgeClass {
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// At most this many requests followed each block; `null` in JSON for the oldest class, and for blocks
    /// from before the recording.
    pub up_to_requests: Option<u32>,
    /// Whether the blocks were allocated before the recording began.
    pub lived_before: bool,
}

/// The holders of the live bytes at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Number of live blocks.
    pub blocks: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// All recorded stacks that hold bytes, largest first. Then blocks without a recorded stack, and last
    /// those of them from before the recording.
    pub by_stack: Vec<Holder>,
    /// All blocks by size and stream, the sizes that hold the most bytes first.
    pub by_size: Vec<SizeClass>,
    /// All blocks by age, youngest first, and last those from before the recording. Classes without blocks
    /// are left out.
    pub by_age: Vec<AgeClass>,
    /// All blocks by stack and by what their lives show.
    pub(super) by_fate: Vec<FateBytes>,
}

/// Adds up live blocks by stack, by what their lives show, and by size.
#[derive(Default)]
pub(super) struct HoldersSum {
    holders: Holders,
    by_stack: HashMap<(Option<StackId>, bool), Holder>,
    by_fate: HashMap<(Option<StackId>, bool, Fate), (u64, u64)>,
    by_size: HashMap<(u64, StreamId), u64>,
}

impl HoldersSum {
    /// Adds a block: the holder of this block alone, what its life shows, and its stream.
    pub(super) fn add(&mut self, one: Holder, fate: Fate, stream: StreamId) {
        let Holder { stack, lived_before, requested_bytes, .. } = one;
        self.holders.blocks += 1;
        self.holders.requested_bytes = self.holders.requested_bytes.saturating_add(requested_bytes);
        let known = self.by_stack.entry((stack, lived_before));
        known.and_modify(|holder| holder.add(&one)).or_insert(one);
        let (bytes, blocks) = self.by_fate.entry((stack, lived_before, fate)).or_default();
        *bytes = bytes.saturating_add(requested_bytes);
        *blocks += 1;
        *self.by_size.entry((requested_bytes, stream)).or_default() += 1;
    }

    /// Returns the holders, without their ages.
    pub(super) fn finish(self) -> Holders {
        let by_fate = self.by_fate.into_iter();
        let by_fate = by_fate.map(|((stack, lived_before, fate), (requested_bytes, blocks))| {
            FateBytes { stack, lived_before, fate, requested_bytes, blocks }
        });
        Holders {
            by_stack: Holder::sorted(self.by_stack.into_values()),
            by_fate: by_fate.collect(),
            by_size: SizeClass::all_of(self.by_size),
            ..self.holders
        }
    }
}

/// The upper bounds of the age classes, in requests.
const AGES: [u32; 4] = [10, 100, 1_000, 10_000];

impl Holders {
    /// The number of sizes that tables and JSON list.
    pub const LARGEST: usize = 10;

    /// Finds the holders of the blocks that live at a moment.
    #[must_use]
    pub(crate) fn at(lives: &Lives, passes: &Passes<'_>, moment: u32) -> Self {
        let mut sum = HoldersSum::default();
        let mut by_age = [AgeClass::default(); AGES.len() + 2];
        let now_requests = lives.requests_until(moment);
        for block in lives.live_at(moment) {
            let Block { requested_bytes, stack, .. } = *block;
            let lived_before = lives.lived_before(block);
            let age_requests = now_requests.saturating_sub(lives.requests_until(block.born));
            let age = (!lived_before).then_some(age_requests);
            let one = Holder {
                stack,
                lived_before: lived_before && stack.is_none(),
                blocks: 1,
                requested_bytes,
                oldest_requests: age,
                newest_requests: age,
                found_by: FoundBy::of(block),
            };
            sum.add(
                one,
                passes.fate(block),
                lives.streams.items[lives.heap(block).stream as usize],
            );
            let class = match lived_before {
                true => AGES.len() + 1,
                false => AGES.partition_point(|&end| end < age_requests),
            };
            by_age[class].blocks += 1;
            by_age[class].requested_bytes += requested_bytes;
        }
        let mut holders = sum.finish();
        by_age[AGES.len() + 1].lived_before = true;
        let ends = AGES.into_iter().map(Some).chain([None, None]);
        let aged = by_age.into_iter().zip(ends);
        let aged = aged.map(|(class, up_to_requests)| AgeClass { up_to_requests, ..class });
        holders.by_age = aged.filter(|class| class.blocks > 0).collect();
        holders
    }

    /// Returns true if the stack of any block was recorded.
    #[must_use]
    pub fn has_stacks(&self) -> bool {
        self.by_stack.iter().any(|holder| holder.stack.is_some())
    }

    /// Returns the live bytes by category. The last row has the blocks from before the recording that have no
    /// stack. Empty without stacks.
    #[must_use]
    pub fn categories(&self, callers: &Callers<'_>) -> Vec<CategoryBytes> {
        if !self.has_stacks() {
            return Vec::new();
        }
        let names = Category::ALL.iter().map(|category| category.name()).chain([BEFORE]);
        let row = |category| CategoryBytes {
            category,
            requested_bytes: 0,
            share: 0.0,
            by_life_bytes: 0,
            blocks: 0,
        };
        let mut rows: Vec<CategoryBytes> = names.map(row).collect();
        for blocks in &self.by_fate {
            let (of_stack, category) = blocks.categories(callers);
            let name = match blocks.lived_before && blocks.stack.is_none() {
                true => BEFORE,
                false => category.name(),
            };
            let Some(row) = rows.iter_mut().find(|row| row.category == name) else { continue };
            row.requested_bytes = row.requested_bytes.saturating_add(blocks.requested_bytes);
            row.blocks += blocks.blocks;
            if of_stack != category && name != BEFORE {
                row.by_life_bytes = row.by_life_bytes.saturating_add(blocks.requested_bytes);
            }
        }
        rows.iter_mut().for_each(|row| row.share = part(row.requested_bytes, self.requested_bytes));
        rows.retain(|row| row.blocks > 0);
        rows
    }

    /// Returns the category that all blocks of a caller have, with the life that shows it, for each caller.
    /// If its blocks have several, the category is that of the requests.
    fn categories_of_callers(&self, callers: &Callers<'_>) -> HashMap<u32, (Category, Fate)> {
        let mut all: HashMap<u32, (Category, Fate)> = HashMap::new();
        for blocks in &self.by_fate {
            let Some(stack) = blocks.stack else { continue };
            let (of_stack, category) = blocks.categories(callers);
            let fate = if of_stack == category { Fate::NotShown } else { blocks.fate };
            let known = all.entry(callers.of_stack(stack)).or_insert((category, fate));
            if known.0 != category {
                *known = (of_stack, Fate::NotShown);
            }
        }
        all
    }

    /// Returns the code that holds the most bytes: at most `most` callers, largest first. Then blocks
    /// without a recorded stack, and last those of them from before the recording.
    pub fn by_code(&self, callers: &Callers<'_>, most: usize) -> Vec<CodeHolder> {
        let mut joined: HashMap<(Option<u32>, bool), Holder> = HashMap::new();
        for holder in &self.by_stack {
            let caller = holder.stack.map(|stack| callers.of_stack(stack));
            let known = joined.entry((caller, holder.lived_before));
            known.and_modify(|all| all.add(holder)).or_insert(*holder);
        }
        let mut rows: Vec<_> = joined.into_iter().map(|((caller, _), row)| (caller, row)).collect();
        rows.sort_unstable_by_key(|(caller, holder)| (holder.order(), *caller));
        let with_code = rows.iter().filter(|(caller, _)| caller.is_some()).count();
        rows.drain(most.min(with_code)..with_code);
        let labels = callers.labels_of(rows.iter().map(|(caller, _)| *caller));
        let categories = self.categories_of_callers(callers);
        let label = |((caller, holder), label): ((Option<u32>, Holder), Option<String>)| {
            let other = if holder.lived_before { LIVED_BEFORE } else { NO_STACK };
            let asked_for_by = label.unwrap_or_else(|| other.to_owned());
            let (category, fate) =
                caller.and_then(|caller| categories.get(&caller)).copied().unwrap_or_default();
            CodeHolder { asked_for_by, caller, category, fate, holder }
        };
        rows.into_iter().zip(labels).map(label).collect()
    }
}

impl Callers<'_> {
    /// Returns the purpose that the stack of a request shows; unknown without a stack.
    pub(crate) fn category_of(&self, stack: Option<StackId>) -> Category {
        stack.map(|stack| self.category(self.of_stack(stack))).unwrap_or_default()
    }

    /// Returns [`labels`](Self::labels) of those that are callers.
    pub(crate) fn labels_of(
        &self,
        callers: impl Iterator<Item = Option<u32>> + Clone,
    ) -> Vec<Option<String>> {
        let mut labels = self.labels(&callers.clone().flatten().collect::<Vec<u32>>()).into_iter();
        callers.map(|caller| caller.and_then(|_| labels.next())).collect()
    }
}

/// The category of blocks whose requests were not recorded.
pub(super) const BEFORE: &str = "unknown: lived before the recording began";
/// The label of blocks whose requests were not recorded, and whose stacks the final layout does not contain.
pub(super) const LIVED_BEFORE: &str = "(lived before the recording began)";
/// The label of blocks whose requests were recorded without a stack.
pub(super) const NO_STACK: &str = "(no stack recorded)";

/// Live blocks of one caller.
#[derive(Clone, Debug)]
pub struct CodeHolder {
    /// The caller's label.
    pub asked_for_by: String,
    /// The caller's number; `None` if no stack was recorded.
    pub caller: Option<u32>,
    /// The purpose of the blocks.
    pub category: Category,
    /// What the lives of the blocks show, if that decided on the purpose.
    pub fate: Fate,
    /// The sum of all the caller's blocks, with the caller's stack that holds the most bytes.
    pub holder: Holder,
}

impl Holder {
    /// Returns the bytes and the number of the blocks.
    pub(super) fn sum(&self) -> (u64, u64) {
        (self.requested_bytes, self.blocks)
    }

    /// Returns holders in the order of [`Holders::by_stack`].
    fn sorted(holders: impl Iterator<Item = Self>) -> Vec<Self> {
        let mut holders: Vec<_> = holders.collect();
        holders.sort_unstable_by_key(|holder| (holder.order(), holder.stack));
        holders
    }

    /// Adds the blocks of another holder.
    fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.requested_bytes = self.requested_bytes.saturating_add(other.requested_bytes);
        let [oldest, newest] = [
            self.oldest_requests.zip(other.oldest_requests).map(|(a, b)| a.max(b)),
            self.newest_requests.into_iter().chain(other.newest_requests).min(),
        ];
        (self.oldest_requests, self.newest_requests) = (oldest, newest);
        self.found_by.add(&other.found_by);
    }

    /// The sort key: rows with a stack, then without, then from before the recording; larger rows first in
    /// each.
    fn order(&self) -> (bool, bool, Reverse<u64>) {
        (self.lived_before, self.stack.is_none(), Reverse(self.requested_bytes))
    }
}

/// Returns the stack of a block of the workload, if the file contains it. Blocks from before the recording
/// have the lowest numbers; the others are numbered in the order of the requests.
pub(super) fn stack_of(recording: &Recording, id: u32) -> Option<StackId> {
    match id.checked_sub(recording.workload.seeded) {
        Some(_) if recording.trace.stacks.is_empty() => None,
        Some(request) => recording.trace.requests().nth(request as usize)?.stack,
        None => stack_from_before(recording, id),
    }
}

/// Returns the stack of a block from before the recording, by its number in the workload.
pub(super) fn stack_from_before(recording: &Recording, id: u32) -> Option<StackId> {
    recording.start.as_ref()?.blocks.get(id as usize)?.stack
}
