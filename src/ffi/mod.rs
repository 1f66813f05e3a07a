//! The library for programs in other languages: a C interface, and the symbols that PyTorch's
//! pluggable allocator loads.
//!
//! `calls`, `figures`, `pools`, `checkpoints`, `sharing`, `history`, `hooks` and `snapshots` are the
//! interface by handles, `torch` is PyTorch's. Callers are treated as hostile: every entry checks its
//! pointers, handles are numbers that are looked up (`table`, `lent`), and nothing unwinds into the caller
//! (`guard`). Functions of callers are held by `lent`, and their calls counted by `gate`. What a device is
//! called is in `device`, what is said to people in `said`, what a fork leaves in `fork`.
//! `include/stratalloc.h` is made from these files by `tests/header.rs`; comments here are its text.

mod calls;
mod checkpoints;
mod device;
mod figures;
mod fork;
mod gate;
mod guard;
mod history;
mod hooks;
mod instance;
mod lent;
mod pools;
mod said;
mod sharing;
mod snapshots;
mod table;
mod text;
mod torch;
mod uncached;

pub use calls::{
    stratalloc_allocate, stratalloc_check_conf, stratalloc_create, stratalloc_destroy,
    stratalloc_empty_cache, stratalloc_free, stratalloc_last_error, stratalloc_metrics,
    stratalloc_record_stream, stratalloc_set_conf, stratalloc_set_memory_fraction,
    stratalloc_statistics_json, stratalloc_summary, stratalloc_switch, stratalloc_version,
};
pub use checkpoints::{
    BlockAllocated, BlockFreed, Checkpoint, stratalloc_checkpoint_drop,
    stratalloc_checkpoint_restore, stratalloc_checkpoint_take,
};
pub use figures::{
    CacheInfo, stratalloc_base_allocation, stratalloc_block_count, stratalloc_cache_info,
    stratalloc_caching, stratalloc_device_count, stratalloc_fragmentation, stratalloc_layout_json,
    stratalloc_memory_fraction, stratalloc_memory_info, stratalloc_name, stratalloc_record_free,
    stratalloc_reset_accumulated, stratalloc_reset_peaks, stratalloc_set_caching, stratalloc_usage,
};
pub use guard::Status;
pub use history::{
    SnapshotWriter, StackFrame, StackSource, ThreadMetadata, stratalloc_annotate,
    stratalloc_compile_context_pop, stratalloc_compile_context_push, stratalloc_context_pop,
    stratalloc_context_push, stratalloc_history_clear, stratalloc_history_drop_stack_source,
    stratalloc_history_is_on, stratalloc_history_metadata, stratalloc_history_set_metadata,
    stratalloc_history_set_stack_source, stratalloc_history_set_thread_metadata,
    stratalloc_history_start, stratalloc_history_stop, stratalloc_snapshot_save,
    stratalloc_snapshot_write,
};
pub use hooks::{
    FreeMemoryCallback, OomObserver, OomRejectionObserver, Tracker,
    stratalloc_free_memory_callback_add, stratalloc_free_memory_callback_remove,
    stratalloc_oom_observer_add, stratalloc_oom_observer_remove,
    stratalloc_oom_rejection_observer_add, stratalloc_oom_rejection_observer_remove,
    stratalloc_tracker_add, stratalloc_tracker_remove,
};
pub use lent::{Release, stratalloc_callbacks_end};
pub use pools::{
    POOL_NO_SPLIT, POOL_USE_ON_OOM, Pool, SegmentSource, StreamFilter, stratalloc_pool_create,
    stratalloc_pool_empty, stratalloc_pool_ensure, stratalloc_pool_live, stratalloc_pool_release,
    stratalloc_pool_retain, stratalloc_pool_scope_close, stratalloc_pool_scope_open_filter,
    stratalloc_pool_scope_open_stream, stratalloc_pool_scope_open_thread,
    stratalloc_pool_set_options, stratalloc_pool_users,
};
pub use sharing::{
    ExpandableVisitor, stratalloc_close_shared, stratalloc_enable_peer,
    stratalloc_expandable_segments, stratalloc_open_shared, stratalloc_set_reserve_class,
    stratalloc_share,
};
pub use snapshots::{
    Block, Entry, Segment, Snapshot, SnapshotVisitor, stratalloc_snapshot_drop,
    stratalloc_snapshot_take, stratalloc_snapshot_visit,
};
pub use torch::{
    TorchSettings, stratalloc_torch_allocate, stratalloc_torch_allocate_at,
    stratalloc_torch_base_allocation, stratalloc_torch_begin_allocate_to_pool,
    stratalloc_torch_conf, stratalloc_torch_conf_keys, stratalloc_torch_delete,
    stratalloc_torch_describe_block, stratalloc_torch_drop_stack_sources,
    stratalloc_torch_empty_cache, stratalloc_torch_end_allocate_to_pool, stratalloc_torch_free,
    stratalloc_torch_handle, stratalloc_torch_init, stratalloc_torch_malloc,
    stratalloc_torch_memory_fraction, stratalloc_torch_name, stratalloc_torch_pool_release,
    stratalloc_torch_record_stream, stratalloc_torch_release_pool, stratalloc_torch_reset,
    stratalloc_torch_scope_close, stratalloc_torch_scope_open, stratalloc_torch_set_conf,
    stratalloc_torch_settings, stratalloc_torch_share_pages, stratalloc_torch_statistics_json,
    stratalloc_torch_summary, stratalloc_torch_version, stratalloc_torch_visit_stack,
};
