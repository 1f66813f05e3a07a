//! What is recorded, as whoever starts a recording says it.

use super::event::Action;

/// Whose stacks are gathered. Each level has those of the levels before.
///
/// Source: `torch.cuda.memory._record_memory_history`, whose `context` says `None`, `"state"`, `"alloc"`
/// or `"all"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackLevel {
    /// Nobody's.
    #[default]
    Never,
    /// Of blocks as long as they live; entries have none.
    OfLiveBlocks,
    /// Of entries that hand out memory too.
    OfAllocations,
    /// Of entries that give memory back too.
    OfFrees,
}

/// What is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordOptions {
    /// Whose stacks are gathered.
    pub stacks: StackLevel,
    /// The most entries that are kept, at least 1; the newest are. Unlimited by default.
    pub entries_max: usize,
    /// Actions that are not recorded.
    pub skip: Vec<Action>,
    /// Whether what was recorded before is forgotten.
    pub clear: bool,
}

impl Default for RecordOptions {
    fn default() -> Self {
        Self { stacks: StackLevel::Never, entries_max: usize::MAX, skip: Vec::new(), clear: false }
    }
}

impl RecordOptions {
    /// All entries, at most so many.
    #[must_use]
    pub fn at_most(entries_max: usize) -> Self {
        Self { entries_max, ..Self::default() }
    }

    /// The same with stacks.
    #[must_use]
    pub fn with_stacks(self, stacks: StackLevel) -> Self {
        Self { stacks, ..self }
    }

    /// The same without these actions.
    #[must_use]
    pub fn without(self, skip: &[Action]) -> Self {
        Self { skip: skip.to_vec(), ..self }
    }

    /// The same, forgetting what was recorded before.
    #[must_use]
    pub fn clearing(self) -> Self {
        Self { clear: true, ..self }
    }
}
