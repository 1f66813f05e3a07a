/* Device-memory allocators, chosen at run time by one string. Made by tests/header.rs; do not edit. */

#ifndef STRATALLOC_H
#define STRATALLOC_H

#include <stddef.h>
#include <stdint.h>

// The handle of PyTorch's allocator on device 0. For device N, add N.
#define STRATALLOC_TORCH_HANDLE 4611686018427387905

// Requests to the default pool may use free blocks of this pool before they fail.
#define STRATALLOC_POOL_USE_ON_OOM 1

// Blocks of the pool are never split.
#define STRATALLOC_POOL_NO_SPLIT 2

// A pause copies the contents of live blocks to host memory. Without it, contents are dropped.
#define STRATALLOC_TAG_BACKUP 1

// The backup is pinned memory that is kept from one pause to the next.
#define STRATALLOC_TAG_KEEP_BACKUP 2

// Requests in a tag that is not awake wait until another thread resumes it. Without it, they fail.
#define STRATALLOC_TAG_WAIT 4

// A resume also maps the free memory that the tag's cache had at the pause, unless the device is short
// of memory.
#define STRATALLOC_TAG_KEEP_FREE 8

// This pause copies contents, whatever the tag's options are.
#define STRATALLOC_PAUSE_BACKUP 1

// This pause drops contents, whatever the tag's options are.
#define STRATALLOC_PAUSE_DROP 2

// The caller has waited for all work that uses the tag, so the pause waits for nothing.
#define STRATALLOC_PAUSE_SYNCHRONIZED 4

// A flag of `stratalloc_tensor_export` and `stratalloc_tensor_import`: the tensor is a `DLManagedTensor`,
// the structure before version 1 of DLPack, and not a `DLManagedTensorVersioned`.
#define STRATALLOC_TENSOR_UNVERSIONED 1

// A flag of `stratalloc_tensor_export`: the tensor is used on another stream.
#define STRATALLOC_TENSOR_ON_STREAM 2

// The result of a call. If it is not `OK`, nothing has changed, with two exceptions. A request that
// fails with `OUT_OF_MEMORY` may have released cached memory and called callbacks before. If the driver
// or the library fails in a call with several steps, completed steps stay in effect.
// `stratalloc_last_error` returns the message of the calling thread's last failure.
typedef enum {
  // Success.
  STRATALLOC_STATUS_OK = 0,
  // A null pointer, text that is not UTF-8, a number that is out of range, or another argument that
  // the call cannot use.
  STRATALLOC_STATUS_INVALID_ARGUMENT = 1,
  // The handle does not belong to an allocator, checkpoint, snapshot, block or tensor, or the object
  // was destroyed.
  STRATALLOC_STATUS_UNKNOWN_HANDLE = 2,
  // The configuration string cannot be used.
  STRATALLOC_STATUS_BAD_CONFIGURATION = 3,
  // Neither the cache nor the device can serve the request.
  STRATALLOC_STATUS_OUT_OF_MEMORY = 4,
  // No live block starts at the address.
  STRATALLOC_STATUS_UNKNOWN_ADDRESS = 5,
  // The pool is unknown, has no user, already has an open scope, or lacks the open scope that the
  // call needs. A switch also fails with this status while a pool has users or a scope is open.
  STRATALLOC_STATUS_BAD_POOL = 6,
  // The device, the strategy, a layer or this version does not support the call.
  STRATALLOC_STATUS_NOT_SUPPORTED = 7,
  // A call of the driver failed.
  STRATALLOC_STATUS_DRIVER_FAILED = 8,
  // The output does not fit in the buffer.
  STRATALLOC_STATUS_BUFFER_TOO_SMALL = 9,
  // A bug in the library, or in a function of the user that it called. The allocator may be unusable
  // after this.
  STRATALLOC_STATUS_INTERNAL = 10,
  // The tag is not awake.
  STRATALLOC_STATUS_ASLEEP = 11,
  // The tag cannot be paused or resumed now: a graph is captured, its pages are shared, or a wait is
  // not allowed here.
  STRATALLOC_STATUS_BUSY = 12,
} stratalloc_status;

// A kind of text for `stratalloc_text_write`, which also determines the meaning of the argument `of`.
typedef enum {
  // `of` is a handle: the counters as one flat JSON object of integers. The keys are those of
  // `torch.cuda.memory_stats()`, then `free_blocks`, `hits`, `misses`, `num_oom_rejections` and
  // `paused_bytes`, then those of counters that only this strategy, or one before a switch, has.
  // `backend:cudaMallocAsync` has these: `malloc_async.deferred_frees` (frees that wait for the end of
  // a capture), `malloc_async.frees_after_capture` (blocks of a graph that were freed after its capture
  // had ended), `malloc_async.own_stream_recorded` (`record_stream` calls with the block's own stream,
  // which have no effect) and `malloc_async.trims_that_helped` (requests that succeeded only after the
  // pool was trimmed).
  STRATALLOC_TEXT_STATISTICS = 0,
  // `of` is a handle: the counters as a table.
  STRATALLOC_TEXT_SUMMARY = 1,
  // `of` is a handle: every segment and block as JSON, in address order. The text can become longer
  // between two calls, because other threads allocate.
  STRATALLOC_TEXT_LAYOUT = 2,
  // `of` is a handle: the name of the current strategy.
  STRATALLOC_TEXT_NAME = 3,
  // `of` is a handle: the metadata that `stratalloc_history_set_metadata` set, or an empty text.
  STRATALLOC_TEXT_METADATA = 4,
  // `of` is a handle: a configuration string for the current settings. It is empty if all settings
  // have the default values of PyTorch's allocators.
  STRATALLOC_TEXT_CONF = 5,
  // `of` is a device ordinal: the counters of PyTorch's allocator on the device, as JSON. Opens no
  // device. The counters of an unused device are zeros.
  STRATALLOC_TEXT_TORCH_STATISTICS = 6,
  // `of` is a device ordinal: the counters of PyTorch's allocator on the device, as a table.
  STRATALLOC_TEXT_TORCH_SUMMARY = 7,
  // `of` is a device ordinal: the strategy of PyTorch's allocator on the device. Opens no device. For
  // an unused device, the configured strategy.
  STRATALLOC_TEXT_TORCH_NAME = 8,
  // `of` is 0: the counters of all allocators of this process in the OpenMetrics format, which
  // Prometheus reads. Names begin with `stratalloc_`. Labels are `device`, `backend`, `allocator` (a
  // small number) and, for metrics per kind of pool, `pool`. Walks over the free blocks, because of
  // the metric `stratalloc_fragmentation`.
  STRATALLOC_TEXT_METRICS = 9,
  // `of` is 0: the names of all keys that a configuration string can have now, separated by commas.
  STRATALLOC_TEXT_CONF_KEYS = 10,
  // `of` is a device ordinal: the line with which PyTorch's own out-of-memory errors begin with the
  // strategy of PyTorch's allocator on the device, before "CUDA out of memory". Usually empty. Opens no
  // device.
  STRATALLOC_TEXT_TORCH_OOM_LINE = 11,
} stratalloc_text;

// The blocks of a pool at one moment. An opaque handle, which is never dereferenced.
typedef struct stratalloc_checkpoint stratalloc_checkpoint;

// Segments, blocks and entries as of one moment. An opaque handle, which is never dereferenced.
typedef struct stratalloc_snapshot stratalloc_snapshot;

// Memory of the device and of the cache.
typedef struct {
  // Free bytes of the device.
  uint64_t device_free_bytes;
  // All bytes of the device.
  uint64_t device_total_bytes;
  // The largest free block in the cache, in bytes.
  uint64_t largest_cached_bytes;
  // Number of free blocks in the cache.
  uint64_t free_blocks;
} stratalloc_cache_info_t;

