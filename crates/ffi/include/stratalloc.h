/* Device-memory allocators, chosen at run time by one string. Made by tests/header.rs; do not edit. */

#ifndef STRATALLOC_H
#define STRATALLOC_H

#include <stddef.h>
#include <stdint.h>

// The handle of PyTorch's allocator on device 0. The handle for device N is larger by N.
#define STRATALLOC_TORCH_HANDLE 4611686018427387905

// Requests to the default pool may use free blocks of the pool before they fail.
#define STRATALLOC_POOL_USE_ON_OOM 1

// Blocks of the pool are never split.
#define STRATALLOC_POOL_NO_SPLIT 2

// The result of a call. After any other status than `OK` nothing has changed, with one exception. If the
// driver fails in a call with several steps, the completed steps remain. `stratalloc_last_error` has the
// message for the calling thread.
typedef enum {
  // Success.
  STRATALLOC_STATUS_OK = 0,
  // A null pointer, text that is not UTF-8, or a number that is out of range.
  STRATALLOC_STATUS_INVALID_ARGUMENT = 1,
  // No allocator, checkpoint, snapshot or shared block has this handle, or it was destroyed.
  STRATALLOC_STATUS_UNKNOWN_HANDLE = 2,
  // The configuration string cannot be used.
  STRATALLOC_STATUS_BAD_CONFIGURATION = 3,
  // Neither the cache nor the device can serve the request.
  STRATALLOC_STATUS_OUT_OF_MEMORY = 4,
  // No live block starts at the address.
  STRATALLOC_STATUS_UNKNOWN_ADDRESS = 5,
  // The pool is unknown, has no user, or has (or lacks) an open scope.
  STRATALLOC_STATUS_BAD_POOL = 6,
  // The device, the strategy or this version does not support the call.
  STRATALLOC_STATUS_NOT_SUPPORTED = 7,
  // A call of the driver failed.
  STRATALLOC_STATUS_DRIVER_FAILED = 8,
  // The output does not fit in the buffer.
  STRATALLOC_STATUS_BUFFER_TOO_SMALL = 9,
  // A bug in the library. The allocator may be unusable.
  STRATALLOC_STATUS_INTERNAL = 10,
} stratalloc_status;

// A kind of text for `stratalloc_text_write`, and the meaning of its argument `of`.
typedef enum {
  // `of` is a handle: the counters as one flat JSON object of integers. The keys are those of
  // `torch.cuda.memory_stats()`, then `free_blocks`, `hits`, `misses` and `num_oom_rejections`, then
  // those of the strategy's own counters. `backend:cudaMallocAsync` has these:
  // `malloc_async.deferred_frees` (frees that wait for the end of a capture),
  // `malloc_async.frees_after_capture` (blocks of a graph that were freed after its capture had
  // ended), `malloc_async.own_stream_recorded` (`record_stream` calls with the block's own stream,
  // which have no effect) and `malloc_async.trims_that_helped` (requests that succeeded only after the
  // pool was trimmed).
  STRATALLOC_TEXT_STATISTICS = 0,
  // `of` is a handle: the counters as a table.
  STRATALLOC_TEXT_SUMMARY = 1,
  // `of` is a handle: every segment and block as JSON, in address order. Other threads can make the text
  // longer between two calls.
  STRATALLOC_TEXT_LAYOUT = 2,
  // `of` is a handle: the name of the current strategy.
  STRATALLOC_TEXT_NAME = 3,
  // `of` is a handle: the metadata of `stratalloc_history_set_metadata`, or an empty text.
  STRATALLOC_TEXT_METADATA = 4,
  // `of` is a handle: a configuration string for the current settings. It is empty if all equal the
  // defaults of PyTorch's allocators.
  STRATALLOC_TEXT_CONF = 5,
  // `of` is a device ordinal: the counters of PyTorch's allocator on the device, as JSON. Opens no
  // device: an unused one has zeros.
  STRATALLOC_TEXT_TORCH_STATISTICS = 6,
  // `of` is a device ordinal: the same counters as a table.
  STRATALLOC_TEXT_TORCH_SUMMARY = 7,
  // `of` is a device ordinal: the strategy of PyTorch's allocator on the device. Opens no device: for an
  // unused one it is the environment's.
  STRATALLOC_TEXT_TORCH_NAME = 8,
  // `of` is 0: the counters of all allocators of this process in the OpenMetrics format, which Prometheus
  // scrapes. Names begin with `stratalloc_`. Labels are `device`, `backend`, `allocator` (a small
  // number) and, for metrics per kind of pool, `pool`. Walks over the free blocks, for the metric
  // `stratalloc_fragmentation`.
  STRATALLOC_TEXT_METRICS = 9,
  // `of` is 0: the names of all keys that a configuration string can have now, separated by commas.
  STRATALLOC_TEXT_CONF_KEYS = 10,
} stratalloc_text;

