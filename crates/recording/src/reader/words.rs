//! The words of a snapshot: the keys that are read, and text values that have a meaning or occur often.
//!
//! A stored word takes one or two bytes, while its text has about twenty. Values under other keys are
//! dropped. Source: PyTorch's `torch.cuda.memory._snapshot`. Four words (`stratalloc`, `limit_bytes`,
//! `total_bytes` and `account`) occur only in snapshots that this library or its Python package wrote.

macro_rules! words {
    ($($word:ident = $text:literal,)*) => {
        /// A word of the format. The words that are keys come first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub(super) enum Word { $($word,)* }

        impl Word {
            /// All words, in order.
            pub(super) const ALL: &[Self] = &[$(Self::$word,)*];

            /// Returns the text of the word.
            pub(super) const fn text(self) -> &'static str {
                match self { $(Self::$word => $text,)* }
            }

            /// Returns the word with the given text, if there is one.
            pub(super) fn from_text(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$word),)* _ => None }
            }
        }
    };
}

words! {
    Segments = "segments",
    DeviceTraces = "device_traces",
    HostSegments = "host_segments",
    HostTraces = "host_traces",
    ExternalAnnotations = "external_annotations",
    Stage = "stage",
    AllocatorSettings = "allocator_settings",
    Conf = "PYTORCH_CUDA_ALLOC_CONF",
    Stratalloc = "stratalloc",
    LimitBytes = "limit_bytes",
    TotalBytes = "total_bytes",
    MaxRoundThreshold = "max_round_threshold",
    Account = "account",
    Action = "action",
    Addr = "addr",
    DeviceFree = "device_free",
    Size = "size",
    Stream = "stream",
    PoolId = "pool_id",
    SegmentPoolId = "segment_pool_id",
    UserMetadata = "user_metadata",
    TimeUs = "time_us",
    Device = "device",
    Address = "address",
    TotalSize = "total_size",
    SegmentType = "segment_type",
    IsExpandable = "is_expandable",
    Blocks = "blocks",
    RequestedSize = "requested_size",
    State = "state",
    History = "history",
    RealSize = "real_size",
    Frames = "frames",
    Filename = "filename",
    Line = "line",
    FxOriginalTrace = "fx_original_trace",
    Name = "name",
    Alloc = "alloc",
    FreeRequested = "free_requested",
    FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc",
    SegmentFree = "segment_free",
    SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap",
    Oom = "oom",
    Annotate = "annotate",
    UserDefined = "user_defined",
    ActiveAllocated = "active_allocated",
    ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free",
    Inactive = "inactive",
    Small = "small",
    Large = "large",
    EmptyCache = "empty_cache",
    NotAvailable = "N/A",
    Empty = "",
}

/// The number of words that are keys.
pub(super) const KEYS: usize = Word::Name as usize + 1;
const _: () = assert!(KEYS <= 64, "a set of keys fits 64 bits");

/// No word has more bytes than this.
pub(super) const WORD_MAX_BYTES: usize = 32;

impl Word {
    /// Returns true if the word is a key that is read.
    pub(super) const fn is_key(self) -> bool {
        (self as usize) < KEYS
    }

    /// Returns the word at this index of [`Word::ALL`], if there is one.
    pub(super) fn at(index: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_found_by_its_text_and_fits() {
        for (i, &word) in Word::ALL.iter().enumerate() {
            assert_eq!(Word::from_text(word.text()), Some(word));
            assert_eq!(Word::at(i as u64), Some(word));
            assert!(word.text().len() <= WORD_MAX_BYTES);
        }
        assert_eq!(Word::from_text("compile_context"), None);
    }
}