// A counter of host memory.
typedef struct {
  // The current value.
  int64_t current;
  // The highest value since the start or the last reset of peaks.
  int64_t peak;
  // The sum of all increases since the start or the last reset of accumulated counters.
  int64_t allocated;
  // The sum of all decreases since the start or the last reset of accumulated counters.
  int64_t freed;
} stratalloc_host_counter;

// The times of the driver's calls of one kind, in microseconds.
typedef struct {
  // The sum since the start or the last reset of accumulated counters.
  int64_t total;
  // The longest time since the start or the last reset of peaks.
  int64_t max;
  // The shortest time since the start or the last reset of peaks; 0 if there was none.
  int64_t min;
  // The number of calls since the start or the last reset of accumulated counters.
  int64_t count;
} stratalloc_host_times;

// The counters of `backend:pinned`.
typedef struct {
  // Allocations from the driver.
  int64_t driver_allocations;
  // Allocations that were released to the driver.
  int64_t driver_frees;
  // Blocks that were allocated from the driver: live, waiting or free.
  stratalloc_host_counter blocks;
  // The bytes of these blocks.
  stratalloc_host_counter reserved_bytes;
  // Live blocks.
  stratalloc_host_counter live_blocks;
  // The bytes of live blocks, after rounding.
  stratalloc_host_counter live_bytes;
  // The times of allocations from the driver.
  stratalloc_host_times allocate_time;
  // The times of releases to the driver.
  stratalloc_host_times free_time;
} stratalloc_host_statistics_t;

// The id of a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
typedef struct {
  // The number of a graph capture's pool, or 0.
  uint64_t capture;
  // The number of a user's pool, or 0.
  uint64_t user;
} stratalloc_pool;

// Called once when the library no longer needs `user`, on any thread, with no lock held. It may
// allocate and free, and must not unwind. It is not called if the call that passed `user` failed, or
// after `stratalloc_callbacks_end`.
typedef void (*stratalloc_release)(void *user);

// A source of a pool's segments, in place of the device. The functions are called on any thread, with
// no lock of the library held. They may use the allocator, but not the pool that they serve, and must
// not unwind. `user` is passed to each.
typedef struct {
  // Returns the address of `size` bytes (a multiple of 512) for `stream`, aligned to 512. Returns
  // null if there is not enough memory.
  void *(*allocate)(void *user, uint64_t size, void *stream);
  // Frees memory that `allocate` returned.
  void (*free)(void *user, void *pointer, uint64_t size, void *stream);
  // Called when the pool no longer exists. May be null.
  stratalloc_release release;
  // Passed to each function.
  void *user;
} stratalloc_segment_source;

// A filter for a scope: selects the requests that go to the scope's pool.
typedef struct {
  // Returns nonzero if a request on `stream` goes to the pool. Called at each request, on the
  // requesting thread. It must not call the allocator, and must not unwind.
  int (*accepts)(void *user, void *stream);
  // Called when the scope no longer exists. May be null.
  stratalloc_release release;
  // Passed to each function.
  void *user;
} stratalloc_stream_filter;

// Called with each block that a restore made live.
typedef void (*stratalloc_block_allocated)(void *user, void *address, uint64_t size, void *stream);

// Called with each block that a restore freed.
typedef void (*stratalloc_block_freed)(void *user, void *address, uint64_t size);

// The result of `stratalloc_tag_pause`, in bytes except for `copies` and `dropped_blocks`.
typedef struct {
  // Copied to host memory.
  uint64_t copied_bytes;
  // Number of copies.
  uint64_t copies;
  // Number of live blocks whose contents were dropped.
  uint64_t dropped_blocks;
  // Sum of their requested sizes.
  uint64_t dropped_bytes;
  // Memory that was unmapped.
  uint64_t unmapped_bytes;
  // Memory that the driver failed to unmap. The tag sleeps, but this memory stays in use.
  uint64_t still_held_bytes;
} stratalloc_paused;

// The result of `stratalloc_tag_resume`, in bytes.
typedef struct {
  // Memory that was mapped again.
  uint64_t mapped_bytes;
  // Copied back from the backup.
  uint64_t copied_bytes;
} stratalloc_resumed;

// Facts about a tag, in bytes except for the state and the counts.
typedef struct {
  // 0: awake, 1: being paused, 2: asleep, 3: being resumed.
  uint32_t state;
  // A sum of `STRATALLOC_TAG_BACKUP`, `STRATALLOC_TAG_KEEP_BACKUP`, `STRATALLOC_TAG_WAIT` and
  // `STRATALLOC_TAG_KEEP_FREE`.
  uint32_t options;
  // Live blocks.
  uint64_t live_bytes;
  // Memory held from the driver.
  uint64_t mapped_bytes;
  // Address space whose memory a pause has released.
  uint64_t asleep_bytes;
  // Blocks in the backup.
  uint64_t backed_bytes;
  // Pinned memory that is kept for backups.
  uint64_t kept_backup_bytes;
  // Number of pauses that completed.
  uint64_t pauses;
  // Number of resumes that completed.
  uint64_t resumes;
} stratalloc_tag_info_t;

// Called with an expandable segment: its stream, whether it is for small blocks, and its mapped bytes.
typedef void (*stratalloc_expandable_visitor)(void *user,
                                              void *stream,
                                              int is_small,
                                              uint64_t mapped_bytes);

// A tensor: its memory, the type of its elements, and its shape. It is contiguous, the last dimension
// innermost. The numbers for types and devices are those of DLPack.
typedef struct {
  // The address of the first element.
  uint64_t address;
  // The size in bytes.
  uint64_t size_bytes;
  // The kind of device: 1 is the host, 2 CUDA, 3 page-locked memory of the host.
  uint32_t device_type;
  // The ordinal of the device.
  uint32_t device_id;
  // The kind of number: 0 signed, 1 unsigned, 2 floating-point, 4 `bfloat16`, 5 complex, 6 boolean.
  uint32_t type_code;
  // The bits of one number.
  uint32_t type_bits;
  // The numbers in one element.
  uint32_t type_lanes;
  // Nonzero if the memory must not be written.
  uint32_t is_read_only;
  // The number of dimensions.
  uint32_t dimensions;
  // The length of each dimension. The values after the last dimension have no meaning.
  int64_t shape[64];
} stratalloc_tensor;

// Python's function `PyCapsule_IsValid`.
typedef int (*stratalloc_capsule_is_valid)(void *capsule, const char *name);

// Python's function `PyCapsule_GetPointer`.
typedef void *(*stratalloc_capsule_pointer)(void *capsule, const char *name);

// A frame of a stack.
typedef struct {
  // The name of the function, in UTF-8. Null if unknown.
  const char *function;
  // The source file, in UTF-8. Null if unknown.
  const char *file;
  // The line. 0 if unknown.
  uint32_t line;
} stratalloc_stack_frame;

// A source of call stacks that the caller implements. The functions are called on any thread, with no
// lock of the library held. They may allocate and free, and must not unwind. `user` is passed to each.
typedef struct {
  // Returns the calling thread's stack, or null. The stack is a pointer that only the source
  // interprets. The library keeps it until it calls `release`.
  void *(*gather)(void *user);
  // Releases a stack that `gather` returned. Called exactly once for each, unless
  // `stratalloc_callbacks_end` has stopped the calls.
  void (*release)(void *user, void *stack);
  // Stores at most `room` frames of a stack, innermost first, and returns their number. The texts in
  // the frames must stay valid until the calling thread's next call of `frames`.
  size_t (*frames)(void *user, void *stack, stratalloc_stack_frame *frames, size_t room);
  // Must stay valid until the allocator was destroyed and all its stacks were released.
  void *user;
} stratalloc_stack_source;

// Returns the calling thread's metadata, in UTF-8 with a terminating zero, or null if it has none. The
// text must stay valid until the same thread next runs code outside the library.
typedef const char *(*stratalloc_thread_metadata)(void);