// The blocks of a pool at one moment. An opaque handle: never dereferenced.
typedef struct stratalloc_checkpoint stratalloc_checkpoint;

// Segments, blocks and entries as of one moment. An opaque handle: never dereferenced.
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

// The id of a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
typedef struct {
  // The number of a graph capture's pool, or 0.
  uint64_t capture;
  // The number of a user's pool, or 0.
  uint64_t user;
} stratalloc_pool;

// Called when the library no longer needs `user`: once, on any thread, with no lock held. It may
// allocate and free, and must not unwind. If the call that passes `user` fails, it is not called.
typedef void (*stratalloc_release)(void *user);

// A source of a pool's segments, used instead of the device. The functions are called on any thread,
// with no lock of the library held. They may use the allocator, but not the pool that they serve, and
// must not unwind. `user` is passed to each.
typedef struct {
  // Returns the address of `size` bytes (a multiple of 512) for `stream`, aligned to 512; null if it
  // has no memory.
  void *(*allocate)(void *user, uint64_t size, void *stream);
  // Frees memory that `allocate` returned.
  void (*free)(void *user, void *pointer, uint64_t size, void *stream);
  // Called when the pool no longer exists; may be null.
  stratalloc_release release;
  // A pointer of the caller's.
  void *user;
} stratalloc_segment_source;

// A filter for a scope: selects the requests that go to the scope's pool.
typedef struct {
  // Returns nonzero if a request on `stream` goes to the pool. Called at each request, on the
  // requesting thread; must neither call the allocator nor unwind.
  int (*accepts)(void *user, void *stream);
  // Called when the scope no longer exists; may be null.
  stratalloc_release release;
  // A pointer of the caller's.
  void *user;
} stratalloc_stream_filter;

// Called with each block that a restore made live.
typedef void (*stratalloc_block_allocated)(void *user, void *address, uint64_t size, void *stream);

// Called with each block that a restore freed.
typedef void (*stratalloc_block_freed)(void *user, void *address, uint64_t size);

// Called with an expandable segment: its stream, whether it is for small blocks, and its mapped bytes.
typedef void (*stratalloc_expandable_visitor)(void *user,
                                              void *stream,
                                              int is_small,
                                              uint64_t mapped_bytes);

// A frame of a stack.
typedef struct {
  // The function's name, in UTF-8; null if unknown.
  const char *function;
  // The source file, in UTF-8; null if unknown.
  const char *file;
  // The line; 0 if unknown.
  uint32_t line;
} stratalloc_stack_frame;

// A caller's source of stacks. The functions are called on any thread, with no lock of the library held;
// they may allocate and free, and must not unwind. `user` is passed to each.
typedef struct {
  // Returns the calling thread's stack as a pointer that only the source interprets, or null. The
  // library keeps the pointer until it calls `release`.
  void *(*gather)(void *user);
  // Releases a pointer that `gather` returned; called exactly once for each.
  void (*release)(void *user, void *stack);
  // Stores at most `room` frames of a stack, innermost first, and returns their number. The frames'
  // texts stay valid until the calling thread's next call of `frames`.
  size_t (*frames)(void *user, void *stack, stratalloc_stack_frame *frames, size_t room);
  // Must stay valid until the allocator is destroyed and every stack released.
  void *user;
} stratalloc_stack_source;

// Returns the calling thread's metadata, in UTF-8 and with a terminating zero, or null if it has none.
// The text must stay valid until the same thread's next call into other code.
typedef const char *(*stratalloc_thread_metadata)(void);

// Receives the next bytes of a snapshot. Any result but 0 aborts the snapshot.
typedef int (*stratalloc_snapshot_writer)(void *user, const void *bytes, size_t size);

// A segment. Its stack is valid as long as the snapshot.
typedef struct {
  // The start address.
  uint64_t address;
  // The size.
  uint64_t total_bytes;
  // The bytes that callers requested of the blocks in use.
  uint64_t requested_bytes;
  // The bytes of live blocks.
  uint64_t allocated_bytes;
  // The bytes of live blocks, and of freed blocks that wait for other streams.
  uint64_t active_bytes;
  // The stream whose requests it serves.
  void *stream;
  // The pool of the segment.
  stratalloc_pool pool;
  // 1 if the segment is for large blocks.
  int is_large;
  // 1 if the segment is expandable.
  int is_expandable;
  // Increases in the order in which segments were allocated from the driver. An expandable segment has
  // one number for all its pages. If the allocator keeps no numbers, the order of addresses.
  uint64_t number;
  // The stack of the request that allocated the segment, as its source gathered it, or null.
  void *stack;
} stratalloc_segment;

