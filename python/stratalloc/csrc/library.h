// The functions of the shared library, found by name in the one that Python has loaded already.
#pragma once

#include <string>

#include "stratalloc.h"

#define STRATALLOC_FUNCTIONS(X)   \
  X(base_allocation)              \
  X(cache_info)                   \
  X(check_conf)                   \
  X(checkpoint_drop)              \
  X(checkpoint_restore)           \
  X(checkpoint_take)              \
  X(close_shared)                 \
  X(compile_context_pop)          \
  X(compile_context_push)         \
  X(empty_cache)                  \
  X(enable_peer)                  \
  X(expandable_segments)          \
  X(free_memory_callback_add)     \
  X(history_set_stack_source)     \
  X(history_set_thread_metadata)  \
  X(history_start)                \
  X(history_stop)                 \
  X(last_error)                   \
  X(memory_fraction)              \
  X(memory_info)                  \
  X(oom_observer_add)             \
  X(oom_rejection_observer_add)   \
  X(open_shared)                  \
  X(pool_empty)                   \
  X(pool_ensure)                  \
  X(pool_live)                    \
  X(pool_set_options)             \
  X(pool_users)                   \
  X(record_stream)                \
  X(reset_accumulated)            \
  X(reset_peaks)                  \
  X(set_caching)                  \
  X(set_memory_fraction)          \
  X(set_reserve_class)            \
  X(share)                        \
  X(snapshot_drop)                \
  X(snapshot_take)                \
  X(snapshot_visit)               \
  X(text_write)                   \
  X(torch_allocate)               \
  X(torch_allocate_at)            \
  X(torch_delete)                 \
  X(torch_describe_block)         \
  X(torch_handle)                 \
  X(torch_pool_release)           \
  X(torch_scope_close)            \
  X(torch_scope_open)             \
  X(torch_set_conf)               \
  X(torch_settings)               \
  X(torch_share_pages)            \
  X(torch_version)                \
  X(torch_visit_stack)            \
  X(tracker_add)                  \
  X(usage)                        \
  X(version)

namespace stratalloc_torch {

struct Library {
#define STRATALLOC_POINTER(name) decltype(&stratalloc_##name) name = nullptr;
  STRATALLOC_FUNCTIONS(STRATALLOC_POINTER)
#undef STRATALLOC_POINTER

  // Finds all functions in the library at a path. Says what is missing, or nothing.
  std::string load(const char* path);
};

// The one that `load` filled; it is never unloaded.
extern Library library;

// What the calling thread's last failed call said.
std::string last_error();

// Throws PyTorch's exception for a call that failed: about memory, a value, what is not supported, or any.
[[noreturn]] void fail(stratalloc_status status, const std::string& what = {});

inline void check(stratalloc_status status) {
  if (__builtin_expect(status != STRATALLOC_STATUS_OK, 0)) {
    fail(status);
  }
}

// A text of the library about a handle, a device's number or 0.
std::string text_of(uint64_t of, stratalloc_text kind);

} // namespace stratalloc_torch