// Receives the next bytes of a snapshot. Any result other than 0 aborts the snapshot.
typedef int (*stratalloc_snapshot_writer)(void *user, const void *bytes, size_t size);

// A segment. Its stack is valid as long as the snapshot.
typedef struct {
  // The start address.
  uint64_t address;
  // The size in bytes.
  uint64_t total_bytes;
  // The bytes that callers requested for the blocks of `active_bytes`.
  uint64_t requested_bytes;
  // The bytes of live blocks.
  uint64_t allocated_bytes;
  // The bytes of live blocks, and of freed blocks that wait for other streams.
  uint64_t active_bytes;
  // The stream whose requests the segment serves.
  void *stream;
  // The pool of the segment.
  stratalloc_pool pool;
  // 1 if the segment is for large blocks.
  int is_large;
  // 1 if the segment is expandable.
  int is_expandable;
  // Segments are numbered in the order in which they were allocated from the driver. An expandable
  // segment has one number for all its pages. If the allocator assigns no numbers, the order is that
  // of the addresses.
  uint64_t number;
  // The stack of the request that allocated the segment, as its source returned it, or null.
  void *stack;
} stratalloc_segment;

// A block of a segment. Its stack is valid as long as the snapshot.
typedef struct {
  // The start address.
  uint64_t address;
  // The size in bytes.
  uint64_t size_bytes;
  // The bytes that the block's last request asked for.
  uint64_t requested_bytes;
  // 0 live, 1 freed but still used by other streams, 2 free.
  uint32_t state;
  // The stack of the block's request, as its source returned it, or null.
  void *stack;
} stratalloc_block;

// An entry of the history. Its pointers are valid during the call that receives it.
typedef struct {
  // The action, with the numbers of PyTorch's `TraceEntry::Action`: 0 block allocated, 1 free
  // requested, 2 free completed, 3 segment allocated, 4 segment freed, 5 pages mapped, 6 pages
  // unmapped, 7 snapshot taken (the size is the active bytes), 8 request failed, 9 live block
  // annotated (never recorded, only in the result of `stratalloc_torch_describe_block`). PyTorch has
  // no tags: 16 memory released by a pause, 17 memory mapped by a resume.
  uint32_t action;
  // The address. For a failed request, the free bytes of the device.
  uint64_t address;
  // The size in bytes.
  uint64_t size_bytes;
  // The stream of the block.
  void *stream;
  // The pool of the block.
  stratalloc_pool pool;
  // The time, in microseconds since 1970.
  int64_t time_us;
  // The compiled region, in UTF-8, or null.
  const char *compile_context;
  // The metadata, in UTF-8, or null. See `stratalloc_history_set_metadata` and
  // `stratalloc_history_set_thread_metadata`.
  const char *user_metadata;
  // The stack, as its source returned it, or null.
  void *stack;
} stratalloc_entry;

// Functions that receive the contents of a snapshot. Each may be null, may allocate and free, and must
// not unwind.
typedef struct {
  // Called with every segment, in address order.
  void (*segment)(void *user, const stratalloc_segment *segment);
  // Called with every block of a segment, after the segment and in address order.
  void (*block)(void *user, const stratalloc_block *block);
  // Called with every entry of the snapshot's pools, after the segments and oldest first.
  void (*entry)(void *user, const stratalloc_entry *entry);
  // Passed to each function.
  void *user;
} stratalloc_snapshot_visitor;

// Called with an entry of the history, which is valid during the call. The function may allocate, free
// and take snapshots. It must not unwind, and must not wait for a request of another thread.
typedef void (*stratalloc_tracker)(void *user, const stratalloc_entry *entry);

// Called after a failed request. Receives the device, the requested bytes, and the total and the free
// bytes of the device (0 if unknown). It may allocate and free, and must not unwind.
typedef void (*stratalloc_oom_observer)(void *user,
                                        int device,
                                        uint64_t requested_bytes,
                                        uint64_t device_total_bytes,
                                        uint64_t device_free_bytes);

// Called for a request that the setting `throw_on_cudamalloc_oom` rejected. Receives the device, the
// size of the segment that the request needed, the reserved bytes of the allocator, and the total bytes
// of the device (0 if unknown). It may allocate and free, and must not unwind.
typedef void (*stratalloc_oom_rejection_observer)(void *user,
                                                  int device,
                                                  uint64_t segment_bytes,
                                                  uint64_t reserved_bytes,
                                                  uint64_t device_total_bytes);

// Called before memory is acquired from the driver, so that the function can free memory instead.
// Returns nonzero if it freed any. It may allocate and free, and must not unwind.
typedef int (*stratalloc_free_memory_callback)(void *user);

// Called with a stack: the pointer that its source returned.
typedef void (*stratalloc_stack_visitor)(void *user, void *stack);

// The current settings, as far as PyTorch's snapshots list them.
typedef struct {
  // The setting `garbage_collection_threshold`, a fraction in (0, 1). 0 if it is not set.
  double garbage_collection_threshold;
  // Blocks of this size or more are never split. `UINT64_MAX` means no limit.
  uint64_t max_split_bytes;
  // The divisions of each power-of-two interval, starting at 1 MiB. 0 means none.
  uint64_t roundup_power2_divisions[16];
  // 1 if the setting `expandable_segments` is on, else 0.
  int expandable_segments;
  // 1 if the setting `release_lock_on_cudamalloc` is on, else 0.
  int release_lock_on_malloc;
  // 1 if the setting `graph_capture_record_stream_reuse` is on, else 0.
  int graph_capture_record_stream_reuse;
} stratalloc_torch_settings_t;

// The functions of CuPy and Python that `stratalloc_cupy_malloc` calls.
typedef struct {
  // CuPy's `get_stream_ptr`: returns the calling thread's current stream on a device, as a number. Returns
  // -1 after setting Python's error indicator if it fails.
  void *(*stream_of)(int device);
  // Python's `PyErr_SetString`.
  void (*set_error)(void *kind, const char *message);
  // The exception type for a request that finds no memory.
  void *out_of_memory;
  // The exception type for other failures.
  void *failure;
} stratalloc_cupy;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Stops the calls of all functions that were added with `release`, including those of stack sources.
// After that, `release` itself is not called either. Waits at most `wait_ms` milliseconds for running
// calls, and stores in `inside` the number of calls that are still running then. An interpreter calls
// this before it exits. It must not be called from a function that it stops. Functions that are added
// later are not stopped.
//
// # Safety
//
// `inside` may be written.
stratalloc_status stratalloc_callbacks_end(const void *release,
                                           uint64_t wait_ms,
                                           uint64_t *inside);

// Creates an allocator and stores its handle, which is never 0. `conf` is a configuration string. If
// it is null, the environment is read (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (a
// simulated H200 without memory behind its addresses), `host` (memory of this machine) or `cuda:N`. A
// handle is valid only in the process that created it: the child of a fork must create its own.
//
// Some configurations are valid but probably a mistake, such as a repeated key, or two environment
// variables with different configurations. Each causes one warning per process on the standard error
// stream. This function writes such warnings, and so do `stratalloc_set_conf`, `stratalloc_switch` and
// the functions for PyTorch.
//
// # Safety
//
// `conf` and `device` end with a zero byte if they are not null; `handle` may be written.
stratalloc_status stratalloc_create(const char *conf,
                                    const char *device,
                                    uint64_t *handle);

// Checks that a configuration string parses and that its backend is known. Creates no allocator, so it
// does not find errors that depend on a device.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_check_conf(const char *conf);

// Destroys an allocator and releases all its memory to the device, including live blocks. Blocks of
// `backend:cpu` are the exception: they stay valid, and any other `backend:cpu` allocator of the
// process can free them. If calls on other threads are still running, the last of them releases the
// memory. Later calls with the handle fail. Does nothing in a forked child, if the allocator is of the
// parent: only the parent can use it and what was made from it.
stratalloc_status stratalloc_destroy(uint64_t handle);

