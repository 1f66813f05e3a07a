//! The library for programs in other languages: a C interface, and the symbols that PyTorch's
//! pluggable allocator loads.
//!
//! `calls`, `pools` and `history` are the interface by handles, `torch` is PyTorch's. Callers are treated as
//! hostile: every entry checks its pointers, handles are numbers that are looked up (`table`), and
//! nothing unwinds into the caller (`guard`). What a device is called is in `device`, what is said to
//! people in `said`, what a fork leaves in `fork`.
//! `include/stratalloc.h` is made from these files by `tests/header.rs`; comments here are its text.

mod calls;
mod device;
mod fork;
mod guard;
mod history;
mod instance;
mod pools;
mod said;
mod table;
mod text;
mod torch;

pub use calls::{
    stratalloc_allocate, stratalloc_check_conf, stratalloc_create, stratalloc_destroy,
    stratalloc_empty_cache, stratalloc_free, stratalloc_last_error, stratalloc_record_stream,
    stratalloc_set_conf, stratalloc_set_memory_fraction, stratalloc_statistics_json,
    stratalloc_summary, stratalloc_switch, stratalloc_version,
};
pub use guard::Status;
pub use history::{
    SnapshotWriter, StackFrame, StackSource, stratalloc_context_pop, stratalloc_context_push,
    stratalloc_history_clear, stratalloc_history_set_metadata, stratalloc_history_set_stack_source,
    stratalloc_history_start, stratalloc_history_stop, stratalloc_snapshot_save,
    stratalloc_snapshot_write,
};
pub use pools::{
    POOL_NO_SPLIT, POOL_USE_ON_OOM, Pool, stratalloc_pool_create, stratalloc_pool_release,
    stratalloc_pool_retain, stratalloc_pool_scope_close, stratalloc_pool_scope_open_stream,
    stratalloc_pool_scope_open_thread,
};
pub use torch::{
    stratalloc_torch_base_allocation, stratalloc_torch_begin_allocate_to_pool,
    stratalloc_torch_empty_cache, stratalloc_torch_end_allocate_to_pool, stratalloc_torch_free,
    stratalloc_torch_handle, stratalloc_torch_init, stratalloc_torch_malloc,
    stratalloc_torch_memory_fraction, stratalloc_torch_record_stream,
    stratalloc_torch_release_pool, stratalloc_torch_reset, stratalloc_torch_statistics_json,
    stratalloc_torch_summary,
};
