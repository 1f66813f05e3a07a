//! The typed configuration. Parsed values are in range. Values set in code are clamped once, when a
//! `Config` is created from them.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::layers::LayerSetting;
use super::versions::{Compat, Ties, TorchVersion};
use crate::size::{
    EIB, LARGE_SEGMENT_DEFAULT_BYTES, MIN_BLOCK_BYTES, OWN_SEGMENT_MIN_BYTES, RoundupDivisions,
    align_up,
};

/// All settings of a configuration string. Sizes are bytes.
///
/// Source of names, ranges and defaults: PyTorch's `PYTORCH_CUDA_ALLOC_CONF`.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `backend`: the strategy; `native` by default.
    pub backend: String,
    /// `large_segment_size_mb`: the size of segments shared by several large requests, and of the pages
    /// of large expandable segments.
    pub large_segment_bytes: u64,
    /// `max_split_size_mb`: blocks of this size or more are never split. `None`: no limit.
    pub max_split_bytes: Option<u64>,
    /// `max_non_split_rounding_mb`: the most bytes by which an oversize block may be larger than the
    /// request that reuses it. Oversize means at least `max_split_size_mb`. `None`: the size of a large
    /// segment.
    pub max_non_split_rounding_bytes: Option<u64>,
    /// `garbage_collection_threshold`: the fraction of the memory limit, in (0, 1), above which the
    /// oldest free segments are released. `None`: never.
    pub garbage_collection_threshold: Option<f64>,
    /// `roundup_power2_divisions`.
    pub roundup: RoundupDivisions,
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `expandable_segments_ipc`: pages that are mapped while this is set can be shared with other
    /// processes.
    pub expandable_segments_ipc: bool,
    /// `expandable_segments_handle_type`: the kind of handle with which pages are shared.
    pub expandable_segments_handle_type: HandleType,
    /// `release_lock_on_cudamalloc`: other cache misses proceed while one of them waits for the driver.
    pub release_lock_on_device_allocate: bool,
    /// `graph_capture_record_stream_reuse`.
    pub graph_capture_record_stream_reuse: bool,
    /// `per_process_memory_fraction`, in [0, 1]. 1 means no limit. Read when an allocator is
    /// built. In a configuration string that is applied later, only a `Switchable` allocator obeys it.
    pub per_process_memory_fraction: f64,
    /// `throw_on_cudamalloc_oom`.
    pub throw_on_device_oom: bool,
    /// `expandable_segments_reserve`.
    pub expandable_reserve: Option<Reserve>,
    /// `expandable_segments_reserve_by_class`, in the order given.
    pub expandable_reserve_by_class: Vec<(String, Reserve)>,
    /// `malloc_async_own_pool`: `backend:cudaMallocAsync` uses its own driver pool. Read once, when an
    /// allocator is built.
    pub malloc_async_own_pool: bool,
    /// `layers`, outermost first. Read once, when an allocator is built.
    pub layers: Vec<LayerSetting>,
    /// The keys about the history and about failed requests.
    pub history: HistorySettings,
    /// `peers`: whether devices get access to each other's memory. Only for allocators that PyTorch
    /// loads. Read when a device gets its allocator.
    pub peers: PeersSetting,
    /// The keys of `backend:pinned`.
    pub pinned: PinnedSettings,
    /// `compat`: whether decisions follow PyTorch, and which version, where PyTorch's rules are defects
    /// or differ between versions.
    pub compat: Compat,
    /// The version of the PyTorch in this process when a text was parsed last. `None` if there was none.
    pub running_torch: Option<TorchVersion>,
    /// The keys of `backend:pluggable`.
    pub pluggable: PluggableSettings,
    /// The keys of `backend:cpu`.
    pub cpu: CpuSettings,
    /// Keys of user-defined strategies, with their values, in the order given.
    pub extra: Vec<(String, String)>,
}

impl Settings {
    /// Returns the choice among several free blocks of one size in a private pool. Under `compat:pytorch`
    /// it is that of the version. By default it is the block in the oldest segment if the pool has an
    /// allocator of its own, and in every private pool of a PyTorch that does the same (2.13 and later).
    pub(crate) fn ties_in_pool(&self, has_own_allocator: bool) -> Ties {
        let ages = |torch: TorchVersion| torch.decisions().ties == Ties::SegmentAge;
        let ages = has_own_allocator || self.running_torch.is_some_and(ages);
        if ages && !self.compat.is_pytorch() {
            return Ties::SegmentAge;
        }
        self.compat.decisions().ties
    }

    /// Clamps values that were set in code. A large segment that requests share must be able to hold
    /// each of these requests, and fractions must be in range.
    #[must_use]
    pub(crate) fn in_range(mut self) -> Self {
        self.large_segment_bytes =
            align_up(self.large_segment_bytes.clamp(OWN_SEGMENT_MIN_BYTES, EIB), MIN_BLOCK_BYTES);
        if !(0.0..=1.0).contains(&self.per_process_memory_fraction) {
            self.per_process_memory_fraction = 1.0;
        }
        self.garbage_collection_threshold =
            self.garbage_collection_threshold.filter(|part| *part > 0.0 && *part < 1.0);
        self
    }

