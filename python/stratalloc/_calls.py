"""Made by tests/header.rs from include/stratalloc.h; do not edit."""

import enum
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    UNKNOWN_HANDLE = 2
    BAD_CONFIGURATION = 3
    OUT_OF_MEMORY = 4
    UNKNOWN_ADDRESS = 5
    BAD_POOL = 6
    NOT_SUPPORTED = 7
    DRIVER_FAILED = 8
    BUFFER_TOO_SMALL = 9
    INTERNAL = 10
    ASLEEP = 11
    BUSY = 12


class Text(enum.IntEnum):
    STATISTICS = 0
    SUMMARY = 1
    LAYOUT = 2
    NAME = 3
    METADATA = 4
    CONF = 5
    TORCH_STATISTICS = 6
    TORCH_SUMMARY = 7
    TORCH_NAME = 8
    METRICS = 9
    CONF_KEYS = 10
    TORCH_OOM_LINE = 11


class CacheInfo(Structure):
    _fields_ = [
        ("device_free_bytes", c_uint64),
        ("device_total_bytes", c_uint64),
        ("largest_cached_bytes", c_uint64),
        ("free_blocks", c_uint64),
    ]


class HostCounter(Structure):
    _fields_ = [
        ("current", c_int64),
        ("peak", c_int64),
        ("allocated", c_int64),
        ("freed", c_int64),
    ]


class HostTimes(Structure):
    _fields_ = [
        ("total", c_int64),
        ("max", c_int64),
        ("min", c_int64),
        ("count", c_int64),
    ]


class HostStatistics(Structure):
    _fields_ = [
        ("driver_allocations", c_int64),
        ("driver_frees", c_int64),
        ("blocks", HostCounter),
        ("reserved_bytes", HostCounter),
        ("live_blocks", HostCounter),
        ("live_bytes", HostCounter),
        ("allocate_time", HostTimes),
        ("free_time", HostTimes),
    ]


class Pool(Structure):
    _fields_ = [
        ("capture", c_uint64),
        ("user", c_uint64),
    ]


Release = CFUNCTYPE(None, c_void_p)


class SegmentSource(Structure):
    _fields_ = [
        ("allocate", CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_void_p)),
        ("free", CFUNCTYPE(None, c_void_p, c_void_p, c_uint64, c_void_p)),
        ("release", Release),
        ("user", c_void_p),
    ]


class StreamFilter(Structure):
    _fields_ = [
        ("accepts", CFUNCTYPE(c_int, c_void_p, c_void_p)),
        ("release", Release),
        ("user", c_void_p),
    ]


BlockAllocated = CFUNCTYPE(None, c_void_p, c_void_p, c_uint64, c_void_p)


BlockFreed = CFUNCTYPE(None, c_void_p, c_void_p, c_uint64)


class Paused(Structure):
    _fields_ = [
        ("copied_bytes", c_uint64),
        ("copies", c_uint64),
        ("dropped_blocks", c_uint64),
        ("dropped_bytes", c_uint64),
        ("unmapped_bytes", c_uint64),
        ("still_held_bytes", c_uint64),
    ]


class Resumed(Structure):
    _fields_ = [
        ("mapped_bytes", c_uint64),
        ("copied_bytes", c_uint64),
    ]


class TagInfo(Structure):
    _fields_ = [
        ("state", c_uint32),
        ("options", c_uint32),
        ("live_bytes", c_uint64),
        ("mapped_bytes", c_uint64),
        ("asleep_bytes", c_uint64),
        ("backed_bytes", c_uint64),
        ("kept_backup_bytes", c_uint64),
        ("pauses", c_uint64),
        ("resumes", c_uint64),
    ]


ExpandableVisitor = CFUNCTYPE(None, c_void_p, c_void_p, c_int, c_uint64)


class Tensor(Structure):
    _fields_ = [
        ("address", c_uint64),
        ("size_bytes", c_uint64),
        ("device_type", c_uint32),
        ("device_id", c_uint32),
        ("type_code", c_uint32),
        ("type_bits", c_uint32),
        ("type_lanes", c_uint32),
        ("is_read_only", c_uint32),
        ("dimensions", c_uint32),
        ("shape", c_int64 * 64),
    ]


CapsuleIsValid = CFUNCTYPE(c_int, c_void_p, c_char_p)


CapsulePointer = CFUNCTYPE(c_void_p, c_void_p, c_char_p)


class StackFrame(Structure):
    _fields_ = [
        ("function", c_char_p),
        ("file", c_char_p),
        ("line", c_uint32),
    ]


