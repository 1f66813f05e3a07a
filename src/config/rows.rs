//! The built-in keys, one row each.
//!
//! A row is `name => field: codec, backends that read it, options, meaning`. The codec has the range,
//! and parses and formats the field of [`Settings`]. The options are:
//!
//! - `since(minor)`: the first PyTorch 2.x that accepts the key;
//! - `fixed()`: the key is read only when an allocator is built;
//! - `also(names)`: aliases;
//! - `reset(..)`: restores the default if a later string does not contain the key;
//! - `idle(..)`: the condition under which the key has no effect.
//!
//! Source of names and ranges: PyTorch's `PYTORCH_CUDA_ALLOC_CONF`.

use super::keys::Key;
use super::read::*;
use super::settings::{PinnedNuma, PinnedRounding, Settings};
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
                backends: $acts,
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

const ALL: &[&str] = &[];
const NATIVE: &[&str] = &["native"];
const ASYNC: &[&str] = &["cudaMallocAsync"];
const NATIVE_AND_ASYNC: &[&str] = &["native", "cudaMallocAsync"];
const PLUGGABLE: &[&str] = &["pluggable"];
const CPU: &[&str] = &["cpu"];
const PINNED: &[&str] = &["pinned"];
/// The names of the built-in strategies, in the order of the registry's rows.
pub(crate) const BUILT_IN_BACKENDS: [&str; 5] =
    ["native", "cudaMallocAsync", "pluggable", "cpu", "pinned"];