// Allocates a block of at least `bytes` and stores its address. Work submitted to `stream` from now on
// may use the block. For zero bytes, stores null and succeeds. Does not wait when a cached block fits,
// except under the layer `guard`.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_allocate(uint64_t handle,
                                      uint64_t bytes,
                                      void *stream,
                                      void **pointer);

// Frees the block that starts at `pointer`. Null is ignored. Work on the block's own stream may still
// be running. Work on other streams must have been announced with `stratalloc_record_stream`.
//
// Does not wait for running work, with these exceptions. If an announced stream was destroyed (with
// `backend:cudaMallocAsync` also the block's own stream), the call waits for the device. If the block
// is the last one of an allocator that a switch has replaced, the memory of that allocator is released,
// which may wait. The layer `guard` waits for the block's streams before it checks the bytes around the
// block. If the block was allocated with the cache off, the driver waits for the device. An allocator
// that calls functions of the user may wait in them.
stratalloc_status stratalloc_free(uint64_t handle,
                                  void *pointer);

// Announces that work on `stream` uses the block. When the block is freed, it is not reused before
// that work has finished. Never waits.
stratalloc_status stratalloc_record_stream(uint64_t handle, void *pointer, void *stream);

// Waits until the streams that use freed blocks have finished with them. Then releases the segments
// without live blocks. `backend:native` keeps those of pools with users, and releases nothing while a
// graph is captured.
stratalloc_status stratalloc_empty_cache(uint64_t handle);

// Limits the allocator to a fraction of the device's memory, from 0 to 1. 1 removes the limit. With
// `backend:cpu` and `backend:pinned` it is a fraction of the memory of this machine or its container. The
// limit is rounded to the nearest byte and applies to reserved bytes. With `backend:cudaMallocAsync` it
// applies to live bytes, as in PyTorch, and the driver's pool may reserve more. Setting a limit releases no
// memory.
stratalloc_status stratalloc_set_memory_fraction(uint64_t handle,
                                                 double fraction);

// Applies a configuration string on top of the current settings. Blocks stay valid. If the string
// changes a key that is read only when an allocator is built (such as the backend or the layers), the
// call switches as `stratalloc_switch` does.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_conf(uint64_t handle,
                                      const char *conf);

// Switches the handle to an allocator with this configuration. New requests go to that allocator.
// Existing blocks stay valid and are freed through the same handle. The string is complete: a key that
// it omits has its default value. A memory limit stays unless the string sets another one.
//
// If the call fails, nothing has changed. The call fails while a pool has users or a scope is open. May
// wait for the device, because memory may be released.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_switch(uint64_t handle,
                                    const char *conf);

// Writes the message of the calling thread's last failed call, cut to `size` bytes including the
// terminating zero. Returns the number of bytes that the whole message needs. The message is empty if
// no call of the thread has failed. A successful call does not change it. Returns 0 for a null buffer
// with a nonzero size.
//
// # Safety
//
// `size` bytes from `buffer` may be written, unless it is null.
size_t stratalloc_last_error(char *buffer,
                             size_t size);

// Returns the status of the calling thread's last failed call. `STRATALLOC_STATUS_OK` if no call of the
// thread has failed. A successful call does not change it. For functions that return a pointer.
stratalloc_status stratalloc_last_status(void);

// Returns the version of the library, as `"1.2.3"`. The text is never freed.
const char *stratalloc_version(void);

// Sets every peak to its current value.
stratalloc_status stratalloc_reset_peaks(uint64_t handle);

// Sets all accumulated counters (allocated, freed, numbers of events) to zero.
stratalloc_status stratalloc_reset_accumulated(uint64_t handle);

// Stores the fraction of the memory that the allocator may reserve. Stores 1 if there is no limit. The
// memory is the device's or, for `backend:cpu` and `backend:pinned`, that of this machine or its container.
// A limit is a whole number of bytes, so the last digits may differ from the fraction that was set. Setting
// the stored fraction does not change the limit.
//
// # Safety
//
// `fraction` may be written.
stratalloc_status stratalloc_memory_fraction(uint64_t handle,
                                             double *fraction);

// Stores the free and the total bytes of the device, as its driver reports them now. Cached memory
// does not count as free. A limit does not affect the numbers.
//
// # Safety
//
// `free_bytes` and `total_bytes` may be written.
stratalloc_status stratalloc_memory_info(uint64_t handle,
                                         uint64_t *free_bytes,
                                         uint64_t *total_bytes);

// Stores memory figures of the device and the cache. Walks over the free blocks.
//
// # Safety
//
// `info` may be written.
stratalloc_status stratalloc_cache_info(uint64_t handle, stratalloc_cache_info_t *info);

// Stores the start and the size in bytes of the segment that contains `pointer`. For an expandable
// segment, stores those of the mapped range that contains it. For a block that was allocated with the
// cache off, stores those of the block. Walks over all segments.
//
// # Safety
//
// `base` and `size` may be written.
stratalloc_status stratalloc_base_allocation(uint64_t handle,
                                             void *pointer,
                                             void **base,
                                             uint64_t *size);

// Stores the allocated and the reserved bytes, and the peak of each. Much cheaper than the text
// `STRATALLOC_TEXT_STATISTICS`. With `backend:native` and no layers, it does not wait while another
// thread calls the driver.
//
// # Safety
//
// All four pointers may be written.
stratalloc_status stratalloc_usage(uint64_t handle,
                                   uint64_t *allocated,
                                   uint64_t *allocated_peak,
                                   uint64_t *reserved,
                                   uint64_t *reserved_peak);

// Stores the number of live blocks. As cheap as `stratalloc_usage`.
//
// # Safety
//
// `count` may be written.
stratalloc_status stratalloc_block_count(uint64_t handle, uint64_t *count);

// Stores the external fragmentation of the allocator's segments, from 0 to 1: 1 - largest free block /
// sum of all free blocks. Adjacent free blocks count as one. Stores 0 if nothing is free. Always
// stores 0 with `backend:cudaMallocAsync`, because the driver does not report its free ranges. Walks
// over the free blocks.
//
// # Safety
//
// `fragmentation` may be written.
stratalloc_status stratalloc_fragmentation(uint64_t handle,
                                           double *fragmentation);

// Stores the number of CUDA devices. Stores 0 without a CUDA driver.
//
// # Safety
//
// `count` may be written.
stratalloc_status stratalloc_device_count(int *count);

// Removes the live block of `backend:cpu` that starts at `pointer` from the allocator. The caller then
// frees the block's memory: with `free` if the block is below 1 MiB, otherwise with `munmap`. Call this
// function first and free the memory after it: once the memory is freed, the system may reuse the
// address. Not supported by other backends, or if there are layers.
stratalloc_status stratalloc_record_free(uint64_t handle,
                                         void *pointer);

// Turns the cache off if `on` is 0, otherwise on. With the cache off, each request is one call of the
// driver, and a free releases the memory at once and waits for the device. This is for tools that
// observe every allocation. Blocks that are allocated with the cache off appear in no counter, history,
// pool or layer, and no limit applies to them. Existing blocks are not affected. Only `backend:native`
// supports this. After a switch to another backend, the cache of that backend is used.
//
// If the variable `PYTORCH_NO_CUDA_MEMORY_CACHING` (or `PYTORCH_NO_HIP_MEMORY_CACHING`) is set to any
// value, the cache is initially off in allocators that get their configuration from the environment.
stratalloc_status stratalloc_set_caching(uint64_t handle,
                                         int on);

// Stores 1 if the cache is on, 0 if it is off.
//
// # Safety
//
// `on` may be written.
stratalloc_status stratalloc_caching(uint64_t handle, int *on);