class StackSource(Structure):
    _fields_ = [
        ("gather", CFUNCTYPE(c_void_p, c_void_p)),
        ("release", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("frames", CFUNCTYPE(c_size_t, c_void_p, c_void_p, POINTER(StackFrame), c_size_t)),
        ("user", c_void_p),
    ]


ThreadMetadata = CFUNCTYPE(c_char_p)


SnapshotWriter = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)


class Segment(Structure):
    _fields_ = [
        ("address", c_uint64),
        ("total_bytes", c_uint64),
        ("requested_bytes", c_uint64),
        ("allocated_bytes", c_uint64),
        ("active_bytes", c_uint64),
        ("stream", c_void_p),
        ("pool", Pool),
        ("is_large", c_int),
        ("is_expandable", c_int),
        ("number", c_uint64),
        ("stack", c_void_p),
    ]


class Block(Structure):
    _fields_ = [
        ("address", c_uint64),
        ("size_bytes", c_uint64),
        ("requested_bytes", c_uint64),
        ("state", c_uint32),
        ("stack", c_void_p),
    ]


class Entry(Structure):
    _fields_ = [
        ("action", c_uint32),
        ("address", c_uint64),
        ("size_bytes", c_uint64),
        ("stream", c_void_p),
        ("pool", Pool),
        ("time_us", c_int64),
        ("compile_context", c_char_p),
        ("user_metadata", c_char_p),
        ("stack", c_void_p),
    ]


class SnapshotVisitor(Structure):
    _fields_ = [
        ("segment", CFUNCTYPE(None, c_void_p, POINTER(Segment))),
        ("block", CFUNCTYPE(None, c_void_p, POINTER(Block))),
        ("entry", CFUNCTYPE(None, c_void_p, POINTER(Entry))),
        ("user", c_void_p),
    ]


Tracker = CFUNCTYPE(None, c_void_p, POINTER(Entry))


OomObserver = CFUNCTYPE(None, c_void_p, c_int, c_uint64, c_uint64, c_uint64)


OomRejectionObserver = CFUNCTYPE(None, c_void_p, c_int, c_uint64, c_uint64, c_uint64)


FreeMemoryCallback = CFUNCTYPE(c_int, c_void_p)


StackVisitor = CFUNCTYPE(None, c_void_p, c_void_p)


class TorchSettings(Structure):
    _fields_ = [
        ("garbage_collection_threshold", c_double),
        ("max_split_bytes", c_uint64),
        ("roundup_power2_divisions", c_uint64 * 16),
        ("expandable_segments", c_int),
        ("release_lock_on_malloc", c_int),
        ("graph_capture_record_stream_reuse", c_int),
    ]


class Cupy(Structure):
    _fields_ = [
        ("stream_of", CFUNCTYPE(c_void_p, c_int)),
        ("set_error", CFUNCTYPE(None, c_void_p, c_char_p)),
        ("out_of_memory", c_void_p),
        ("failure", c_void_p),
    ]