// A block of a segment. Its stack is valid as long as the snapshot.
typedef struct {
  // The start address.
  uint64_t address;
  // The size.
  uint64_t size_bytes;
  // The bytes of the block's last request.
  uint64_t requested_bytes;
  // 0 live, 1 freed and waiting for other streams, 2 free.
  uint32_t state;
  // The stack of the block's request, as its source gathered it, or null.
  void *stack;
} stratalloc_block;

// An entry of the history. Its pointers are valid during the call that receives it.
typedef struct {
  // The action, by the numbers of PyTorch's `TraceEntry::Action`: 0 block allocated, 1 free requested,
  // 2 free completed, 3 segment allocated, 4 segment freed, 5 pages mapped, 6 pages unmapped, 7
  // snapshot taken (the size is the active bytes), 8 request failed, 9 live block annotated (never in
  // a history: PyTorch's class adds those).
  uint32_t action;
  // The address; for a failed request, the free bytes of the device.
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
  // The metadata, as of `stratalloc_history_set_metadata`, in UTF-8, or null.
  const char *user_metadata;
  // The stack that its source gathered, or null.
  void *stack;
} stratalloc_entry;

// Functions that receive a snapshot's contents. Each may be null, may allocate and free, and must not
// unwind.
typedef struct {
  // Called with every segment, in address order.
  void (*segment)(void *user, const stratalloc_segment *segment);
  // Called with every block of a segment, after the segment and in address order.
  void (*block)(void *user, const stratalloc_block *block);
  // Called with every entry, after the segments and oldest first.
  void (*entry)(void *user, const stratalloc_entry *entry);
  // Passed to each function.
  void *user;
} stratalloc_snapshot_visitor;

// Called with an entry of the history, which is valid during the call. The function may allocate, free
// and take snapshots. It must not unwind, nor wait for a request of another thread.
typedef void (*stratalloc_tracker)(void *user, const stratalloc_entry *entry);

// Called after a failed request with the device, the requested bytes, and the total and the free bytes
// of the device, each 0 if unknown. It may allocate and free, and must not unwind.
typedef void (*stratalloc_oom_observer)(void *user,
                                        int device,
                                        uint64_t requested_bytes,
                                        uint64_t device_total_bytes,
                                        uint64_t device_free_bytes);

// Called for a request that `throw_on_cudamalloc_oom` rejected, with the device, the size of the segment
// that the request needed, the reserved bytes of the allocator, and the total bytes of the device (0 if
// unknown). It may allocate and free, and must not unwind.
typedef void (*stratalloc_oom_rejection_observer)(void *user,
                                                  int device,
                                                  uint64_t segment_bytes,
                                                  uint64_t reserved_bytes,
                                                  uint64_t device_total_bytes);

// Called before memory is acquired from the driver, to free something. Returns nonzero if it freed
// memory. It may allocate and free, and must not unwind.
typedef int (*stratalloc_free_memory_callback)(void *user);

// Called with a stack: the pointer that its source gathered.
typedef void (*stratalloc_stack_visitor)(void *user, void *stack);

// The current settings that PyTorch's snapshots list.
typedef struct {
  // In (0, 1); 0 for none.
  double garbage_collection_threshold;
  // Blocks of this size or more are never split; `UINT64_MAX` for no limit.
  uint64_t max_split_bytes;
  // Divisions of each power of two, from 1 MiB up; 0 for none.
  uint64_t roundup_power2_divisions[16];
  // `expandable_segments`.
  int expandable_segments;
  // `release_lock_on_cudamalloc`.
  int release_lock_on_malloc;
  // `graph_capture_record_stream_reuse`.
  int graph_capture_record_stream_reuse;
} stratalloc_torch_settings_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Stops the calls of all functions that were added with `release`, including those of stack sources that
// have it; `release` itself is not called any more either. Waits at most `wait_ms` milliseconds for
// running calls, and stores in `inside` how many still run then. For interpreters, which call it before
// they exit. Must not be called from such a function. Functions that are added later are called.
//
// # Safety
//
// `inside` may be written.
stratalloc_status stratalloc_callbacks_end(const void *release,
                                           uint64_t wait_ms,
                                           uint64_t *inside);

// Creates an allocator and stores its handle, which is never 0. `conf` is a configuration string, or
// null to read the environment (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (no memory,
// any size), `host` (memory of this machine) or `cuda:N`. A handle is valid only in the process that
// created it: the child of a fork must create its own.
//
// Some configurations are legal and probably a mistake, such as a repeated key or environment variables
// that differ. These cause a warning on the standard error stream, each text once per process. The
// functions that warn are this one, `stratalloc_set_conf`, `stratalloc_switch` and PyTorch's.
//
// # Safety
//
// `conf` and `device` end with a zero byte if they are not null; `handle` may be written.
stratalloc_status stratalloc_create(const char *conf,
                                    const char *device,
                                    uint64_t *handle);