// Stores the counters of an allocator of page-locked host memory. Only `backend:pinned` has them.
//
// # Safety
//
// `statistics` may be written.
stratalloc_status stratalloc_host_statistics(uint64_t handle,
                                             stratalloc_host_statistics_t *statistics);

// Writes a text about `of`. `kind` is a value of `stratalloc_text`. `needed`, unless null, is set to
// the number of bytes that the text needs, including the terminating zero. If `size` is 0, only
// `needed` is stored.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_text_write(uint64_t of,
                                        uint32_t kind,
                                        char *buffer,
                                        size_t size,
                                        size_t *needed);

// Creates a pool with one user, the caller, and stores its id. `options` is a sum of
// `STRATALLOC_POOL_USE_ON_OOM` and `STRATALLOC_POOL_NO_SPLIT`, or 0.
//
// # Safety
//
// `pool` may be written.
stratalloc_status stratalloc_pool_create(uint64_t handle, uint32_t options, stratalloc_pool *pool);

// Creates a pool with an id that the caller chooses and one user. If the pool exists, adds a user to
// it. `options` and `source` apply only if the pool is created. `source` allocates the pool's
// segments; null selects the device. If the pool existed and the call succeeds, the source's `user` is
// released at once.
//
// # Safety
//
// `source` is null, or may be read and meets the requirements of `stratalloc_segment_source`.
stratalloc_status stratalloc_pool_ensure(uint64_t handle,
                                         stratalloc_pool pool,
                                         uint32_t options,
                                         const stratalloc_segment_source *source);

// Changes the options of a pool that has users. `STRATALLOC_POOL_NO_SPLIT` can only be set before the
// pool has served a request.
stratalloc_status stratalloc_pool_set_options(uint64_t handle,
                                              stratalloc_pool pool,
                                              uint32_t options);

// Stores the number of a pool's users. Stores 0 if the pool is unknown.
//
// # Safety
//
// `users` may be written.
stratalloc_status stratalloc_pool_users(uint64_t handle, stratalloc_pool pool, uint32_t *users);

// Writes the addresses of the pool's live blocks in ascending order, and stores their number in
// `count`. If they do not fit in `room`, writes no address. If `room` is 0, stores only the number.
//
// # Safety
//
// `room` pointers from `addresses` may be written, unless it is null; `count` may be written.
stratalloc_status stratalloc_pool_live(uint64_t handle,
                                       stratalloc_pool pool,
                                       void **addresses,
                                       size_t room,
                                       size_t *count);

// Releases the free memory of a pool without users to the device. First waits for the streams that
// still use freed blocks of the pool. Does nothing for a pool with users.
stratalloc_status stratalloc_pool_empty(uint64_t handle, stratalloc_pool pool);

// Adds a user to a pool.
stratalloc_status stratalloc_pool_retain(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. Without users, the pool serves no more requests, and its free memory is
// released to the device as far as the driver allows. Memory of live blocks is released after they are
// freed, the next time the allocator releases memory. Does nothing in a forked child, if the allocator is of
// the parent.
stratalloc_status stratalloc_pool_release(uint64_t handle,
                                          stratalloc_pool pool);

// Routes the requests of the calling thread to a pool. The new scope takes precedence over all scopes
// that are already open. A pool has at most one open scope, which counts as a user.
stratalloc_status stratalloc_pool_scope_open_thread(uint64_t handle,
                                                    stratalloc_pool pool);

// Routes the requests of all threads on `stream` to a pool.
stratalloc_status stratalloc_pool_scope_open_stream(uint64_t handle,
                                                    stratalloc_pool pool,
                                                    void *stream);

// Routes the requests that a filter accepts to a pool.
//
// # Safety
//
// `filter` may be read and meets the requirements of `stratalloc_stream_filter`.
stratalloc_status stratalloc_pool_scope_open_filter(uint64_t handle,
                                                    stratalloc_pool pool,
                                                    const stratalloc_stream_filter *filter);

// Closes the scope of a pool. May be called on any thread. If the driver fails, the scope is closed
// all the same and its user removed. Does nothing in a forked child, if the allocator is of the parent.
stratalloc_status stratalloc_pool_scope_close(uint64_t handle,
                                              stratalloc_pool pool);

// Takes a checkpoint of a pool's current blocks. After that, free memory of the pool is not released
// while the pool has users.
//
// # Safety
//
// `checkpoint` may be written.
stratalloc_status stratalloc_checkpoint_take(uint64_t handle,
                                             stratalloc_pool pool,
                                             stratalloc_checkpoint **checkpoint);

// Restores a pool to a checkpoint: frees all live blocks, then makes the checkpoint's blocks live at
// their addresses. Memory that the pool has acquired since the checkpoint stays in the pool, free. Then
// calls `freed` with each block that was freed, and `allocated` with each block that was made live.
// Either function may be null. They may allocate and free, and must not unwind.
//
// # Safety
//
// `allocated` and `freed` may be called with `user` during this call.
stratalloc_status stratalloc_checkpoint_restore(uint64_t handle,
                                                stratalloc_checkpoint *checkpoint,
                                                stratalloc_block_allocated allocated,
                                                stratalloc_block_freed freed,
                                                void *user);

// Drops a checkpoint. The pool stays as it is.
stratalloc_status stratalloc_checkpoint_drop(stratalloc_checkpoint *checkpoint);

// Creates a tag with one user, the caller, and stores the id of its pool. All functions for pools take
// this id. `options` is a sum of `STRATALLOC_TAG_BACKUP`, `STRATALLOC_TAG_KEEP_BACKUP`,
// `STRATALLOC_TAG_WAIT` and `STRATALLOC_TAG_KEEP_FREE`, or 0. `stratalloc_pool_release` removes the user.
//
// # Safety
//
// `name` is text that ends with a zero; `pool` may be written.
stratalloc_status stratalloc_tag_create(uint64_t handle,
                                        const char *name,
                                        uint32_t options,
                                        stratalloc_pool *pool);

// Makes a pool that has served no request a tag. Its other options are reset.
//
// # Safety
//
// `name` is text that ends with a zero.
stratalloc_status stratalloc_tag_of_pool(uint64_t handle,
                                         stratalloc_pool pool,
                                         const char *name,
                                         uint32_t options);

// Sets the directory of files in which the next pauses of a tag save contents, in place of host memory.
// Null: host memory. The directory must exist at the pause, and the files are removed by the resume.
//
// # Safety
//
// `directory` is null or text that ends with a zero.
stratalloc_status stratalloc_tag_set_directory(uint64_t handle,
                                               stratalloc_pool pool,
                                               const char *directory);

// Stores the id of the pool of the tag with this name. Fails with `BAD_POOL` if there is none.
//
// # Safety
//
// `name` is text that ends with a zero; `pool` may be written.
stratalloc_status stratalloc_tag_find(uint64_t handle, const char *name, stratalloc_pool *pool);

// Pauses a tag: waits for the work that uses it, saves or drops the contents of its live blocks, and
// releases its memory. The addresses stay reserved. Waits for the streams of the pool, for those
// recorded for its live blocks, and for `count` further ones. `options` is a sum of
// `STRATALLOC_PAUSE_BACKUP` or `STRATALLOC_PAUSE_DROP` and `STRATALLOC_PAUSE_SYNCHRONIZED`, or 0. If
// the call fails, the tag is awake with all its contents. Does nothing if the tag is asleep.
//
// # Safety
//
// `count` streams may be read from `streams`, unless `count` is 0; `paused` may be written.
stratalloc_status stratalloc_tag_pause(uint64_t handle,
                                       stratalloc_pool pool,
                                       uint32_t options,
                                       void *const *streams,
                                       size_t count,
                                       stratalloc_paused *paused);

// Resumes a tag: maps memory at its addresses and copies its live blocks back. If memory is short,
// releases as much cached memory as is missing. If the call fails, the tag is asleep with its backup.
// Does nothing if the tag is awake.
//
// # Safety
//
// `resumed` may be written.
stratalloc_status stratalloc_tag_resume(uint64_t handle,
                                        stratalloc_pool pool,
                                        stratalloc_resumed *resumed);

// Stores facts about a tag. Does not wait for the device.
//
// # Safety
//
// `info` may be written.
stratalloc_status stratalloc_tag_info(uint64_t handle,
                                      stratalloc_pool pool,
                                      stratalloc_tag_info_t *info);

// Copies `size` bytes at `pointer`, inside one live block of a paused tag, from the backup.
//
// # Safety
//
// `size` bytes from `into` may be written.
stratalloc_status stratalloc_tag_read_backup(uint64_t handle,
                                             void *pointer,
                                             void *into,
                                             size_t size);

// Writes the bytes with which another process can open the block that starts at `pointer`. They need no
// special channel, but should be sent only to that process, because they may contain a secret. They have
// no terminating zero. `needed`, unless null, is set to their number. `offset`, unless null, is set to the
// distance of `pointer` from the address that opening the block returns. It is always 0, because a block
// is opened at its start.
//
// If `size` is 0, writes no bytes. Sharing a block twice returns equal bytes. Does not wait for work.
//
// # Safety
//
// `size` bytes from `buffer`, `needed` and `offset` may be written, each unless it is null.
stratalloc_status stratalloc_share(uint64_t handle,
                                   void *pointer,
                                   void *buffer,
                                   size_t size,
                                   size_t *needed,
                                   uint64_t *offset);

// Maps a block of another process into this one, from the bytes that `stratalloc_share` wrote there.
// Stores a number that identifies the block, its address in this process and its size. May wait for the
// driver, and for some seconds for the other process.
//
// # Safety
//
// `size` bytes from `bytes` may be read; `shared`, `address` and `size_bytes` may be written.
stratalloc_status stratalloc_open_shared(uint64_t handle,
                                         const void *bytes,
                                         size_t size,
                                         uint64_t *shared,
                                         void **address,
                                         uint64_t *size_bytes);

// Closes a shared block. Its pages are unmapped when no other open block of this process uses them.
// Unmapping waits for the device.
stratalloc_status stratalloc_close_shared(uint64_t shared);

// Gives `device` access to the allocator's memory, present and future. For the other direction, call
// this for the allocator of `device`. A repeated call is no error. Never waits for work.
stratalloc_status stratalloc_enable_peer(uint64_t handle,
                                         int device);

// Calls `visit` with every expandable segment, in address order. `visit` may allocate and free, and
// must not unwind.
//
// # Safety
//
// `visit` may be called with `user` during this call.
stratalloc_status stratalloc_expandable_segments(uint64_t handle,
                                                 stratalloc_expandable_visitor visit,
                                                 void *user);

// Assigns a stream to a class that the setting `expandable_segments_reserve_by_class` defines. A null
// `class_name` removes the stream from its class. Applies to segments that are reserved later.
//
// # Safety
//
// `class_name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_reserve_class(uint64_t handle,
                                               void *stream,
                                               const char *class_name);

