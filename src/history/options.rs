//! Options of a recording.

use super::event::Action;

/// The operations for which stacks are gathered. Each level includes the levels before it.
///
/// Source: the parameter `context` of `torch.cuda.memory._record_memory_history`: `None`, `"state"`,
/// `"alloc"` or `"all"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackLevel {
    /// No stacks.
    #[default]
    Never,
    /// Stacks of live blocks, kept until the blocks are freed. Entries have no stacks.
    OfLiveBlocks,
    /// Also stacks of entries that allocate memory.
    OfAllocations,
    /// Also stacks of entries that free or release memory.
    OfFrees,
}

/// Options of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordOptions {
    /// The operations for which stacks are gathered.
    pub stacks: StackLevel,
    /// The most entries that are kept, at least 1. The oldest entries are dropped first. Unlimited by
    /// default.
    pub entries_max: usize,
    /// Actions that are not recorded.
    pub skip: Vec<Action>,
    /// Whether starting the recording drops the entries recorded before.
    pub clear: bool,
}

impl Default for RecordOptions {
    fn default() -> Self {
        Self { stacks: StackLevel::Never, entries_max: usize::MAX, skip: Vec::new(), clear: false }
    }
}

impl RecordOptions {
    /// Returns options that record all actions and keep at most `entries_max` entries.
    #[must_use]
    pub fn at_most(entries_max: usize) -> Self {
        Self { entries_max, ..Self::default() }
    }

    /// Returns these options with another level of stacks.
    #[must_use]
    pub fn with_stacks(self, stacks: StackLevel) -> Self {
        Self { stacks, ..self }
    }

    /// Returns these options with `skip` as the actions that are not recorded.
    #[must_use]
    pub fn without(self, skip: &[Action]) -> Self {
        Self { skip: skip.to_vec(), ..self }
    }

    /// Returns these options with [`clear`](Self::clear) set.
    #[must_use]
    pub fn clearing(self) -> Self {
        Self { clear: true, ..self }
    }
}