// Checks that a configuration string parses and that its backend is known. Builds nothing, so errors of
// a device show up later.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_check_conf(const char *conf);

// Destroys an allocator and releases all its memory to the device, including live blocks. Blocks of
// `backend:cpu` are the exception: they stay valid, and any other `backend:cpu` allocator of the process
// can free them. Calls that run on other threads finish first; later ones are refused.
stratalloc_status stratalloc_destroy(uint64_t handle);

// Allocates a block of at least `bytes`, usable by work on `stream` at once, and stores its address.
// Zero bytes store null and are no error. Does not wait when a cached block fits.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_allocate(uint64_t handle,
                                      uint64_t bytes,
                                      void *stream,
                                      void **pointer);

// Frees the block that starts at `pointer`; null is ignored. Work on the block's own stream may still be
// running. Work on other streams must have been announced with `stratalloc_record_stream`.
//
// Does not wait for running work, with these exceptions. If an announced stream was destroyed (with
// `backend:cudaMallocAsync` also the block's own stream), the call waits for the device. Freeing the
// last block of a retired allocator, one that was switched away from, releases its memory, which may
// wait. The layer `guard` waits for the block's streams before it checks the bytes around the block.
// Callers' functions may wait.
stratalloc_status stratalloc_free(uint64_t handle,
                                  void *pointer);

// Announces that work on `stream` uses the block. After its free, the block is reused only when that
// work has finished. Never waits.
stratalloc_status stratalloc_record_stream(uint64_t handle,
                                           void *pointer,
                                           void *stream);

// Waits for all pending work on freed blocks, then releases every segment that is entirely free.
stratalloc_status stratalloc_empty_cache(uint64_t handle);

// Limits the allocator to a fraction of the device's memory, from 0 to 1; 1 removes the limit. The limit
// counts reserved bytes. With `backend:cudaMallocAsync` it counts the bytes of blocks in use, as PyTorch
// does, and the driver's pool may reserve more. Setting a limit releases no memory.
stratalloc_status stratalloc_set_memory_fraction(uint64_t handle,
                                                 double fraction);

// Applies a configuration string on top of the current settings; blocks stay. If the string changes a
// key that is read only when an allocator is built (the backend, the layers and others), the call
// switches as `stratalloc_switch` does.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_conf(uint64_t handle,
                                      const char *conf);

// Switches the handle to the allocator that the string describes. New requests go to that allocator;
// existing blocks stay valid and are freed through the same handle. The string is complete: a key that
// it omits has its default. A memory limit stays unless the string sets another.
//
// If the call fails, nothing has changed. It fails while a pool has users or a scope is open. May wait
// for the device, as releasing memory does.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_switch(uint64_t handle,
                                    const char *conf);

// Writes the message of the calling thread's last failed call, cut to `size` bytes including the
// terminating zero. Returns the bytes that the whole message needs. The message is empty if no call of
// the thread has failed; a successful call leaves it unchanged. Returns 0 for a null buffer with a
// nonzero size.
//
// # Safety
//
// `size` bytes from `buffer` may be written, unless it is null.
size_t stratalloc_last_error(char *buffer,
                             size_t size);

// Returns the version of the library, as `"1.2.3"`. The text is never freed.
const char *stratalloc_version(void);

// Sets every peak to its current value.
stratalloc_status stratalloc_reset_peaks(uint64_t handle);

// Sets all accumulated counters (allocated, freed, numbers of events) to zero.
stratalloc_status stratalloc_reset_accumulated(uint64_t handle);

// Stores the fraction of the device's memory that the allocator may hold; 1 without a limit. A limit is
// a whole number of bytes, so the last digits may differ from the fraction that was set.
//
// # Safety
//
// `fraction` may be written.
stratalloc_status stratalloc_memory_fraction(uint64_t handle,
                                             double *fraction);

// Stores the free and the total bytes of the device, as its driver reports them now. Cached memory does
// not count as free, and a limit has no effect.
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

// Stores the start and the size, in bytes, of the segment that contains `pointer`; of an expandable
// segment, of the mapped range. Walks over all segments.
//
// # Safety
//
// `base` and `size` may be written.
stratalloc_status stratalloc_base_allocation(uint64_t handle,
                                             void *pointer,
                                             void **base,
                                             uint64_t *size);

// Stores the allocated and the reserved bytes, each now and at its peak. Much cheaper than
// `STRATALLOC_TEXT_STATISTICS`; with `backend:native` without layers it waits for no call of the driver.
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
// sum of all free blocks. Adjacent free blocks count as one. Stores 0 if nothing is free, and always
// with `backend:cudaMallocAsync`, whose free ranges are not visible. Walks over the free blocks.
//
// # Safety
//
// `fragmentation` may be written.
stratalloc_status stratalloc_fragmentation(uint64_t handle,
                                           double *fragmentation);