// Allocates a block of at least `bytes` for tensors, and stores its number in `block`. The block is freed
// on `stream` when the number has been released and all tensors of it were deleted. Until then it also
// keeps its allocator, if that is destroyed. It must not be freed by address. Comes from the cache,
// even if the cache is off.
//
// Stores the block in `tensor` as a tensor of bytes with one dimension. The call fails with
// `NOT_SUPPORTED` on the device `sim`, which has no memory. May wait as `stratalloc_allocate` does, and on
// `host` waits for `stream`.
//
// # Safety
//
// `block` and `tensor` may be written.
stratalloc_status stratalloc_owned_allocate(uint64_t handle,
                                            uint64_t bytes,
                                            void *stream,
                                            uint64_t *block,
                                            stratalloc_tensor *tensor);

// Releases the number of an owned block. The block is freed now, or when the last tensor of it is deleted.
// Waits only as `stratalloc_free` does.
stratalloc_status stratalloc_owned_release(uint64_t block);

// Creates a tensor in an owned block, for another library, and stores a pointer to a DLPack structure in
// `managed`. Its deleter may be called on any thread. Type and shape are those of `tensor`, whose other
// fields are ignored. The tensor starts where the block starts, and must fit.
//
// With the flag `STRATALLOC_TENSOR_ON_STREAM`, work submitted to `stream` from now on may use the tensor:
// that stream waits for the block's stream, and the free of the block waits for it. Without the flag,
// `stream` is ignored, and the caller orders the streams. Does not wait. But on `host` memory is used
// without streams, so there the call waits for the block's stream.
//
// # Safety
//
// `tensor` may be read; `managed` may be written.
stratalloc_status stratalloc_tensor_export(uint64_t block,
                                           const stratalloc_tensor *tensor,
                                           uint32_t flags,
                                           void *stream,
                                           void **managed);

// Takes ownership of a tensor of another library, and stores a number that identifies it and its
// description. The tensor must be contiguous. Its deleter is called by `stratalloc_tensor_release`. If the
// call fails, it has called the deleter, except when `imported` or `tensor` is null or a flag is unknown.
//
// # Safety
//
// `managed` is null, or a tensor in DLPack's structure that `flags` names and that belongs to the caller.
// Its deleter may be called on any thread; `imported` and `tensor` may be written.
stratalloc_status stratalloc_tensor_import(void *managed,
                                           uint32_t flags,
                                           uint64_t *imported,
                                           stratalloc_tensor *tensor);

// Calls the deleter of an imported tensor. Waits only if the deleter waits.
stratalloc_status stratalloc_tensor_release(uint64_t imported);

// Stores a destructor for Python's capsules with a tensor. If the capsule's name is still `dltensor` or
// `dltensor_versioned` at its end, no library has taken the tensor, and the destructor calls the deleter.
// It is a function of this library, so it also works while the interpreter exits. The library does not
// link to Python: the caller passes Python's functions, the same ones at every call.
//
// # Safety
//
// The functions are those of Python's interface; `destructor` may be written.
stratalloc_status stratalloc_tensor_capsule_destructor(stratalloc_capsule_is_valid is_valid,
                                                       stratalloc_capsule_pointer pointer,
                                                       void **destructor);

// Starts recording the allocator's actions, or changes the options of a running recording. `stacks`
// selects the stacks that are gathered: 0 none, 1 those of live blocks, 2 also those of entries that
// allocate memory, 3 also those of entries that free memory. The newest `entries_max` entries are
// kept. `skip` is a list of actions that are not recorded, with PyTorch's names and separated by
// commas. Null skips none. If `clear` is not 0, earlier entries are dropped.
//
// # Safety
//
// `skip` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_start(uint64_t handle,
                                           uint32_t stacks,
                                           uint64_t entries_max,
                                           const char *skip,
                                           int clear);

// Stops recording and drops all entries.
stratalloc_status stratalloc_history_stop(uint64_t handle);

// Stores 1 if recording is on, 0 if it is off.
//
// # Safety
//
// `on` may be written.
stratalloc_status stratalloc_history_is_on(uint64_t handle, int *on);

// Drops all entries. Recording continues, and live blocks keep their stacks.
stratalloc_status stratalloc_history_clear(uint64_t handle);

// Sets the source of stacks. Null removes it.
//
// # Safety
//
// `source` is null, or may be read and meets the requirements of `stratalloc_stack_source`.
stratalloc_status stratalloc_history_set_stack_source(uint64_t handle,
                                                      const stratalloc_stack_source *source);

// Removes the source of stacks before it becomes invalid, for example before an interpreter exits.
// Drops the recorded entries. Under `layers:[track]`, live blocks keep the frames of their stacks for
// the leak report at the end of the process. Without that layer, recording stops.
stratalloc_status stratalloc_history_drop_stack_source(uint64_t handle);