const BUILT_IN_ONLY: &[&str] = &BUILT_IN_BACKENDS;

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
    backend => backend: BACKEND, ALL, since(1), fixed(), "which strategy allocates";
    large_segment_size_mb => large_segment_bytes: SEGMENT, NATIVE, since(11),
        "segment shared by requests of 1 to 10 MiB";
    max_split_size_mb => max_split_bytes: FROM_SEGMENT, NATIVE, since(1),
        reset(|settings| settings.max_split_bytes = None), idle(without_effect_in_expandable_segments),
        "blocks from this size on are never split";
    max_non_split_rounding_mb => max_non_split_rounding_bytes: ROUNDING, NATIVE, since(6),
        // `compared` uses the field and not the text of `shown`: the default depends on another key, so
        // a value that equals the default still counts as set.
        shown(|settings| mib(settings.non_split_rounding_bytes())),
        compared(|one, other| one.max_non_split_rounding_bytes != other.max_non_split_rounding_bytes),
        reset(|settings| settings.max_non_split_rounding_bytes = None),
        idle(|settings| match settings.max_split_bytes {
            None => Some("acts with max_split_size_mb only"),
            Some(_) => without_effect_in_expandable_segments(settings),
        }),
        "how much larger a reused oversize block may be";
    garbage_collection_threshold => garbage_collection_threshold: THRESHOLD, NATIVE, since(1),
        reset(|settings| settings.garbage_collection_threshold = None),
        idle(|settings| {
            (settings.per_process_memory_fraction >= 1.0).then_some("acts once a memory limit is set")
        }),
        "part of the limit from which idle segments are released";
    roundup_power2_divisions => roundup: DIVISIONS, NATIVE, since(1),
        reset(|settings| settings.roundup = RoundupDivisions::OFF),
        "steps between powers of two that requests are rounded to";
    expandable_segments => expandable_segments: FLAG, NATIVE, since(1),
        "segments that grow by mapping pages";
    expandable_segments_ipc => expandable_segments_ipc: FLAG, NATIVE, idle(needs_expandable),
        "new pages may be shared with other processes; each costs a descriptor on some devices";
    expandable_segments_handle_type => expandable_segments_handle_type: HANDLE_TYPE, NATIVE,
        idle(needs_expandable),
        "the kind of handle by which pages are shared; unspecified: fabric if the device supports it";
    release_lock_on_cudamalloc => release_lock_on_device_allocate: FLAG, NATIVE, since(2),
        also(&["release_lock_on_hipmalloc"]), "other misses continue while one waits for the driver";
    graph_capture_record_stream_reuse => graph_capture_record_stream_reuse: FLAG, NATIVE, since(9),
        "blocks that were used by other streams are reused inside a graph capture";
    per_process_memory_fraction => per_process_memory_fraction: FRACTION, BUILT_IN_ONLY, since(10),
        "part of the device's memory that may be reserved";
    throw_on_cudamalloc_oom => throw_on_device_oom: FLAG, NATIVE, since(12),
        idle(|settings| {
            (settings.per_process_memory_fraction < 1.0).then_some("the fraction's limit refuses first")
        }),
        "refuse beyond the fraction before asking the driver";
    expandable_segments_reserve => expandable_reserve: RESERVE, NATIVE, idle(needs_expandable), since(15),
        "address space of an expandable segment";
    expandable_segments_reserve_by_class => expandable_reserve_by_class: RESERVES, NATIVE,
        idle(needs_expandable), since(15), "the same for classes of streams";
    malloc_async_own_pool => malloc_async_own_pool: FLAG, ASYNC, fixed(),
        "a driver pool of one's own instead of the device's default pool";
    layers => layers: LAYERS, ALL, fixed(),
        // Compared as values, not as text: a path that was set in code may contain text that looks like
        // further layers.
        compared(|one, other| one.layers != other.layers),
        "layers around the strategy, from outside to inside";
    record_history => history.entries_max: ENTRIES, ALL, fixed(),
        "the history is on from the start, and keeps at most so many";
    snapshot_on_oom => history.snapshot_on_oom: SNAPSHOT, ALL, fixed(),
        "out of memory writes a snapshot, at most four times; a file that exists is kept";
    advise_on_oom => history.advise_on_oom: FLAG, ALL, fixed(),
        "out of memory lists the settings that would have served the recorded requests";
    peers => peers: PEERS, ALL,
        "whether PyTorch's allocators open their memory to each other's devices";
    pinned_use_background_threads => pinned.use_background_threads: FLAG, PINNED, fixed(), since(6),
        "a thread queries the events that freed blocks wait for";
    pinned_max_round_threshold_mb => pinned.max_round_threshold_bytes: MIB_AT_MOST, PINNED, since(13),
        idle(|settings| {
            (settings.pinned.rounding == PinnedRounding::Exact)
                .then_some("acts with pinned_rounding:power_of_two only")
        }),
        "requests above it are not rounded to a power of two";
    pinned_max_cached_size_mb => pinned.max_cached_bytes: MIB_AT_MOST, PINNED, since(13),
        "blocks above it are released as soon as they are free";
    pinned_use_cuda_host_register => pinned.use_host_register: FLAG, PINNED, fixed(), since(2),
        also(&["pinned_use_hip_host_register"]), "register memory of the program instead of allocating it";
    pinned_num_register_threads => pinned.register_threads: THREADS, PINNED, fixed(), since(2),
        idle(|settings| {
            let registers =
                settings.pinned.use_host_register || settings.pinned.numa != PinnedNuma::Any;
            (!registers).then_some("acts with pinned_use_cuda_host_register or pinned_numa only")
        }),
        "threads that touch the pages of new registered memory";
    pinned_reserve_segment_size_mb => pinned.reserve_segment_bytes: ARENA, PINNED, fixed(), since(10),
        "one segment allocated at the start, which serves requests first";
    pinned_free_catch_all => pinned.free_catch_all: FLAG, PINNED, since(12),
        "ignore failures when memory is released to the driver";
    pinned_rounding => pinned.rounding: PINNED_ROUNDING, PINNED, "sizes of blocks";
    pinned_numa => pinned.numa: PINNED_NUMA, PINNED, fixed(),
        "where blocks lie; auto: on the node nearest to the device";
    pinned_trim_age_s => pinned.trim_age: AGE, PINNED, "blocks free for longer are released to the driver";
    compat => compat: COMPAT, NATIVE_AND_ASYNC,
        "decisions where PyTorch's are defects or differ by version";
    library => pluggable.library: LIBRARY, PLUGGABLE, fixed(), "shared library with the functions below";
    alloc_fn => pluggable.alloc_fn: SYMBOL, PLUGGABLE, fixed(), "its function that allocates";
    free_fn => pluggable.free_fn: SYMBOL, PLUGGABLE, fixed(), "its function that frees";
    init_fn => pluggable.init_fn: SYMBOL, PLUGGABLE, fixed(), "called once, with the number of devices";
    reset_fn => pluggable.reset_fn: SYMBOL, PLUGGABLE, fixed(), "called when the cache is emptied";
    memory_fraction_fn => pluggable.memory_fraction_fn: SYMBOL, PLUGGABLE, fixed(),
        "called when the memory fraction is set";
    base_alloc_fn => pluggable.base_alloc_fn: SYMBOL, PLUGGABLE, fixed(),
        "returns the allocation that a block belongs to";
    record_stream_fn => pluggable.record_stream_fn: SYMBOL, PLUGGABLE, fixed(),
        "called when another stream uses a block; waits for that stream";
    begin_allocate_to_pool_fn => pluggable.begin_allocate_to_pool_fn: SYMBOL, PLUGGABLE, fixed(),
        "routes requests to a private pool";
    end_allocate_to_pool_fn => pluggable.end_allocate_to_pool_fn: SYMBOL, PLUGGABLE, fixed(),
        "ends that routing";
    release_pool_fn => pluggable.release_pool_fn: SYMBOL, PLUGGABLE, fixed(),
        "called when a private pool has no users left";
    cpu_alignment => cpu.alignment_bytes: ALIGNMENT, CPU, fixed(), "where blocks start";
    cpu_cached_max_mb => cpu.cached_max_bytes: MIB_AT_MOST, CPU,
        "idle memory above this size is released to the system";
    cpu_trim_age_s => cpu.trim_age: AGE, CPU, "memory idle for longer is released to the system";
    cpu_stop_caching_on_oom => cpu.stop_caching_on_oom: FLAG, CPU,
        "freed memory is released to the system after the system ran out of memory once";
    cpu_huge_pages => cpu.huge_pages: FLAG, CPU, fixed(), "transparent huge pages from 2 MiB on";
    cpu_zero_fill => cpu.zero_fill: FLAG, CPU, "every block starts as zeros";
    cpu_junk_fill => cpu.junk_fill: FLAG, CPU, "every block starts as the pattern 0x7fedbeef";
    cpu_numa_node => cpu.numa_node: NODE, CPU, fixed(), "where blocks from 1 MiB on lie";
}

fn without_effect_in_expandable_segments(settings: &Settings) -> Option<&'static str> {
    (settings.expandable_segments && settings.compat == Compat::Default)
        .then_some("expandable segments heed it with compat:pytorch only")
}

fn needs_expandable(settings: &Settings) -> Option<&'static str> {
    (!settings.expandable_segments).then_some("acts with expandable_segments:True only")
}