// Stores the number of CUDA devices; 0 without a CUDA driver.
//
// # Safety
//
// `count` may be written.
stratalloc_status stratalloc_device_count(int *count);

// Removes the live block of `backend:cpu` that starts at `pointer` from the allocator, because the
// caller will free its memory: with `free` below 1 MiB, with `munmap` from 1 MiB on. Call it before the
// memory is freed, because the system may reuse the address afterwards. Not supported by other backends,
// nor under layers.
stratalloc_status stratalloc_record_free(uint64_t handle,
                                         void *pointer);

// Turns the cache off if `on` is 0, or on again. Without the cache, each request is a driver call of its
// own, and a free releases the memory at once and waits for the device. This is for tools that observe
// every allocation. Such blocks appear in no counter, history, pool or layer, and no limit applies to
// them; existing blocks stay as they are. Only `backend:native` supports it; another strategy that is
// switched to uses its cache.
//
// If the variable `PYTORCH_NO_CUDA_MEMORY_CACHING` (or `PYTORCH_NO_HIP_MEMORY_CACHING`) is set to any
// value, the cache starts turned off in allocators that are configured by the environment.
stratalloc_status stratalloc_set_caching(uint64_t handle,
                                         int on);

// Stores 1 if the cache is on, 0 if it is off.
//
// # Safety
//
// `on` may be written.
stratalloc_status stratalloc_caching(uint64_t handle, int *on);

// Writes the text `kind`, a value of `stratalloc_text`, about `of`. `needed`, unless null, is set to the
// bytes that the text needs, including the terminating zero. A `size` of 0 stores only that.
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

// Creates a pool with an id of the caller's choice and one user, or adds a user to the existing pool.
// `options` and `source` apply only to a pool that is created. `source` allocates its segments; null for
// the device. If the pool existed, a successful call releases the source's `user` at once.
//
// # Safety
//
// `source` is null, or may be read and meets the requirements of `stratalloc_segment_source`.
stratalloc_status stratalloc_pool_ensure(uint64_t handle,
                                         stratalloc_pool pool,
                                         uint32_t options,
                                         const stratalloc_segment_source *source);

// Changes the options of a pool that has users. `STRATALLOC_POOL_NO_SPLIT` can be set only before the
// pool is used.
stratalloc_status stratalloc_pool_set_options(uint64_t handle,
                                              stratalloc_pool pool,
                                              uint32_t options);

// Stores the number of a pool's users; 0 if the pool is unknown.
//
// # Safety
//
// `users` may be written.
stratalloc_status stratalloc_pool_users(uint64_t handle, stratalloc_pool pool, uint32_t *users);

// Writes the addresses of the pool's live blocks in ascending order and stores their number. If the
// buffer has too little room, no address is written. A `room` of 0 only stores the number.
//
// # Safety
//
// `room` pointers from `addresses` may be written, unless it is null; `count` may be written.
stratalloc_status stratalloc_pool_live(uint64_t handle,
                                       stratalloc_pool pool,
                                       void **addresses,
                                       size_t room,
                                       size_t *count);

// Releases the free memory of a pool without users to the device, after the work that its freed blocks
// wait for. Does nothing for a pool with users.
stratalloc_status stratalloc_pool_empty(uint64_t handle,
                                        stratalloc_pool pool);