// Sets the metadata of entries that are recorded from now on. Null removes it.
//
// # Safety
//
// `metadata` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_set_metadata(uint64_t handle, const char *metadata);

// Sets a function that returns the metadata of entries. If it returns null, the metadata of
// `stratalloc_history_set_metadata` is used. Null removes the function. It is called on the thread of
// each recorded request and free. It must not allocate from the allocator, and must not unwind.
//
// # Safety
//
// `source` may be called on any thread until it was replaced and all calls of it have returned.
stratalloc_status stratalloc_history_set_thread_metadata(uint64_t handle,
                                                         stratalloc_thread_metadata source);

// Pushes a name for the calling thread. Until it is popped, the stacks of entries have it as their
// innermost frame. Each name must be removed by a `stratalloc_context_pop` on the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_context_push(const char *name);

// Removes the calling thread's newest name.
stratalloc_status stratalloc_context_pop(void);

// Records `pairs` keys and values with the current time, if recording is on. Snapshots list the newest
// 65,536 annotations under `external_annotations`. PyTorch's annotations have two keys: `name`, and
// `stage`, whose value is `START` or `END`.
//
// # Safety
//
// `words` points to `2 * pairs` texts, each key followed by its value; each text ends with a zero byte.
stratalloc_status stratalloc_annotate(uint64_t handle,
                                      const char *const *words,
                                      size_t pairs);

// Pushes the name of the compiled region that the calling thread runs. Entries list the name in the
// field `compile_context`. Each name must be removed by a `stratalloc_compile_context_pop` on the same
// thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_compile_context_push(const char *name);

// Removes the calling thread's newest compiled region.
stratalloc_status stratalloc_compile_context_pop(void);

// Writes a file for PyTorch's viewers, with all segments, blocks and the history as of one moment. The
// file is a pickle, or JSON if its name ends in `.json` or `.json.gz`. It is compressed if the name
// ends in `.gz`. If the call fails, the file keeps its old content.
//
// # Safety
//
// `path` ends with a zero byte if it is not null.
stratalloc_status stratalloc_snapshot_save(uint64_t handle,
                                           const char *path);

// Calls `write` with `user` and the content that `stratalloc_snapshot_save` writes to a file, in
// pieces. The content is a pickle if `format` is 0, and JSON if it is 1.
//
// # Safety
//
// `write` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_snapshot_write(uint64_t handle,
                                            uint32_t format,
                                            stratalloc_snapshot_writer write,
                                            void *user);

// Takes a snapshot of the segments and blocks of one pool, or of all pools if `pool` is null, as of
// one moment. Includes the history unless `with_entries` is 0. Does not wait for work of the device.
//
// # Safety
//
// `pool` may be read if it is not null; `snapshot` may be written.
stratalloc_status stratalloc_snapshot_take(uint64_t handle,
                                           const stratalloc_pool *pool,
                                           int with_entries,
                                           stratalloc_snapshot **snapshot);

// Passes a snapshot's contents to the functions of `visitor`.
//
// # Safety
//
// `visitor` may be read, and its functions called with its `user` during this call.
stratalloc_status stratalloc_snapshot_visit(stratalloc_snapshot *snapshot,
                                            const stratalloc_snapshot_visitor *visitor);

// Drops a snapshot. Releases the stacks that nothing else refers to.
stratalloc_status stratalloc_snapshot_drop(stratalloc_snapshot *snapshot);

// Adds a tracker: a function that is called with every entry of the history while recording is on.
// Stores a number with which the tracker can be removed. The tracker stays after a switch. No lock of
// the library is held during a call.
//
// Entries for device memory come in an order that allows the tracker to register the memory with a
// network library. `segment_alloc` or `segment_map` comes after the driver has allocated the memory
// and before a request is served from it. `segment_free` or `segment_unmap` comes when no request can
// be served from the memory any more, and before the driver frees it. If the driver fails to free it,
// another `segment_alloc` or `segment_map` follows.
//
// Blocks that a tracker itself allocates or frees are recorded, but no tracker is called for them. If a
// request of a tracker acquires device memory, the entries for that memory follow after the tracker has
// returned. While a tracker runs, its thread releases no memory to the device, so
// `stratalloc_empty_cache` has no effect there. `stratalloc_destroy` calls trackers for all memory that
// it releases; the handle is invalid by then.
//
// # Safety
//
// The function may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_tracker_add(uint64_t handle,
                                         stratalloc_tracker tracker,
                                         stratalloc_release release,
                                         void *user,
                                         uint64_t *id);

// Removes a tracker. A call of the tracker on another thread may still be running. `user` is released
// after that call has returned.
stratalloc_status stratalloc_tracker_remove(uint64_t handle,
                                            uint64_t id);

// Adds an observer that is called for every failed request, and stores a number with which it can be
// removed. It stays after a switch. Failed requests of an observer itself call no observer.
//
// # Safety
//
// The function may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_oom_observer_add(uint64_t handle,
                                              stratalloc_oom_observer observer,
                                              stratalloc_release release,
                                              void *user,
                                              uint64_t *id);

// Adds an observer that is called for every request that the setting `throw_on_cudamalloc_oom` rejects,
// and stores a number with which it can be removed. It stays after a switch. Observers of failed
// requests are not called for these requests.
//
// # Safety
//
// The observer may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_oom_rejection_observer_add(uint64_t handle,
                                                        stratalloc_oom_rejection_observer observer,
                                                        stratalloc_release release,
                                                        void *user,
                                                        uint64_t *id);

// Removes an observer or a free-memory callback, as `stratalloc_tracker_remove` does.
stratalloc_status stratalloc_hook_remove(uint64_t handle, uint64_t id);

// Adds a callback that is called whenever memory is about to be acquired from the device, so that the
// callback can free memory instead. Stores a number with which it can be removed. It stays after a
// switch. Requests of a callback itself call no callback.
//
// # Safety
//
// The callback may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_free_memory_callback_add(uint64_t handle,
                                                      stratalloc_free_memory_callback callback,
                                                      stratalloc_release release,
                                                      void *user,
                                                      uint64_t *id);

// Allocates a block for PyTorch. Returns null for zero bytes, without an error. Also returns null, and
// sets the thread's last error, when the call fails: not enough memory, no such device, or an invalid
// configuration in the environment, for example. For tests, the variable `STRATALLOC_DEVICE` may be
// `sim` or `host` instead of `cuda`.
void *stratalloc_torch_malloc(size_t size,
                              int device,
                              void *stream);

// Frees a block for PyTorch. Ignores null. In the child of a fork, ignores blocks on a device for which
// the child has created no allocator. Ignores `size` and `stream`, because the allocator has stored
// them.
void stratalloc_torch_free(void *pointer,
                           size_t size,
                           int device,
                           void *stream);

// `set_init_fn`: reads the environment, so that an invalid configuration is reported immediately.
void stratalloc_torch_init(int device_count);

// `set_reset_fn`: empties the caches of all devices. Waits for the devices.
void stratalloc_torch_reset(void);

// Calls `stratalloc_history_drop_stack_source` for the allocators of all devices.
stratalloc_status stratalloc_torch_drop_stack_sources(void);

// `set_memory_fraction_fn`: limits a device's allocator to a fraction of the device's memory.
void stratalloc_torch_memory_fraction(double fraction, int device);

// `set_base_alloc_fn`: returns the start of the segment that contains `pointer`, and stores the
// segment's size. If `pointer` is unknown, returns `pointer` and stores 0. Returns null for null, and
// stores nothing. Walks over all segments.
//
// # Safety
//
// `size` may be written, unless it is null.
void *stratalloc_torch_base_allocation(void *pointer,
                                       size_t *size);

// `set_record_stream_fn`: announces that work on `stream` uses the block. Ignores null.
void stratalloc_torch_record_stream(void *pointer, void *stream);

