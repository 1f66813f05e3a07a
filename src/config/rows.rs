//! The built-in keys: one row for each.
//!
//! A row is `name => field: codec, who acts, options, meaning`. The codec gives the range, and reads and
//! shows the field of [`Settings`]. Options: `since(minor)`, the first PyTorch 2.x that accepts the key;
//! `fixed()`, read when an allocator is built; `also(names)`; `reset(..)`, not kept by a further string;
//! `idle(..)`, when it has no effect. Source of names and ranges: PyTorch's `PYTORCH_CUDA_ALLOC_CONF`.

use super::keys::{Acts, Key};
use super::read::*;
use super::settings::Settings;
use super::versions::{Compat, TorchVersion};
use crate::size::RoundupDivisions;

macro_rules! keys {
    ($(
        $name:ident => $($field:ident).+: $codec:ident, $acts:ident
            $(, $option:ident($($value:expr)?))*, $meaning:literal;
    )*) => {
        /// The built-in keys, in the order in which `explain` lists them.
        pub const BUILT_IN: &[Key] = &[$(
            Key {
                name: stringify!($name),
                aliases: &[],
                range: $codec.range,
                meaning: $meaning,
                acts: Acts::$acts,
                is_fixed: false,
                since: None,
                read: |settings, value| {
                    settings.$($field).+ = ($codec.read)(value)?;
                    Ok(())
                },
                show: |settings| ($codec.show)(&settings.$($field).+),
                differs: |one, other| {
                    ($codec.show)(&one.$($field).+) != ($codec.show)(&other.$($field).+)
                },
                reset: None,
                idle: |_| None,
            }$(.$option($($value)?))*,
        )*];
    };
}

impl Key {
    const fn since(self, minor: u8) -> Self {
        Self { since: Some(TorchVersion::minor(minor)), ..self }
    }

    const fn fixed(self) -> Self {
        Self { is_fixed: true, ..self }
    }