// Adds a user to a pool.
stratalloc_status stratalloc_pool_retain(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. After the last user, the pool serves no more requests, and its free memory
// is released to the device as far as the driver allows. Live blocks keep theirs until they are freed
// and memory is released.
stratalloc_status stratalloc_pool_release(uint64_t handle,
                                          stratalloc_pool pool);

// Routes the requests of the calling thread to a pool, with priority over all scopes that are already
// open. A pool has at most one open scope, which counts as a user.
stratalloc_status stratalloc_pool_scope_open_thread(uint64_t handle,
                                                    stratalloc_pool pool);

// Routes the requests on `stream`, from all threads, to a pool.
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

// Closes the scope of a pool, from any thread. If the driver fails, the scope is closed all the same and
// its user removed.
stratalloc_status stratalloc_pool_scope_close(uint64_t handle,
                                              stratalloc_pool pool);

// Takes a checkpoint of a pool's current blocks. From then on, free memory of the pool is not released
// while the pool has users.
//
// # Safety
//
// `checkpoint` may be written.
stratalloc_status stratalloc_checkpoint_take(uint64_t handle,
                                             stratalloc_pool pool,
                                             stratalloc_checkpoint **checkpoint);

// Restores a pool to a checkpoint: frees all live blocks, then makes the checkpoint's blocks live at
// their addresses. Memory that the pool acquired since stays in the pool, free. Then calls `freed` with
// each block that was freed, and `allocated` with each block that is live; either may be null. They may
// allocate and free, and must not unwind.
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

// Writes the bytes with which another process can open the block that starts at `pointer`. They may be
// sent over any channel, contain a secret, and have no terminating zero. `needed`, unless null, is set
// to their number. `offset`, unless null, is set to the distance of `pointer` from the address that
// opening the block returns; it is always 0, because a block is opened from its start.
//
// A `size` of 0 writes no bytes. Sharing a block twice returns equal bytes. Waits for no work.
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
// Stores a number for it, its address in this process and its size. May wait for the driver, and some
// seconds for the other process.
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

// Closes a shared block. Its pages are unmapped once no other block in this process uses them. Waits for
// the device.
stratalloc_status stratalloc_close_shared(uint64_t shared);

// Lets `device` access the allocator's memory, present and future. For the other direction, call it with
// the allocator of `device`. A repeated call is no error. Never waits for work.
stratalloc_status stratalloc_enable_peer(uint64_t handle,
                                         int device);

// Calls `visit` with every expandable segment, in address order. It may allocate and free, and must not
// unwind.
//
// # Safety
//
// `visit` may be called with `user` during this call.
stratalloc_status stratalloc_expandable_segments(uint64_t handle,
                                                 stratalloc_expandable_visitor visit,
                                                 void *user);

// Assigns a stream to a class of `expandable_segments_reserve_by_class`; null removes it from its class.
// Applies to segments that are reserved later.
//
// # Safety
//
// `class_name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_reserve_class(uint64_t handle,
                                               void *stream,
                                               const char *class_name);

// Starts recording the allocator's actions, or changes the options of a running recording. `stacks`
// selects the stacks that are gathered: 0 none, 1 those of live blocks, 2 also those of entries that
// allocate memory, 3 also those of entries that free memory. The newest `entries_max` entries are kept.
// `skip` lists actions that are not recorded, by PyTorch's names and separated by commas; null for none.
// Unless `clear` is 0, earlier entries are dropped.
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

// Sets the source of stacks; null removes it.
//
// # Safety
//
// `source` is null, or may be read and meets the requirements of `stratalloc_stack_source`.
stratalloc_status stratalloc_history_set_stack_source(uint64_t handle,
                                                      const stratalloc_stack_source *source);

// Removes the source of stacks before it becomes invalid, as when an interpreter exits, and drops the
// recorded entries. Under `layers:[track]`, live blocks keep the names of their stacks' frames for the
// leak report at the end of the process.
stratalloc_status stratalloc_history_drop_stack_source(uint64_t handle);

// Sets the metadata of later entries; null removes it.
//
// # Safety
//
// `metadata` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_set_metadata(uint64_t handle, const char *metadata);

// Sets a function that returns the metadata of entries; where it returns null, the metadata of
// `stratalloc_history_set_metadata` is used. Null removes the function. It is called on the thread of
// each recorded request and free, and must neither allocate from the allocator nor unwind.
//
// # Safety
//
// `source` may be called on any thread until it was replaced and all calls of it have returned.
stratalloc_status stratalloc_history_set_thread_metadata(uint64_t handle,
                                                         stratalloc_thread_metadata source);

// Pushes a name for the calling thread's work: entries have it as their innermost frame. Every name must
// be removed by a `stratalloc_context_pop` on the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_context_push(const char *name);

// Pops the calling thread's last name.
stratalloc_status stratalloc_context_pop(void);

// Records `pairs` keys and values with the current time, if recording is on. Snapshots list the newest
// 65,536 annotations under `external_annotations`. PyTorch's have the key `name`, and `stage` with
// `START` or `END`.
//
// # Safety
//
// `words` points to `2 * pairs` texts, each key followed by its value; each text ends with a zero byte.
stratalloc_status stratalloc_annotate(uint64_t handle,
                                      const char *const *words,
                                      size_t pairs);

// Pushes the name of the compiled region that the calling thread runs; entries have it in a field of its
// own. Every one must be removed by a `stratalloc_compile_context_pop` on the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_compile_context_push(const char *name);

// Pops the calling thread's last compiled region.
stratalloc_status stratalloc_compile_context_pop(void);

// Writes all segments, blocks and the history, as of one moment, to a file for PyTorch's viewers: a
// pickle, or JSON if the name ends in `.json`. If the call fails, the file keeps its old content.
//
// # Safety
//
// `path` ends with a zero byte if it is not null.
stratalloc_status stratalloc_snapshot_save(uint64_t handle, const char *path);