// `set_begin_allocate_to_pool`: routes the requests that a filter accepts to a pool. The new scope
// takes precedence over all scopes that are already open. The filter is copied. It is called at each
// request with the request's stream, on the requesting thread. A null or empty filter accepts the
// calling thread's requests.
//
// # Safety
//
// `filter` is null, or a `std::function<bool(cudaStream_t)>` of GNU's C++ library.
void stratalloc_torch_begin_allocate_to_pool(int device,
                                             stratalloc_pool pool,
                                             void *filter);

// `set_end_allocate_to_pool_fn`: closes the pool's scope. The pool stays in use until it is released.
void stratalloc_torch_end_allocate_to_pool(int device,
                                           stratalloc_pool pool);

// `set_release_pool`: removes a user from a pool. The free memory of a pool without users is released
// the next time the allocator releases memory.
void stratalloc_torch_release_pool(int device,
                                   stratalloc_pool pool);

// Stores a handle of PyTorch's allocator on a device, for the other functions of this interface.
// Creates the allocator if there is none yet. The allocator cannot be destroyed. The handle is
// `STRATALLOC_TORCH_HANDLE` plus the device's ordinal. Calls with it take no lock to find the
// allocator.
//
// # Safety
//
// `handle` may be written.
stratalloc_status stratalloc_torch_handle(int device, uint64_t *handle);

// Empties the caches of all devices, as `stratalloc_torch_reset` does, and returns a status. If one
// device fails, continues with the others and returns the status of the last failure. Waits for the
// devices.
stratalloc_status stratalloc_torch_empty_cache(void);

// Allocates a block from PyTorch's allocator on a device, and stores its address. Creates the
// allocator if there is none yet. For zero bytes, stores null and succeeds.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate(int device,
                                            uint64_t bytes,
                                            void *stream,
                                            void **pointer);

// Allocates a block at exactly `address`, from free memory in the cache of the pool that the request is
// routed to. Fails with `STRATALLOC_STATUS_INVALID_ARGUMENT` if no free block of the stream contains
// `bytes` bytes from `address` on. The bytes of that block before `address` stay free.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate_at(int device,
                                               uint64_t bytes,
                                               void *stream,
                                               void *address,
                                               void **pointer);

// Stores a history entry for the live block that starts at `pointer`: address, requested bytes,
// stream, pool and the current time. The entry has the action 9, PyTorch's `ANNOTATE`, and is not
// recorded. Fails with `STRATALLOC_STATUS_UNKNOWN_ADDRESS` if there is no such block. Walks over all
// segments.
//
// # Safety
//
// `entry` may be written.
stratalloc_status stratalloc_torch_describe_block(uint64_t handle,
                                                  void *pointer,
                                                  stratalloc_entry *entry);

// Calls `show` with the stack of the live block that starts at `pointer`, as its source returned it.
// Does not call `show` if there is no such block, or if stacks are not gathered. The stack is valid
// during the call.
//
// # Safety
//
// `show` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_torch_visit_stack(uint64_t handle,
                                               void *pointer,
                                               stratalloc_stack_visitor show,
                                               void *user);

// Frees a block of any device. Searches the device `likely` first. Stores the block's device, and the
// bytes that were requested for it. Ignores null and, in the child of a fork, a block of the parent.
// In both cases stores -1 and 0.
//
// # Safety
//
// `device` and `bytes` may be written, each unless it is null.
stratalloc_status stratalloc_torch_delete(void *pointer,
                                          int likely,
                                          int *device,
                                          uint64_t *bytes);

// Routes the requests that a filter accepts to a pool. The new scope takes precedence over all scopes
// that are already open. Adds a user to the pool, and creates the pool if it is unknown. The user stays
// until it is released.
//
// # Safety
//
// `filter` may be read and meets the requirements of `stratalloc_stream_filter`.
stratalloc_status stratalloc_torch_scope_open(uint64_t handle,
                                              stratalloc_pool pool,
                                              const stratalloc_stream_filter *filter);

// Closes the scope of a pool. May be called on any thread. The user that the scope added stays.
stratalloc_status stratalloc_torch_scope_close(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. If the pool has no users left, its free memory is released by
// `stratalloc_pool_empty`, or the next time the allocator releases memory.
stratalloc_status stratalloc_torch_pool_release(uint64_t handle, stratalloc_pool pool);

// Sets the default of `expandable_segments_ipc` for PyTorch's allocators that are created later. The
// key decides whether other processes can map their pages. 0 turns it off. A value in the environment
// takes precedence.
stratalloc_status stratalloc_torch_share_pages(int on);

// Sets the version of PyTorch that runs in this process. Every configuration that is read later uses
// it as the version of `compat:pytorch`. An unknown version counts as the nearest known one.
//
// Call this before any call that reads a configuration. Fails if `major` is 0.
stratalloc_status stratalloc_torch_version(uint32_t major,
                                           uint32_t minor);

// Applies a configuration string to all devices that PyTorch has used, and to those that it uses
// later. If one device refuses the string, all devices keep their settings. May wait for the driver
// and for running work.
//
// # Safety
//
// `conf` ends with a zero byte.
stratalloc_status stratalloc_torch_set_conf(const char *conf);

// Stores the current settings.
//
// # Safety
//
// `settings` may be written.
stratalloc_status stratalloc_torch_settings(uint64_t handle, stratalloc_torch_settings_t *settings);

// Allocates a block from the process's allocator of `device`, for work on `stream`. Creates the
// allocator if there is none yet. `library` is the name in the history, and is read only while
// recording is on. Returns null for zero bytes. Also returns null if the call fails; then
// `stratalloc_last_status` and `stratalloc_last_error` have the reason. May wait as
// `stratalloc_allocate` does.
//
// # Safety
//
// `library` ends with a zero byte if it is not null.
void *stratalloc_library_malloc(const char *library, size_t size, int device, void *stream);

// Frees a block of the process's allocator of `device`. The block is reused by other streams, and by
// other libraries, only when the work that was submitted to `stream` before this call has finished.
// Null is ignored.
stratalloc_status stratalloc_library_free(void *pointer,
                                          int device,
                                          void *stream);

// The `malloc` of CuPy's `CFunctionAllocator`. `param` points to a `stratalloc_cupy`. The block is for
// work on CuPy's current stream of the calling thread. If the call fails, returns null and sets Python's
// error indicator, so CuPy raises an exception with the message. The calling thread must hold Python's
// global interpreter lock, as it does when CuPy calls.
//
// # Safety
//
// `param` points to a `stratalloc_cupy` whose members are valid, or is null.
void *stratalloc_cupy_malloc(const stratalloc_cupy *param,
                             size_t size,
                             int device);

// The `free` of CuPy's `CFunctionAllocator`. A failure only sets the thread's last error, because CuPy
// takes no result.
void stratalloc_cupy_free(const stratalloc_cupy *param,
                          void *pointer,
                          int device);

// Sets the device of the blocks that `stratalloc_onnxruntime_alloc` returns; 0 without this call. Creates
// the allocator of the device if there is none yet. Fails if another device was set before, because live
// blocks may belong to it.
stratalloc_status stratalloc_onnxruntime_use(int device);

// For the option `gpu_external_alloc` of ONNX Runtime's CUDA provider. The block is for work on the legacy
// default stream, on which ONNX Runtime works with an external allocator. Returns null, and sets the
// thread's last error, if the call fails; ONNX Runtime then reports a failed request.
void *stratalloc_onnxruntime_alloc(size_t size);

// For the option `gpu_external_free` of ONNX Runtime's CUDA provider.
void stratalloc_onnxruntime_free(void *pointer);

// For the option `gpu_external_empty_cache` of ONNX Runtime's CUDA provider. Waits for the device.
void stratalloc_onnxruntime_empty_cache(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STRATALLOC_H */