    /// Returns true if an allocator built from these settings writes files.
    #[doc(hidden)]
    pub fn writes_files(&self) -> bool {
        self.history.snapshot_on_oom.is_some()
            || self.layers.iter().any(|layer| layer.written_file().is_some())
    }

    /// Returns the settings for a replay: those that affect decisions, but no files, no recording and
    /// no leak reports.
    #[doc(hidden)]
    pub fn for_replay(mut self) -> Self {
        self.history = HistorySettings::default();
        let only_decides =
            |layer: &LayerSetting| layer.written_file().is_none() && *layer != LayerSetting::Track;
        self.layers.retain(only_decides);
        self
    }

    /// Returns the value of a user-defined key, if it is set. A value from a configuration string
    /// has passed the check of the key: for example, the value of a key declared as a number parses as a
    /// number. A value that code put into `extra` is not checked.
    #[must_use]
    pub fn user_value(&self, key: &str) -> Option<&str> {
        self.extra.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// Returns `max_non_split_rounding_bytes`, or its default.
    #[must_use]
    pub fn non_split_rounding_bytes(&self) -> u64 {
        self.max_non_split_rounding_bytes.unwrap_or(self.large_segment_bytes)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            backend: "native".to_owned(),
            large_segment_bytes: LARGE_SEGMENT_DEFAULT_BYTES,
            max_split_bytes: None,
            max_non_split_rounding_bytes: None,
            garbage_collection_threshold: None,
            roundup: RoundupDivisions::OFF,
            expandable_segments: false,
            expandable_segments_ipc: false,
            expandable_segments_handle_type: HandleType::Unspecified,
            release_lock_on_device_allocate: false,
            graph_capture_record_stream_reuse: false,
            per_process_memory_fraction: 1.0,
            throw_on_device_oom: false,
            expandable_reserve: None,
            expandable_reserve_by_class: Vec::new(),
            malloc_async_own_pool: false,
            layers: Vec::new(),
            history: HistorySettings::default(),
            peers: PeersSetting::Auto,
            pinned: PinnedSettings::default(),
            compat: Compat::Default,
            running_torch: None,
            pluggable: PluggableSettings::default(),
            cpu: CpuSettings::default(),
            extra: Vec::new(),
        }
    }
}

/// The keys about the history, and the files written for a failed request. Read once, when an allocator
/// is built.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistorySettings {
    /// `record_history`: the most entries that are kept. `None`: nothing is recorded until the program
    /// starts a recording.
    pub entries_max: Option<u64>,
    /// `snapshot_on_oom`: the path of the snapshot that is written when a request fails, with placeholders.
    pub snapshot_on_oom: Option<String>,
    /// `advise_on_oom`: whether the error of a failed request suggests settings.
    pub advise_on_oom: bool,
}

/// The address space that an expandable segment reserves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// A positive fraction of the device's memory.
    Fraction(f64),
    /// A number of bytes.
    Bytes(u64),
}

/// The kind of handle by which pages are shared with other processes.
///
/// Source of the names: PyTorch's `Expandable_Segments_Handle_Type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandleType {
    /// A fabric handle if the device supports them, otherwise a file descriptor.
    #[default]
    Unspecified,
    /// A file descriptor.
    PosixFd,
    /// A fabric handle. The setting is refused on a device that does not support them.
    Fabric,
}

/// The devices that get access to the memory of an allocator that PyTorch loads. Access is given in
/// advance, because PyTorch does not notify such an allocator of copies between devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeersSetting {
    /// All devices that can access the memory, as soon as they have an allocator too.
    #[default]
    Auto,
    /// No devices.
    None,
}

/// The settings of `backend:pluggable`: a library, and the names of functions in it.
///
/// Source of the set of functions and their signatures: PyTorch's `CUDAPluggableAllocator`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluggableSettings {
    /// `library`: the path of a shared library. Required.
    pub library: Option<String>,
    /// `alloc_fn`: `void *(size_t, int device, stream)`. Required.
    pub alloc_fn: Option<String>,
    /// `free_fn`: `void (void *, size_t, int device, stream)`. Required.
    pub free_fn: Option<String>,
    /// `init_fn`: `void (int device_count)`.
    pub init_fn: Option<String>,
    /// `reset_fn`: `void (void)`.
    pub reset_fn: Option<String>,
    /// `memory_fraction_fn`: `void (double, int device)`.
    pub memory_fraction_fn: Option<String>,
    /// `base_alloc_fn`: `void *(void *, size_t *)`.
    pub base_alloc_fn: Option<String>,
    /// `record_stream_fn`: `void (void *, stream)`.
    pub record_stream_fn: Option<String>,
    /// `begin_allocate_to_pool_fn`: `void (int device, pair of ids, filter)`.
    pub begin_allocate_to_pool_fn: Option<String>,
    /// `end_allocate_to_pool_fn`: `void (int device, pair of ids)`.
    pub end_allocate_to_pool_fn: Option<String>,
    /// `release_pool_fn`: `void (int device, pair of ids)`.
    pub release_pool_fn: Option<String>,
}