// Passes the same content to `write`, piece by piece, with `user`: as a pickle if `format` is 0, as JSON
// if it is 1.
//
// # Safety
//
// `write` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_snapshot_write(uint64_t handle,
                                            uint32_t format,
                                            stratalloc_snapshot_writer write,
                                            void *user);

// Takes a snapshot of all segments and blocks as of one moment: of one pool, or of all if `pool` is
// null. Includes the history unless `with_entries` is 0. Waits for no work of the device.
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

// Drops a snapshot, and releases the stacks that only it refers to.
stratalloc_status stratalloc_snapshot_drop(stratalloc_snapshot *snapshot);

// Adds a tracker: a function that is called with every entry of the history while recording is on.
// Stores a number to remove it by. It stays through a switch of strategy. No lock of the library is held
// during a call.
//
// Entries for device memory come in an order that allows the tracker to register the memory with a
// network library. `segment_alloc` or `segment_map` comes after the driver allocated the memory and
// before a request is served from it. `segment_free` or `segment_unmap` comes when no request can be
// served from the memory any more, and before the driver frees it. If the driver fails to free it,
// another `segment_alloc` or `segment_map` follows.
//
// Blocks that a tracker itself allocates or frees are recorded, but no tracker is called for them.
// Entries for device memory that it acquires follow when it has returned. During the call of a tracker
// no memory is released to the device: `stratalloc_empty_cache` releases nothing there.
// `stratalloc_destroy` calls trackers for all memory that it releases; the handle is invalid by then.
//
// # Safety
//
// The function may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_tracker_add(uint64_t handle,
                                         stratalloc_tracker tracker,
                                         stratalloc_release release,
                                         void *user,
                                         uint64_t *id);

// Removes a tracker. A call on another thread may still run; `user` is released when that call has
// returned.
stratalloc_status stratalloc_tracker_remove(uint64_t handle, uint64_t id);

// Adds an observer that is called for every failed request, and stores a number to remove it by. It
// stays through a switch of strategy. Failed requests of the observer itself call no observer.
//
// # Safety
//
// The function may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_oom_observer_add(uint64_t handle,
                                              stratalloc_oom_observer observer,
                                              stratalloc_release release,
                                              void *user,
                                              uint64_t *id);

// Adds an observer that is called for every request that `throw_on_cudamalloc_oom` rejects, and stores a
// number to remove it by. It stays through a switch of strategy. Observers of failed requests are not
// called for these.
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

// Adds a callback that is called whenever memory is about to be acquired from the device, so that it can
// free something. Stores a number to remove it by. It stays through a switch of strategy. Requests of
// the callback itself call no callback.
//
// # Safety
//
// The callback may be called with `user` on any thread until `release` is called; `id` may be written.
stratalloc_status stratalloc_free_memory_callback_add(uint64_t handle,
                                                      stratalloc_free_memory_callback callback,
                                                      stratalloc_release release,
                                                      void *user,
                                                      uint64_t *id);

// Allocates a block for PyTorch. Returns null for zero bytes, without an error. Returns null and sets
// the thread's last error when there is no memory, no such device, or the environment's configuration is
// invalid. For tests, the variable `STRATALLOC_DEVICE` may be `sim` or `host` instead of `cuda`.
void *stratalloc_torch_malloc(size_t size,
                              int device,
                              void *stream);

// Frees a block for PyTorch. Null is ignored, and so is, in the child of a fork, a block of the
// parent's. `size` and `stream` are ignored: the allocator has stored them.
void stratalloc_torch_free(void *pointer, size_t size, int device, void *stream);

// `set_init_fn`: reads the environment, so that an invalid configuration is reported at once.
void stratalloc_torch_init(int device_count);

// `set_reset_fn`: empties the caches of all devices. Waits for them.
void stratalloc_torch_reset(void);

// Calls `stratalloc_history_drop_stack_source` for the allocators of all devices.
stratalloc_status stratalloc_torch_drop_stack_sources(void);

// `set_memory_fraction_fn`: limits a device's allocator to a fraction of its memory.
void stratalloc_torch_memory_fraction(double fraction, int device);

// `set_base_alloc_fn`: returns the start of the segment that contains `pointer`, and stores the
// segment's size. For an unknown pointer it returns the pointer and stores 0. Walks over all segments.
//
// # Safety
//
// `size` may be written, unless it is null.
void *stratalloc_torch_base_allocation(void *pointer,
                                       size_t *size);

// `set_record_stream_fn`: announces that work on `stream` uses the block; null is ignored.
void stratalloc_torch_record_stream(void *pointer, void *stream);