# Result and arguments of every function.
CALLS = {
    "stratalloc_callbacks_end": (c_int, [c_void_p, c_uint64, POINTER(c_uint64)]),
    "stratalloc_create": (c_int, [c_char_p, c_char_p, POINTER(c_uint64)]),
    "stratalloc_check_conf": (c_int, [c_char_p]),
    "stratalloc_destroy": (c_int, [c_uint64]),
    "stratalloc_allocate": (c_int, [c_uint64, c_uint64, c_void_p, POINTER(c_void_p)]),
    "stratalloc_free": (c_int, [c_uint64, c_void_p]),
    "stratalloc_record_stream": (c_int, [c_uint64, c_void_p, c_void_p]),
    "stratalloc_empty_cache": (c_int, [c_uint64]),
    "stratalloc_set_memory_fraction": (c_int, [c_uint64, c_double]),
    "stratalloc_set_conf": (c_int, [c_uint64, c_char_p]),
    "stratalloc_switch": (c_int, [c_uint64, c_char_p]),
    "stratalloc_last_error": (c_size_t, [c_char_p, c_size_t]),
    "stratalloc_last_status": (c_int, []),
    "stratalloc_version": (c_char_p, []),
    "stratalloc_reset_peaks": (c_int, [c_uint64]),
    "stratalloc_reset_accumulated": (c_int, [c_uint64]),
    "stratalloc_memory_fraction": (c_int, [c_uint64, POINTER(c_double)]),
    "stratalloc_memory_info": (c_int, [c_uint64, POINTER(c_uint64), POINTER(c_uint64)]),
    "stratalloc_cache_info": (c_int, [c_uint64, POINTER(CacheInfo)]),
    "stratalloc_base_allocation": (c_int, [c_uint64, c_void_p, POINTER(c_void_p), POINTER(c_uint64)]),
    "stratalloc_usage": (c_int, [c_uint64, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64)]),
    "stratalloc_block_count": (c_int, [c_uint64, POINTER(c_uint64)]),
    "stratalloc_fragmentation": (c_int, [c_uint64, POINTER(c_double)]),
    "stratalloc_device_count": (c_int, [POINTER(c_int)]),
    "stratalloc_record_free": (c_int, [c_uint64, c_void_p]),
    "stratalloc_set_caching": (c_int, [c_uint64, c_int]),
    "stratalloc_caching": (c_int, [c_uint64, POINTER(c_int)]),
    "stratalloc_host_statistics": (c_int, [c_uint64, POINTER(HostStatistics)]),
    "stratalloc_text_write": (c_int, [c_uint64, c_uint32, c_char_p, c_size_t, POINTER(c_size_t)]),
    "stratalloc_pool_create": (c_int, [c_uint64, c_uint32, POINTER(Pool)]),
    "stratalloc_pool_ensure": (c_int, [c_uint64, Pool, c_uint32, POINTER(SegmentSource)]),
    "stratalloc_pool_set_options": (c_int, [c_uint64, Pool, c_uint32]),
    "stratalloc_pool_users": (c_int, [c_uint64, Pool, POINTER(c_uint32)]),
    "stratalloc_pool_live": (c_int, [c_uint64, Pool, POINTER(c_void_p), c_size_t, POINTER(c_size_t)]),
    "stratalloc_pool_empty": (c_int, [c_uint64, Pool]),
    "stratalloc_pool_retain": (c_int, [c_uint64, Pool]),
    "stratalloc_pool_release": (c_int, [c_uint64, Pool]),
    "stratalloc_pool_scope_open_thread": (c_int, [c_uint64, Pool]),
    "stratalloc_pool_scope_open_stream": (c_int, [c_uint64, Pool, c_void_p]),
    "stratalloc_pool_scope_open_filter": (c_int, [c_uint64, Pool, POINTER(StreamFilter)]),
    "stratalloc_pool_scope_close": (c_int, [c_uint64, Pool]),
    "stratalloc_checkpoint_take": (c_int, [c_uint64, Pool, POINTER(c_void_p)]),
    "stratalloc_checkpoint_restore": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "stratalloc_checkpoint_drop": (c_int, [c_void_p]),
    "stratalloc_tag_create": (c_int, [c_uint64, c_char_p, c_uint32, POINTER(Pool)]),
    "stratalloc_tag_of_pool": (c_int, [c_uint64, Pool, c_char_p, c_uint32]),
    "stratalloc_tag_set_directory": (c_int, [c_uint64, Pool, c_char_p]),
    "stratalloc_tag_find": (c_int, [c_uint64, c_char_p, POINTER(Pool)]),
    "stratalloc_tag_pause": (c_int, [c_uint64, Pool, c_uint32, POINTER(c_void_p), c_size_t, POINTER(Paused)]),
    "stratalloc_tag_resume": (c_int, [c_uint64, Pool, POINTER(Resumed)]),
    "stratalloc_tag_info": (c_int, [c_uint64, Pool, POINTER(TagInfo)]),
    "stratalloc_tag_read_backup": (c_int, [c_uint64, c_void_p, c_void_p, c_size_t]),
    "stratalloc_share": (c_int, [c_uint64, c_void_p, c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_uint64)]),
    "stratalloc_open_shared": (c_int, [c_uint64, c_void_p, c_size_t, POINTER(c_uint64), POINTER(c_void_p), POINTER(c_uint64)]),
    "stratalloc_close_shared": (c_int, [c_uint64]),
    "stratalloc_enable_peer": (c_int, [c_uint64, c_int]),
    "stratalloc_expandable_segments": (c_int, [c_uint64, c_void_p, c_void_p]),
    "stratalloc_set_reserve_class": (c_int, [c_uint64, c_void_p, c_char_p]),
    "stratalloc_owned_allocate": (c_int, [c_uint64, c_uint64, c_void_p, POINTER(c_uint64), POINTER(Tensor)]),
    "stratalloc_owned_release": (c_int, [c_uint64]),
    "stratalloc_tensor_export": (c_int, [c_uint64, POINTER(Tensor), c_uint32, c_void_p, POINTER(c_void_p)]),
    "stratalloc_tensor_import": (c_int, [c_void_p, c_uint32, POINTER(c_uint64), POINTER(Tensor)]),
    "stratalloc_tensor_release": (c_int, [c_uint64]),
    "stratalloc_tensor_capsule_destructor": (c_int, [c_void_p, c_void_p, POINTER(c_void_p)]),
    "stratalloc_history_start": (c_int, [c_uint64, c_uint32, c_uint64, c_char_p, c_int]),
    "stratalloc_history_stop": (c_int, [c_uint64]),
    "stratalloc_history_is_on": (c_int, [c_uint64, POINTER(c_int)]),
    "stratalloc_history_clear": (c_int, [c_uint64]),
    "stratalloc_history_set_stack_source": (c_int, [c_uint64, POINTER(StackSource)]),
    "stratalloc_history_drop_stack_source": (c_int, [c_uint64]),
    "stratalloc_history_set_metadata": (c_int, [c_uint64, c_char_p]),
    "stratalloc_history_set_thread_metadata": (c_int, [c_uint64, c_void_p]),
    "stratalloc_context_push": (c_int, [c_char_p]),
    "stratalloc_context_pop": (c_int, []),
    "stratalloc_annotate": (c_int, [c_uint64, POINTER(c_char_p), c_size_t]),
    "stratalloc_compile_context_push": (c_int, [c_char_p]),
    "stratalloc_compile_context_pop": (c_int, []),
    "stratalloc_snapshot_save": (c_int, [c_uint64, c_char_p]),
    "stratalloc_snapshot_write": (c_int, [c_uint64, c_uint32, c_void_p, c_void_p]),
    "stratalloc_snapshot_take": (c_int, [c_uint64, POINTER(Pool), c_int, POINTER(c_void_p)]),
    "stratalloc_snapshot_visit": (c_int, [c_void_p, POINTER(SnapshotVisitor)]),
    "stratalloc_snapshot_drop": (c_int, [c_void_p]),
    "stratalloc_tracker_add": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)]),
    "stratalloc_tracker_remove": (c_int, [c_uint64, c_uint64]),
    "stratalloc_oom_observer_add": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)]),
    "stratalloc_oom_rejection_observer_add": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)]),
    "stratalloc_hook_remove": (c_int, [c_uint64, c_uint64]),
    "stratalloc_free_memory_callback_add": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)]),
    "stratalloc_torch_malloc": (c_void_p, [c_size_t, c_int, c_void_p]),
    "stratalloc_torch_free": (None, [c_void_p, c_size_t, c_int, c_void_p]),
    "stratalloc_torch_init": (None, [c_int]),
    "stratalloc_torch_reset": (None, []),
    "stratalloc_torch_drop_stack_sources": (c_int, []),
    "stratalloc_torch_memory_fraction": (None, [c_double, c_int]),
    "stratalloc_torch_base_allocation": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "stratalloc_torch_record_stream": (None, [c_void_p, c_void_p]),
    "stratalloc_torch_begin_allocate_to_pool": (None, [c_int, Pool, c_void_p]),
    "stratalloc_torch_end_allocate_to_pool": (None, [c_int, Pool]),
    "stratalloc_torch_release_pool": (None, [c_int, Pool]),
    "stratalloc_torch_handle": (c_int, [c_int, POINTER(c_uint64)]),
    "stratalloc_torch_empty_cache": (c_int, []),
    "stratalloc_torch_allocate": (c_int, [c_int, c_uint64, c_void_p, POINTER(c_void_p)]),
    "stratalloc_torch_allocate_at": (c_int, [c_int, c_uint64, c_void_p, c_void_p, POINTER(c_void_p)]),
    "stratalloc_torch_describe_block": (c_int, [c_uint64, c_void_p, POINTER(Entry)]),
    "stratalloc_torch_visit_stack": (c_int, [c_uint64, c_void_p, c_void_p, c_void_p]),
    "stratalloc_torch_delete": (c_int, [c_void_p, c_int, POINTER(c_int), POINTER(c_uint64)]),
    "stratalloc_torch_scope_open": (c_int, [c_uint64, Pool, POINTER(StreamFilter)]),
    "stratalloc_torch_scope_close": (c_int, [c_uint64, Pool]),
    "stratalloc_torch_pool_release": (c_int, [c_uint64, Pool]),
    "stratalloc_torch_share_pages": (c_int, [c_int]),
    "stratalloc_torch_version": (c_int, [c_uint32, c_uint32]),
    "stratalloc_torch_set_conf": (c_int, [c_char_p]),
    "stratalloc_torch_settings": (c_int, [c_uint64, POINTER(TorchSettings)]),
    "stratalloc_library_malloc": (c_void_p, [c_char_p, c_size_t, c_int, c_void_p]),
    "stratalloc_library_free": (c_int, [c_void_p, c_int, c_void_p]),
    "stratalloc_cupy_malloc": (c_void_p, [POINTER(Cupy), c_size_t, c_int]),
    "stratalloc_cupy_free": (None, [POINTER(Cupy), c_void_p, c_int]),
    "stratalloc_onnxruntime_use": (c_int, [c_int]),
    "stratalloc_onnxruntime_alloc": (c_void_p, [c_size_t]),
    "stratalloc_onnxruntime_free": (None, [c_void_p]),
    "stratalloc_onnxruntime_empty_cache": (None, []),
}