/// The settings of `backend:cpu`.
///
/// Source of the alignment and of the fills: PyTorch's `alloc_cpu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuSettings {
    /// `cpu_alignment`, in bytes: a power of two. Read once, when an allocator is built.
    pub alignment_bytes: u64,
    /// `cpu_cached_max_mb`: the most bytes of free memory that are cached. `None`: unlimited.
    pub cached_max_bytes: Option<u64>,
    /// `cpu_trim_age_s`: the time for which free memory stays cached. `None`: unlimited.
    pub trim_age: Option<Duration>,
    /// `cpu_stop_caching_on_oom`: after the system had no memory for a request, nothing is cached any
    /// more.
    pub stop_caching_on_oom: bool,
    /// `cpu_huge_pages`: whether blocks are backed by huge pages. Read once, when an allocator is
    /// built.
    pub huge_pages: bool,
    /// `cpu_zero_fill`: whether blocks are filled with zeros. Excludes `junk_fill`.
    pub zero_fill: bool,
    /// `cpu_junk_fill`: whether blocks are filled with junk.
    pub junk_fill: bool,
    /// `cpu_numa_node`: the NUMA node of the memory. `None`: any. Read once, when an allocator is
    /// built.
    pub numa_node: Option<u32>,
}

impl CpuSettings {
    /// Valid alignments, in bytes.
    pub(crate) const ALIGNMENTS: RangeInclusive<u64> = 16..=2 << 20;
}

impl Default for CpuSettings {
    fn default() -> Self {
        Self {
            alignment_bytes: 64,
            cached_max_bytes: None,
            trim_age: None,
            stop_caching_on_oom: false,
            huge_pages: false,
            zero_fill: false,
            junk_fill: false,
            numa_node: None,
        }
    }
}

/// The settings of `backend:pinned`.
///
/// Source of the keys that PyTorch has, and of their meanings: PyTorch's `PYTORCH_CUDA_ALLOC_CONF`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedSettings {
    /// `pinned_use_background_threads`: whether a thread queries events. If not, requests do. Read once,
    /// when an allocator is built.
    pub use_background_threads: bool,
    /// `pinned_max_round_threshold_mb`: larger requests are not rounded to a power of two. `None`:
    /// unlimited.
    pub max_round_threshold_bytes: Option<u64>,
    /// `pinned_max_cached_size_mb`: larger blocks are not cached, and not rounded to a power of two.
    /// `None`: unlimited.
    pub max_cached_bytes: Option<u64>,
    /// `pinned_use_cuda_host_register`: whether memory is mapped and then registered with the driver. Read
    /// once, when an allocator is built.
    pub use_host_register: bool,
    /// `pinned_num_register_threads`: the threads that touch new pages before they are registered. A power
    /// of two, at most 128. Read once, when an allocator is built.
    pub register_threads: u64,
    /// `pinned_reserve_segment_size_mb`: the size of the segment that is allocated when an allocator is
    /// built. `None`: none.
    pub reserve_segment_bytes: Option<u64>,
    /// `pinned_free_catch_all`: whether failures to release memory are ignored.
    pub free_catch_all: bool,
    /// `pinned_rounding`: the sizes of blocks.
    pub rounding: PinnedRounding,
    /// `pinned_numa`: the NUMA node of the memory. Read once, when an allocator is built.
    pub numa: PinnedNuma,
    /// `pinned_trim_age_s`: the time for which free blocks stay cached. `None`: unlimited.
    pub trim_age: Option<Duration>,
}

impl Default for PinnedSettings {
    fn default() -> Self {
        Self {
            use_background_threads: false,
            max_round_threshold_bytes: None,
            max_cached_bytes: None,
            use_host_register: false,
            register_threads: 1,
            reserve_segment_bytes: None,
            free_catch_all: false,
            rounding: PinnedRounding::Exact,
            numa: PinnedNuma::Any,
            trim_age: None,
        }
    }
}

/// The sizes of the blocks of `backend:pinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PinnedRounding {
    /// The requested size, rounded up to 512 bytes, or to 4 KiB from 1 MiB on.
    #[default]
    Exact,
    /// The next power of two, as in PyTorch.
    PowerOfTwo,
}

/// The NUMA node of the blocks of `backend:pinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PinnedNuma {
    /// The driver chooses.
    #[default]
    Any,
    /// The node nearest to the device. If it is unknown or cannot be chosen, the driver chooses.
    Auto,
    /// The node with this number.
    Node(u32),
}