// `set_begin_allocate_to_pool`: routes the requests that a filter accepts to a pool, with priority over
// all scopes that are already open. The filter is copied, and called at each request with the request's
// stream, on the requesting thread. An empty filter accepts the calling thread's requests.
//
// # Safety
//
// `filter` is null, or a `std::function<bool(cudaStream_t)>` of GNU's C++ library.
void stratalloc_torch_begin_allocate_to_pool(int device,
                                             stratalloc_pool pool,
                                             void *filter);

// `set_end_allocate_to_pool_fn`: closes the scope; the pool stays in use until it is released.
void stratalloc_torch_end_allocate_to_pool(int device, stratalloc_pool pool);

// `set_release_pool`: removes a user from a pool. Memory of a pool without users is released whenever
// memory is released.
void stratalloc_torch_release_pool(int device,
                                   stratalloc_pool pool);

// Stores a handle of PyTorch's allocator on a device, for the other calls of this interface. Creates the
// allocator if there is none yet. It cannot be destroyed. The handle is `STRATALLOC_TORCH_HANDLE` plus
// the device's ordinal; calls find its allocator without a lock.
//
// # Safety
//
// `handle` may be written.
stratalloc_status stratalloc_torch_handle(int device,
                                          uint64_t *handle);

// Empties the caches of all devices, as `stratalloc_torch_reset` does, and returns the result. A failure
// on one device does not stop the others; the status of the last failure is returned. Waits for the
// devices.
stratalloc_status stratalloc_torch_empty_cache(void);

// Allocates a block from PyTorch's allocator on a device, which is created if there is none yet, and
// stores its address. Zero bytes store null and are no error.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate(int device,
                                            uint64_t bytes,
                                            void *stream,
                                            void **pointer);

// Allocates a block at exactly `address` from free memory in the cache, of the pool that the request is
// routed to. Fails with `STRATALLOC_STATUS_INVALID_ARGUMENT` if no free block of the stream contains the
// bytes from there on. The bytes before `address` stay free.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate_at(int device,
                                               uint64_t bytes,
                                               void *stream,
                                               void *address,
                                               void **pointer);

// Stores a history entry for the live block that starts at `pointer`: address, requested bytes, stream,
// pool and the present time. Its action is 9, PyTorch's `ANNOTATE`; it is not recorded. Fails with
// `STRATALLOC_STATUS_UNKNOWN_ADDRESS` if there is no such block. Walks over all segments.
//
// # Safety
//
// `entry` may be written.
stratalloc_status stratalloc_torch_describe_block(uint64_t handle,
                                                  void *pointer,
                                                  stratalloc_entry *entry);

// Calls `show` with the stack of the live block that starts at `pointer`, as its source gathered it.
// Does not call it if there is no such block, or stacks are not gathered. The stack is valid during the
// call.
//
// # Safety
//
// `show` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_torch_visit_stack(uint64_t handle,
                                               void *pointer,
                                               stratalloc_stack_visitor show,
                                               void *user);

// Frees a block of any device, trying the device `likely` first. Stores the block's device and the bytes
// that were requested. Null is ignored, and so is, in the child of a fork, a block of the parent's; in
// both cases -1 and 0 are stored.
//
// # Safety
//
// `device` and `bytes` may be written, each unless it is null.
stratalloc_status stratalloc_torch_delete(void *pointer,
                                          int likely,
                                          int *device,
                                          uint64_t *bytes);

// Routes the requests that a filter accepts to a pool, with priority over all scopes that are already
// open. Adds a user, which stays until it is released. Creates an unknown pool.
//
// # Safety
//
// `filter` may be read and meets the requirements of `stratalloc_stream_filter`.
stratalloc_status stratalloc_torch_scope_open(uint64_t handle,
                                              stratalloc_pool pool,
                                              const stratalloc_stream_filter *filter);

// Closes the scope of a pool, from any thread. The user that the scope added stays.
stratalloc_status stratalloc_torch_scope_close(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. Free memory of a pool without users is released when memory is released,
// or by `stratalloc_pool_empty`.
stratalloc_status stratalloc_torch_pool_release(uint64_t handle,
                                                stratalloc_pool pool);

// Sets the default of `expandable_segments_ipc` for PyTorch's allocators that are created later: whether
// other processes can map their pages. 0 turns it off. The environment takes precedence.
stratalloc_status stratalloc_torch_share_pages(int on);

// Sets the version of PyTorch that runs in this process, for `compat:pytorch` in every configuration
// that is read later. An unknown version counts as the nearest known one.
//
// Call it before the first other call that reads a configuration. Fails if `major` is 0.
stratalloc_status stratalloc_torch_version(uint32_t major,
                                           uint32_t minor);

// Applies a configuration string to all devices that PyTorch has used, and to those that it uses later.
// If one device refuses the string, all keep their settings. May wait for the driver and for running
// work.
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

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STRATALLOC_H */