    const fn also(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    const fn shown(self, show: fn(&Settings) -> String) -> Self {
        Self { show, ..self }
    }

    const fn compared(self, differs: fn(&Settings, &Settings) -> bool) -> Self {
        Self { differs, ..self }
    }

    const fn reset(self, reset: fn(&mut Settings)) -> Self {
        Self { reset: Some(reset), ..self }
    }

    const fn idle(self, idle: fn(&Settings) -> Option<&'static str>) -> Self {
        Self { idle, ..self }
    }
}

keys! {
    backend => backend: BACKEND, Always, since(1), fixed(), "which strategy allocates";
    large_segment_size_mb => large_segment_bytes: SEGMENT, Native, since(11),
        "segment shared by requests of 1 to 10 MiB";
    max_split_size_mb => max_split_bytes: FROM_SEGMENT, Native, since(1),
        reset(|settings| settings.max_split_bytes = None), idle(without_effect_in_expandable_segments),
        "blocks from this size on are never split";
    max_non_split_rounding_mb => max_non_split_rounding_bytes: ROUNDING, Native, since(6),
        // The default follows another key, so a value that equals the default still counts as set.
        shown(|settings| mib(settings.non_split_rounding_bytes())),
        compared(|one, other| one.max_non_split_rounding_bytes != other.max_non_split_rounding_bytes),
        reset(|settings| settings.max_non_split_rounding_bytes = None),
        idle(|settings| match settings.max_split_bytes {
            None => Some("acts with max_split_size_mb only"),
            Some(_) => without_effect_in_expandable_segments(settings),
        }),
        "how much larger a reused oversize block may be";
    garbage_collection_threshold => garbage_collection_threshold: THRESHOLD, Native, since(1),
        reset(|settings| settings.garbage_collection_threshold = None),
        idle(|settings| {
            (settings.per_process_memory_fraction >= 1.0).then_some("acts once a memory limit is set")
        }),
        "part of the limit from which idle segments are released";
    roundup_power2_divisions => roundup: DIVISIONS, Native, since(1),
        reset(|settings| settings.roundup = RoundupDivisions::OFF),
        "steps between powers of two that requests are rounded to";
    expandable_segments => expandable_segments: FLAG, Native, since(1),
        "segments that grow by mapping pages";
    expandable_segments_ipc => expandable_segments_ipc: FLAG, Expandable,
        "new pages may be shared with other processes; each costs a descriptor on some devices";
    expandable_segments_handle_type => expandable_segments_handle_type: HANDLE_TYPE, Expandable,
        "the kind of handle by which pages leave; unspecified: fabric where the device has it";
    release_lock_on_cudamalloc => release_lock_on_device_allocate: FLAG, Native, since(2),
        also(&["release_lock_on_hipmalloc"]), "other misses go on while one waits for the driver";
    graph_capture_record_stream_reuse => graph_capture_record_stream_reuse: FLAG, Native, since(9),
        "blocks that were used by other streams are reused inside a graph capture";
    per_process_memory_fraction => per_process_memory_fraction: FRACTION, BuiltIn, since(10),
        "part of the device's memory that may be reserved";
    throw_on_cudamalloc_oom => throw_on_device_oom: FLAG, Native, since(12),
        idle(|settings| {
            (settings.per_process_memory_fraction < 1.0).then_some("the fraction's limit refuses first")
        }),
        "refuse beyond the fraction before asking the driver";
    expandable_segments_reserve => expandable_reserve: RESERVE, Expandable, since(15),
        "address space of an expandable segment";
    expandable_segments_reserve_by_class => expandable_reserve_by_class: RESERVES, Expandable, since(15),
        "the same for classes of streams";
    malloc_async_own_pool => malloc_async_own_pool: FLAG, MallocAsync, fixed(),
        "a driver pool of one's own instead of the device's default pool";
    layers => layers: LAYERS, Always, fixed(),
        // The path of a layer that code made may look like more layers.
        compared(|one, other| one.layers != other.layers),
        "layers around the strategy, from outside to inside";
    record_history => history.entries_max: ENTRIES, Always, fixed(),
        "the history is on from the start, and keeps at most so many";
    snapshot_on_oom => history.snapshot_on_oom: SNAPSHOT, Always, fixed(),
        "out of memory writes a snapshot, at most four times";
    advise_on_oom => history.advise_on_oom: FLAG, Always, fixed(),
        "out of memory lists the settings that would have served the recorded requests";
    peers => peers: PEERS, Always,
        "whether PyTorch's allocators open their memory to each other's devices";
    pinned_use_background_threads => pinned.use_background_threads: FLAG, NotYet, since(6),
        "events of pinned memory";
    pinned_max_round_threshold_mb => pinned.max_round_threshold_bytes: MIB_AT_MOST, NotYet, since(13),
        "pinned requests above it stay as they are";
    pinned_max_cached_size_mb => pinned.max_cached_bytes: MIB_AT_MOST, NotYet, since(13),
        "pinned blocks above it are not cached";
    pinned_use_cuda_host_register => pinned.use_host_register: FLAG, NotYet, since(2),
        also(&["pinned_use_hip_host_register"]), "register host memory instead of allocating it";
    pinned_num_register_threads => pinned.register_threads: THREADS, NotYet, since(2),
        "threads that touch pinned pages";
    pinned_reserve_segment_size_mb => pinned.reserve_segment_bytes: ARENA, NotYet, since(10),
        "one pinned arena for small requests";
    pinned_free_catch_all => pinned.free_catch_all: FLAG, NotYet, since(12),
        "ignore failures when pinned memory is freed";
    compat => compat: COMPAT, NativeAndMallocAsync,
        "decisions where PyTorch's are defects or differ by version";
    library => pluggable.library: LIBRARY, Pluggable, fixed(), "shared library with the functions below";
    alloc_fn => pluggable.alloc_fn: SYMBOL, Pluggable, fixed(), "its function that allocates";
    free_fn => pluggable.free_fn: SYMBOL, Pluggable, fixed(), "its function that frees";
    init_fn => pluggable.init_fn: SYMBOL, Pluggable, fixed(), "called once, with the number of devices";
    reset_fn => pluggable.reset_fn: SYMBOL, Pluggable, fixed(), "called when the cache is emptied";
    memory_fraction_fn => pluggable.memory_fraction_fn: SYMBOL, Pluggable, fixed(),
        "called when the memory fraction is set";
    base_alloc_fn => pluggable.base_alloc_fn: SYMBOL, Pluggable, fixed(),
        "returns the allocation that a block belongs to";
    record_stream_fn => pluggable.record_stream_fn: SYMBOL, Pluggable, fixed(),
        "called when another stream uses a block; waits for that stream";
    begin_allocate_to_pool_fn => pluggable.begin_allocate_to_pool_fn: SYMBOL, Pluggable, fixed(),
        "routes requests to a private pool";
    end_allocate_to_pool_fn => pluggable.end_allocate_to_pool_fn: SYMBOL, Pluggable, fixed(),
        "ends that routing";
    release_pool_fn => pluggable.release_pool_fn: SYMBOL, Pluggable, fixed(),
        "called when a private pool has no users left";
    cpu_alignment => cpu.alignment_bytes: ALIGNMENT, Cpu, fixed(), "where blocks start";
    cpu_cached_max_mb => cpu.cached_max_bytes: MIB_AT_MOST, Cpu,
        "more idle memory than this goes back to the system";
    cpu_trim_age_s => cpu.trim_age: AGE, Cpu, "memory idle for longer goes back to the system";
    cpu_stop_caching_on_oom => cpu.stop_caching_on_oom: FLAG, Cpu,
        "freed memory goes back to the system once that had no memory for a request";
    cpu_huge_pages => cpu.huge_pages: FLAG, Cpu, fixed(), "transparent huge pages from 2 MiB on";
    cpu_zero_fill => cpu.zero_fill: FLAG, Cpu, "every block starts as zeros";
    cpu_junk_fill => cpu.junk_fill: FLAG, Cpu, "every block starts as the pattern 0x7fedbeef";
    cpu_numa_node => cpu.numa_node: NODE, Cpu, fixed(), "where blocks from 1 MiB on lie";
}

fn without_effect_in_expandable_segments(settings: &Settings) -> Option<&'static str> {
    (settings.expandable_segments && settings.compat == Compat::Default)
        .then_some("expandable segments heed it with compat:pytorch only")
}
