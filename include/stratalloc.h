/* Device-memory allocators, chosen at run time by one string. Made by tests/header.rs; do not edit. */

#ifndef STRATALLOC_H
#define STRATALLOC_H

#include <stddef.h>
#include <stdint.h>

// The handle of PyTorch's allocator on device 0. That of device N is N more.
#define STRATALLOC_TORCH_HANDLE 4611686018427387905

// Requests to the default pool may take idle blocks from the pool before they fail.
#define STRATALLOC_POOL_USE_ON_OOM 1

// Blocks of the pool are always handed out whole.
#define STRATALLOC_POOL_NO_SPLIT 2

// How a call ended. After anything but `OK` nothing has changed, unless the driver failed in a call that
// does several things: what was done before that stays done. `stratalloc_last_error` says more to the
// calling thread.
typedef enum {
  // It did what it says.
  STRATALLOC_STATUS_OK = 0,
  // A null pointer, text that is not UTF-8, or a number that is out of range.
  STRATALLOC_STATUS_INVALID_ARGUMENT = 1,
  // No allocator, checkpoint, snapshot or shared block has this handle, or it was ended.
  STRATALLOC_STATUS_UNKNOWN_HANDLE = 2,
  // The configuration string cannot be used.
  STRATALLOC_STATUS_BAD_CONFIGURATION = 3,
  // Neither the cache nor the device can serve the request.
  STRATALLOC_STATUS_OUT_OF_MEMORY = 4,
  // No live block starts at the address.
  STRATALLOC_STATUS_UNKNOWN_ADDRESS = 5,
  // The pool is unknown, has no user, or has (or lacks) an open scope.
  STRATALLOC_STATUS_BAD_POOL = 6,
  // The device, the strategy or this version cannot do it.
  STRATALLOC_STATUS_NOT_SUPPORTED = 7,
  // The driver failed.
  STRATALLOC_STATUS_DRIVER_FAILED = 8,
  // What is written does not fit in the buffer.
  STRATALLOC_STATUS_BUFFER_TOO_SMALL = 9,
  // A defect of the library. The allocator may be unusable.
  STRATALLOC_STATUS_INTERNAL = 10,
} stratalloc_status;

// A text that `stratalloc_text_write` writes, and what it is about.
typedef enum {
  // Of a handle: the counters as one flat JSON object of whole numbers. The keys are those of
  // `torch.cuda.memory_stats()`, then `free_blocks`, `hits`, `misses` and `num_oom_rejections`, then the
  // counters that only this strategy has. Those of `backend:cudaMallocAsync` are
  // `malloc_async.deferred_frees` (frees that wait for the end of a capture),
  // `malloc_async.frees_after_capture` (blocks of a graph that were freed when its capture had ended),
  // `malloc_async.own_stream_recorded` (announcements of a block's own stream, which do nothing) and
  // `malloc_async.trims_that_helped` (requests that succeeded only after the pool was trimmed).
  STRATALLOC_TEXT_STATISTICS = 0,
  // Of a handle: the counters as a table.
  STRATALLOC_TEXT_SUMMARY = 1,
  // Of a handle: every segment and block as JSON, in address order. Another thread may need more room a
  // moment later.
  STRATALLOC_TEXT_LAYOUT = 2,
  // Of a handle: the name of the strategy in force.
  STRATALLOC_TEXT_NAME = 3,
  // Of a handle: the metadata of `stratalloc_history_set_metadata`, or an empty text.
  STRATALLOC_TEXT_METADATA = 4,
  // Of a handle: a configuration string that has the effect of the settings in force. It is empty if all
  // have the defaults of PyTorch's allocators.
  STRATALLOC_TEXT_CONF = 5,
  // Of a device's number: the counters of the allocator that PyTorch has on the device, as JSON. Opens no
  // device: an unused one has zeros.
  STRATALLOC_TEXT_TORCH_STATISTICS = 6,
  // Of a device's number: the same counters as a table.
  STRATALLOC_TEXT_TORCH_SUMMARY = 7,
  // Of a device's number: the name of the strategy that PyTorch has on the device. Opens no device: for an
  // unused one it is the environment's.
  STRATALLOC_TEXT_TORCH_NAME = 8,
  // Of 0: the counters of all allocators of this process in the OpenMetrics format, which Prometheus
  // scrapes. Names begin with `stratalloc_`; labels are `device`, `backend`, `allocator` (a small number)
  // and, where a metric is of one kind of pool, `pool`. Walks over the free blocks, for the metric
  // `stratalloc_fragmentation`.
  STRATALLOC_TEXT_METRICS = 9,
  // Of 0: the names of all keys that a configuration string can have now, between commas.
  STRATALLOC_TEXT_CONF_KEYS = 10,
} stratalloc_text;

// A pool's blocks at one moment. Never looked into by its address.
typedef struct stratalloc_checkpoint stratalloc_checkpoint;

// Segments, blocks and entries as of one moment. Never looked into by its address.
typedef struct stratalloc_snapshot stratalloc_snapshot;

// What the device and the cache have, in bytes.
typedef struct {
  // Free on the device.
  uint64_t device_free_bytes;
  // All the device has.
  uint64_t device_total_bytes;
  // The largest free block in the cache.
  uint64_t largest_cached_bytes;
  // How many blocks are free in the cache.
  uint64_t free_blocks;
} stratalloc_cache_info_t;

// Names a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
typedef struct {
  // Number of a graph capture's pool, or 0.
  uint64_t capture;
  // Number of a user's pool, or 0.
  uint64_t user;
} stratalloc_pool;

// Told when the library lets go of `user`: once, with no lock held, on any thread. It may allocate and free,
// and must not unwind. If the call that lends `user` fails, it is not told.
typedef void (*stratalloc_release)(void *user);

// Where a pool takes segments from instead of the device. The functions are called on any thread, with no
// lock of the library held; they may use the allocator, but not from the pool that they serve, and must not
// unwind. `user` is handed to each of them.
typedef struct {
  // The address of `size` bytes (a multiple of 512) for `stream`, aligned to 512; null when there is not
  // as much.
  void *(*allocate)(void *user, uint64_t size, void *stream);
  // Takes back what `allocate` returned.
  void (*free)(void *user, void *pointer, uint64_t size, void *stream);
  // Told when the pool has gone; may be null.
  stratalloc_release release;
  // The caller's.
  void *user;
} stratalloc_segment_source;

// Which requests a scope routes to its pool.
typedef struct {
  // Says by anything but 0 whether a request on `stream` goes to the pool. Called on the requesting thread
  // at each request; must neither call the allocator nor unwind.
  int (*accepts)(void *user, void *stream);
  // Told when the scope has gone; may be null.
  stratalloc_release release;
  // The caller's.
  void *user;
} stratalloc_stream_filter;

// Told of a block that is live again.
typedef void (*stratalloc_block_allocated)(void *user, void *address, uint64_t size, void *stream);

// Told of a block that was freed without its holder.
typedef void (*stratalloc_block_freed)(void *user, void *address, uint64_t size);

// Told of an expandable segment: the stream that it serves, whether it is one of small blocks, and how many
// bytes of it are mapped.
typedef void (*stratalloc_expandable_visitor)(void *user,
                                              void *stream,
                                              int is_small,
                                              uint64_t mapped_bytes);

// A frame of a stack.
typedef struct {
  // The function, in UTF-8; null if nobody knows.
  const char *function;
  // Its file, in UTF-8; null if nobody knows.
  const char *file;
  // The line; 0 if nobody knows.
  uint32_t line;
} stratalloc_stack_frame;

// Where stacks come from. The functions are called on any thread, with no lock of the library held; they may
// allocate and free, and must not unwind. `user` is handed to each of them.
typedef struct {
  // Says where the calling thread is, as a pointer that means something to the source, or null. The
  // library holds it from then on.
  void *(*gather)(void *user);
  // Takes a pointer of `gather` back, exactly once for each.
  void (*release)(void *user, void *stack);
  // Stores at most `room` frames of a stack, the innermost first, and returns how many. Their texts stay
  // as they are until the calling thread asks again.
  size_t (*frames)(void *user, void *stack, stratalloc_stack_frame *frames, size_t room);
  // Stays valid until the allocator was destroyed and every stack released.
  void *user;
} stratalloc_stack_source;

// Returns the calling thread's metadata, in UTF-8 and ended by a zero byte, or null if it has none. The text
// stays as it is until the same thread calls something else.
typedef const char *(*stratalloc_thread_metadata)(void);

// Takes the next bytes of a snapshot; anything but 0 ends it.
typedef int (*stratalloc_snapshot_writer)(void *user, const void *bytes, size_t size);

// A segment. Its stack is valid as long as the snapshot.
typedef struct {
  // Where it starts.
  uint64_t address;
  // Its size.
  uint64_t total_bytes;
  // What callers asked for, of the blocks in use.
  uint64_t requested_bytes;
  // In callers' hands.
  uint64_t allocated_bytes;
  // The same and what waits for other streams.
  uint64_t active_bytes;
  // The stream whose requests it serves.
  void *stream;
  // Its pool.
  stratalloc_pool pool;
  // Whether it is one of large blocks.
  int is_large;
  // Whether it is made of mapped pages.
  int is_expandable;
  // Rises in the order in which the segments were taken from the driver; an expandable segment has one
  // number for all its pages. The order of addresses, where the allocator keeps no numbers.
  uint64_t number;
  // The stack of who asked for its memory, as its source gathered it, or null.
  void *stack;
} stratalloc_segment;

// A block of a segment. Its stack is valid as long as the snapshot.
typedef struct {
  // Where it starts.
  uint64_t address;
  // Its size.
  uint64_t size_bytes;
  // What its last holder asked for.
  uint64_t requested_bytes;
  // 0 in a caller's hands, 1 freed and waiting for other streams, 2 free.
  uint32_t state;
  // The stack of its holder, as its source gathered it, or null.
  void *stack;
} stratalloc_block;

// An entry of the history. Its pointers are valid during the call that shows it.
typedef struct {
  // What happened, by the numbers of PyTorch's `TraceEntry::Action`: 0 a block was handed out, 1 a free
  // was asked for, 2 it is done, 3 a segment came, 4 one went, 5 pages were mapped, 6 unmapped, 7 a
  // snapshot was taken (its size is the active bytes), 8 a request failed, 9 a live block was annotated
  // (not in a history: PyTorch's class adds those).
  uint32_t action;
  // Where; free bytes of the device for a request that failed.
  uint64_t address;
  // How many bytes.
  uint64_t size_bytes;
  // The stream of the block.
  void *stream;
  // The pool of the block.
  stratalloc_pool pool;
  // When, in microseconds since 1970.
  int64_t time_us;
  // The compiled region that it belongs to, in UTF-8, or null.
  const char *compile_context;
  // What `stratalloc_history_set_metadata` said, in UTF-8, or null.
  const char *user_metadata;
  // The stack as its source gathered it, or null.
  void *stack;
} stratalloc_entry;

// Whom a snapshot is shown to. The functions may be null, may allocate and free, and must not unwind.
typedef struct {
  // Shown every segment, in address order.
  void (*segment)(void *user, const stratalloc_segment *segment);
  // Shown every block behind its segment, in address order.
  void (*block)(void *user, const stratalloc_block *block);
  // Shown every entry behind the segments, the oldest first.
  void (*entry)(void *user, const stratalloc_entry *entry);
  // Handed to each.
  void *user;
} stratalloc_snapshot_visitor;

// Gets an entry of the history, which stays as it is during the call. It may allocate, free and take
// snapshots, and must not unwind. It must not wait for a request of another thread.
typedef void (*stratalloc_tracker)(void *user, const stratalloc_entry *entry);

// Told of a request that failed: the device, what was asked for, and what the device has in all and free,
// each 0 if nobody knows. It may allocate and free, and must not unwind.
typedef void (*stratalloc_oom_observer)(void *user,
                                        int device,
                                        uint64_t requested_bytes,
                                        uint64_t device_total_bytes,
                                        uint64_t device_free_bytes);

// Called for a request that `throw_on_cudamalloc_oom` rejected: the device, the segment that the request
// would have taken, what the allocator has reserved, and what the device has in all (0 if unknown). It may
// allocate and free, and must not unwind.
typedef void (*stratalloc_oom_rejection_observer)(void *user,
                                                  int device,
                                                  uint64_t segment_bytes,
                                                  uint64_t reserved_bytes,
                                                  uint64_t device_total_bytes);

// Asked to free something before memory is taken from the device; says whether it did, by anything but 0. It
// may allocate and free, and must not unwind.
typedef int (*stratalloc_free_memory_callback)(void *user);

// Shown a stack, as its source gathered it.
typedef void (*stratalloc_stack_visitor)(void *user, void *stack);

// The settings in force that a snapshot of PyTorch's lists.
typedef struct {
  // In (0, 1); 0 for none.
  double garbage_collection_threshold;
  // Blocks of this size or more are never split; `UINT64_MAX` for no such size.
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

// Ends the calls of all functions that were added with `release`, and of the stack sources that have it:
// none of them is called any more, nor is `release`. Waits at most `wait_ms` milliseconds for the calls that
// run, and stores in `inside` how many still run then. An interpreter calls this before it exits. Must not
// be called from inside such a function. Functions that are added later are called.
//
// # Safety
//
// `inside` may be written.
stratalloc_status stratalloc_callbacks_end(const void *release,
                                           uint64_t wait_ms,
                                           uint64_t *inside);

// Builds an allocator and stores its handle, which is never 0. `conf` is a configuration string, or
// null for what the environment says (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (no
// memory, any size), `host` (memory of this machine) or `cuda:N`. Handles are of the process that got
// them: the child of a fork makes its own.
//
// What is legal in a configuration and probably not meant (a key that stands twice, variables of the
// environment that differ) is said on the standard error stream, each text once in a process: here, by
// `stratalloc_set_conf`, by `stratalloc_switch` and by PyTorch's functions.
//
// # Safety
//
// `conf` and `device` end with a zero byte if they are not null; `handle` may be written.
stratalloc_status stratalloc_create(const char *conf,
                                    const char *device,
                                    uint64_t *handle);

// Whether a configuration string can be used: it parses, and its backend is known. Nothing is built, so
// what a device refuses shows later.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_check_conf(const char *conf);

// Ends an allocator and gives all its memory back to the device, also blocks that are still live. Only
// blocks of `backend:cpu` live on: any other `backend:cpu` of the process takes them back.
// Calls of other threads that are inside finish first; later ones are refused.
stratalloc_status stratalloc_destroy(uint64_t handle);

// Hands out a block of at least `bytes`, valid for work on `stream` from now on, and stores its
// address. Zero bytes store null and are no error. Does not wait when a cached block fits.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_allocate(uint64_t handle,
                                      uint64_t bytes,
                                      void *stream,
                                      void **pointer);

// Takes the block that starts at `pointer` back; null is ignored. Work on the block's own stream may
// still be running; work on other streams must have been announced. Waits for no running work, but for
// these: when an announced stream (with `backend:cudaMallocAsync` the block's own too) was destroyed, the
// device is waited for; the last block of an allocator that was switched away from ends it, and its memory
// goes back; the layer `guard` looks at the block's bytes first; functions of users do as they like.
stratalloc_status stratalloc_free(uint64_t handle,
                                  void *pointer);

// Announces that work on `stream` uses the block: after its free it is reused only when that work
// has finished. Never waits.
stratalloc_status stratalloc_record_stream(uint64_t handle, void *pointer, void *stream);

// Waits for all pending work on freed blocks and gives every segment that is wholly free back.
stratalloc_status stratalloc_empty_cache(uint64_t handle);

// Limits the allocator to a part of the device's memory, from 0 to 1; 1 removes the limit. The limit
// counts reserved bytes; with `backend:cudaMallocAsync` it counts the bytes of blocks in use, as
// PyTorch's does, and the driver's pool may reserve more. Releases nothing by itself.
stratalloc_status stratalloc_set_memory_fraction(uint64_t handle,
                                                 double fraction);

// Puts a further configuration string in force on top of those before; blocks stay. A string that
// changes the backend, the layers or another key that an allocator reads only when it is built
// switches, as `stratalloc_switch` does.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_conf(uint64_t handle, const char *conf);

// Puts the allocator that the string names behind the handle: new requests go there, blocks from
// before stay valid and are freed through the same handle. The string is complete: what it does not say
// has its default. A limit stays unless the string says another. If the call fails, everything is as it
// was. It fails while a pool has users or a scope is open. May wait for the device, as releasing memory
// does.
//
// # Safety
//
// `conf` ends with a zero byte if it is not null.
stratalloc_status stratalloc_switch(uint64_t handle,
                                    const char *conf);

// Writes what the calling thread's last failed call said, cut to `size` bytes with the zero at its
// end, and returns the bytes that all of it takes. Empty text if no call of the thread has failed; a
// call that succeeds leaves it alone. Returns 0 for a null buffer that has a size.
//
// # Safety
//
// `size` bytes from `buffer` may be written, unless it is null.
size_t stratalloc_last_error(char *buffer,
                             size_t size);

// The version of the library, as `"1.2.3"`. Lives as long as the process.
const char *stratalloc_version(void);

// Sets every peak to its current value.
stratalloc_status stratalloc_reset_peaks(uint64_t handle);

// Sets everything that was summed up since the start (allocated, freed, numbers of events) to zero.
stratalloc_status stratalloc_reset_accumulated(uint64_t handle);

// Stores which part of the device's memory the allocator may hold; 1 if nothing limits it. A limit is a
// whole number of bytes, so it may differ from what was set in the last digits.
//
// # Safety
//
// `fraction` may be written.
stratalloc_status stratalloc_memory_fraction(uint64_t handle,
                                             double *fraction);

// Stores what is free on the device, and all it has, in bytes, as its driver says now: memory in the cache
// is not free, and a limit is not looked at.
//
// # Safety
//
// Both places may be written.
stratalloc_status stratalloc_memory_info(uint64_t handle,
                                         uint64_t *free_bytes,
                                         uint64_t *total_bytes);

// Stores what the device and the cache have. Walks over the free blocks.
//
// # Safety
//
// `info` may be written.
stratalloc_status stratalloc_cache_info(uint64_t handle, stratalloc_cache_info_t *info);

// Stores start and size, in bytes, of the segment that `pointer` lies in; of an expandable one, of its
// mapped range. Walks over all segments.
//
// # Safety
//
// `base` and `size` may be written.
stratalloc_status stratalloc_base_allocation(uint64_t handle,
                                             void *pointer,
                                             void **base,
                                             uint64_t *size);

// Stores the bytes in callers' hands and those held from the device, each now and at its peak. Much cheaper
// than `STRATALLOC_TEXT_STATISTICS`; `backend:native` without layers waits for no call of the device.
//
// # Safety
//
// All places may be written.
stratalloc_status stratalloc_usage(uint64_t handle,
                                   uint64_t *allocated,
                                   uint64_t *allocated_peak,
                                   uint64_t *reserved,
                                   uint64_t *reserved_peak);

// Stores how many blocks are in callers' hands. As cheap as `stratalloc_usage`.
//
// # Safety
//
// `count` may be written.
stratalloc_status stratalloc_block_count(uint64_t handle, uint64_t *count);

// Stores the external fragmentation of the allocator's segments, from 0 to 1: 1 - largest free block / sum
// of all free blocks. Neighbouring free blocks are one block; 0 if nothing is free.
// `backend:cudaMallocAsync` does not see its free ranges and always stores 0. Walks over the free blocks.
//
// # Safety
//
// `fragmentation` may be written.
stratalloc_status stratalloc_fragmentation(uint64_t handle,
                                           double *fragmentation);

// Stores how many CUDA devices there are; 0 without a CUDA driver.
//
// # Safety
//
// `count` may be written.
stratalloc_status stratalloc_device_count(int *count);

// Forgets the live block of `backend:cpu` that starts at `pointer`, because the caller will free its memory:
// with `free` below 1 MiB, with `munmap` from 1 MiB on. Call it before the memory is freed, because the
// system may give the address to another block afterwards. Not for other backends, nor under layers.
stratalloc_status stratalloc_record_free(uint64_t handle,
                                         void *pointer);

// Turns the cache off, if `on` is 0, or on again: off, each request is its own call of the driver, and a
// free gives its memory back at once and waits for the device. For tools that look at every allocation. Such
// blocks are in no counter, no history, no pool, no layer and under no limit; blocks from before stay as
// they are. It is for `backend:native`; another strategy that is switched to has its cache.
//
// The variable `PYTORCH_NO_CUDA_MEMORY_CACHING` (or `PYTORCH_NO_HIP_MEMORY_CACHING`), set to whatever, turns
// it off from the start where the environment says what an allocator is.
stratalloc_status stratalloc_set_caching(uint64_t handle,
                                         int on);

// Stores 1 if the cache is on, or 0.
//
// # Safety
//
// `on` may be written.
stratalloc_status stratalloc_caching(uint64_t handle, int *on);

// Writes the text `kind`, a number of `stratalloc_text`, about `of`. `needed`, if not null, is set to the
// bytes that all of it takes, with the zero at its end; a `size` of 0 stores only that.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_text_write(uint64_t of,
                                        uint32_t kind,
                                        char *buffer,
                                        size_t size,
                                        size_t *needed);

// Makes a pool with one user, the caller, and stores its name. `options` is a sum of
// `STRATALLOC_POOL_USE_ON_OOM` and `STRATALLOC_POOL_NO_SPLIT`, or 0.
//
// # Safety
//
// `pool` may be written.
stratalloc_status stratalloc_pool_create(uint64_t handle, uint32_t options, stratalloc_pool *pool);

// Makes a pool of the caller's own name with one user, or adds a user to the one that is there. `options`
// and `source` count for a pool that is made: where it takes segments from, or null for the device. If the
// call succeeds and the pool was there, `source` is let go of at once.
//
// # Safety
//
// `source` may be read if it is not null, and does what `stratalloc_segment_source` asks of it.
stratalloc_status stratalloc_pool_ensure(uint64_t handle,
                                         stratalloc_pool pool,
                                         uint32_t options,
                                         const stratalloc_segment_source *source);

// Changes the options of a pool that has users. `STRATALLOC_POOL_NO_SPLIT` is for pools that were not used
// yet.
stratalloc_status stratalloc_pool_set_options(uint64_t handle,
                                              stratalloc_pool pool,
                                              uint32_t options);

// Stores how many users a pool has; 0 if it is unknown.
//
// # Safety
//
// `users` may be written.
stratalloc_status stratalloc_pool_users(uint64_t handle, stratalloc_pool pool, uint32_t *users);

// Writes the addresses of the pool's live blocks, ascending, and stores how many there are. If there is not
// room for all, none is written; a `room` of 0 only asks.
//
// # Safety
//
// `room` pointers from `addresses` may be written, unless it is null; `count` may be written.
stratalloc_status stratalloc_pool_live(uint64_t handle,
                                       stratalloc_pool pool,
                                       void **addresses,
                                       size_t room,
                                       size_t *count);

// Gives the idle memory of a pool without users back to the device, and waits for the work that its freed
// blocks wait for. Does nothing for a pool that is in use.
stratalloc_status stratalloc_pool_empty(uint64_t handle,
                                        stratalloc_pool pool);

// Adds a user to a pool.
stratalloc_status stratalloc_pool_retain(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. With the last one the pool serves nobody any more, and its idle memory
// goes back to the device, as far as its driver lets it; blocks that are still live keep theirs until they
// are freed and memory is released.
stratalloc_status stratalloc_pool_release(uint64_t handle,
                                          stratalloc_pool pool);

// Routes the requests of the calling thread to a pool, before all scopes that are open already. A
// pool has one open scope at a time, which counts as a user.
stratalloc_status stratalloc_pool_scope_open_thread(uint64_t handle, stratalloc_pool pool);

// Routes the requests on `stream` to a pool, from all threads.
stratalloc_status stratalloc_pool_scope_open_stream(uint64_t handle,
                                                    stratalloc_pool pool,
                                                    void *stream);

// Routes the requests that a filter accepts to a pool.
//
// # Safety
//
// `filter` may be read, and does what `stratalloc_stream_filter` asks of it.
stratalloc_status stratalloc_pool_scope_open_filter(uint64_t handle,
                                                    stratalloc_pool pool,
                                                    const stratalloc_stream_filter *filter);

// Ends the routing to a pool, from any thread. Where the driver fails, the scope is closed all the same and
// its user has gone.
stratalloc_status stratalloc_pool_scope_close(uint64_t handle,
                                              stratalloc_pool pool);

// Stores a checkpoint of a pool: its blocks now. From here on its idle memory stays while it has users.
//
// # Safety
//
// `checkpoint` may be written.
stratalloc_status stratalloc_checkpoint_take(uint64_t handle,
                                             stratalloc_pool pool,
                                             stratalloc_checkpoint **checkpoint);

// Makes the pool's blocks what they were at the checkpoint: all live blocks are freed, and the checkpoint's
// are live again, at their addresses. Memory that the pool took since stays, free. Then `freed` is told of
// each block that was freed, and `allocated` of each that is live; null for nobody. They may allocate and
// free, and must not unwind.
//
// # Safety
//
// Both may be called with `user` during this call.
stratalloc_status stratalloc_checkpoint_restore(uint64_t handle,
                                                stratalloc_checkpoint *checkpoint,
                                                stratalloc_block_allocated allocated,
                                                stratalloc_block_freed freed,
                                                void *user);

// Ends a checkpoint. The pool stays as it is.
stratalloc_status stratalloc_checkpoint_drop(stratalloc_checkpoint *checkpoint);

// Writes what another process needs to open the block that starts at `pointer`: bytes for any channel, with
// no zero at their end. They carry a secret. `needed`, if not null, is set to how many there are, `offset`,
// if not null, to how far `pointer` lies behind the address that opening gives, which is 0: a block is
// opened from its start. A `size` of 0 only asks. Sharing a block twice gives equal bytes. Waits for no
// work.
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

// Maps a block of another process, from the bytes that it shared: stores a number for it, its address in
// this process and its size. May wait some seconds for the other process, and for the driver.
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

// Unmaps a block that was opened, as soon as nobody else has the same pages open. Waits for the device.
stratalloc_status stratalloc_close_shared(uint64_t shared);

// Lets `device` access the allocator's memory: all that is mapped, and all that will be. One direction: for
// the other one, call it with the allocator of `device`. Twice is no error. Never waits for work.
stratalloc_status stratalloc_enable_peer(uint64_t handle,
                                         int device);

// Shows every expandable segment to `visit`, in address order. It may allocate and free, and must not
// unwind.
//
// # Safety
//
// `visit` may be called with `user` during this call.
stratalloc_status stratalloc_expandable_segments(uint64_t handle,
                                                 stratalloc_expandable_visitor visit,
                                                 void *user);

// Puts a stream into a class of `expandable_segments_reserve_by_class`, or with null into none. It counts
// for segments that are reserved from then on.
//
// # Safety
//
// `class_name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_set_reserve_class(uint64_t handle,
                                               void *stream,
                                               const char *class_name);

// Starts recording what the allocator does, or goes on with other options. `stacks` says whose stacks are
// gathered: 0 nobody's, 1 of live blocks, 2 of entries that hand out memory too, 3 of all. At most
// `entries_max` entries are kept, the newest. `skip` names actions that are not recorded, as PyTorch calls
// them, between commas; null for none. `clear` forgets what was recorded before, unless it is 0.
//
// # Safety
//
// `skip` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_start(uint64_t handle,
                                           uint32_t stacks,
                                           uint64_t entries_max,
                                           const char *skip,
                                           int clear);

// Stops recording and forgets.
stratalloc_status stratalloc_history_stop(uint64_t handle);

// Stores 1 if it is recorded what the allocator does, or 0.
//
// # Safety
//
// `on` may be written.
stratalloc_status stratalloc_history_is_on(uint64_t handle, int *on);

// Forgets all entries. Recording goes on, and live blocks keep their stacks.
stratalloc_status stratalloc_history_clear(uint64_t handle);

// Lets stacks come from a source from now on, or, with null, from nobody.
//
// # Safety
//
// `source` may be read if it is not null, and does what `stratalloc_stack_source` asks of it.
stratalloc_status stratalloc_history_set_stack_source(uint64_t handle,
                                                      const stratalloc_stack_source *source);

// Asks the source of stacks no more, because it is about to go, as an interpreter does at its end. Under
// `layers:[track]` live blocks keep the names of their stacks for what is told at the end of the process;
// all that was recorded is forgotten.
stratalloc_status stratalloc_history_drop_stack_source(uint64_t handle);

// Gives entries from now on these words of the program's, or none.
//
// # Safety
//
// `metadata` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_set_metadata(uint64_t handle, const char *metadata);

// Takes the metadata of entries from `source` where it returns any, and from
// `stratalloc_history_set_metadata` otherwise; from no source with null. It is called on the thread of each
// request and free that is recorded, and must not allocate from the allocator or unwind.
//
// # Safety
//
// `source` may be called on any thread until another one was set and every call has ended.
stratalloc_status stratalloc_history_set_thread_metadata(uint64_t handle,
                                                         stratalloc_thread_metadata source);

// Names what the calling thread does from now on: entries have the name as their innermost frame. Every name
// is taken back by a `stratalloc_context_pop` of the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_context_push(const char *name);

// Takes the calling thread's last name back.
stratalloc_status stratalloc_context_pop(void);

// Keeps `pairs` keys and values with the time while anything is recorded: snapshots list the newest
// 65,536 under `external_annotations`. PyTorch's have a key `name`, and `stage` with `START` or `END`.
//
// # Safety
//
// `words` has `2 * pairs` texts, a key and its value in turn; each ends with a zero byte.
stratalloc_status stratalloc_annotate(uint64_t handle,
                                      const char *const *words,
                                      size_t pairs);

// Says which compiled region runs on the calling thread from now on: entries have it in a field of their
// own. Every one is taken back by a `stratalloc_compile_context_pop` of the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_compile_context_push(const char *name);

// Takes the calling thread's last compiled region back.
stratalloc_status stratalloc_compile_context_pop(void);

// Writes all segments and blocks and the history, as of one moment, to a file that PyTorch's viewers read: a
// pickle, or JSON if the name ends in `.json`. The file has its old content or all of the new one, whatever
// fails.
//
// # Safety
//
// `path` ends with a zero byte if it is not null.
stratalloc_status stratalloc_snapshot_save(uint64_t handle,
                                           const char *path);

// Hands the same to `write`, piece by piece, with `user`: as a pickle if `format` is 0, as JSON if it is 1.
//
// # Safety
//
// `write` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_snapshot_write(uint64_t handle,
                                            uint32_t format,
                                            stratalloc_snapshot_writer write,
                                            void *user);

// Takes a snapshot: all segments and blocks as of one moment, of one pool or, if `pool` is null, of all,
// and, unless `with_entries` is 0, the history. Waits for no work of the device.
//
// # Safety
//
// `pool` may be read if it is not null; `snapshot` may be written.
stratalloc_status stratalloc_snapshot_take(uint64_t handle,
                                           const stratalloc_pool *pool,
                                           int with_entries,
                                           stratalloc_snapshot **snapshot);

// Shows what a snapshot has.
//
// # Safety
//
// `visitor` may be read, and its functions called with its `user` during this call.
stratalloc_status stratalloc_snapshot_visit(stratalloc_snapshot *snapshot,
                                            const stratalloc_snapshot_visitor *visitor);

// Ends a snapshot, and releases the stacks that only it held.
stratalloc_status stratalloc_snapshot_drop(stratalloc_snapshot *snapshot);

// Calls `told` with every entry of the history from now on, while recording is on, and stores a number to
// remove it by. It stays through a switch of strategy. No lock of the library is held during a call.
//
// Memory of the device is announced in an order that allows to register it with a network library: as
// `segment_alloc` or `segment_map` after the driver gave it and before any request is served from it, as
// `segment_free` or `segment_unmap` when no request can get it and before the driver gets it back. If the
// driver refuses to take it back it is announced as coming again.
//
// Blocks that a call takes or frees itself are recorded, and no tracker is called for them. Memory that it
// takes from the device is announced when the call has returned. Inside a call no memory goes back to the
// device: `stratalloc_empty_cache` releases nothing there. `stratalloc_destroy` announces all that goes
// back; the handle is unknown by then.
//
// # Safety
//
// `told` may be called with `user` on any thread until `release` is; `id` may be written.
stratalloc_status stratalloc_tracker_add(uint64_t handle,
                                         stratalloc_tracker told,
                                         stratalloc_release release,
                                         void *user,
                                         uint64_t *id);

// Removes a tracker. A call of another thread may still run; `user` is let go of when it has ended.
stratalloc_status stratalloc_tracker_remove(uint64_t handle, uint64_t id);

// Lets `told` know of every request that fails from now on, and stores a number to remove it by. It stays
// through a switch of strategy. A request of its own that fails is told to nobody.
//
// # Safety
//
// `told` may be called with `user` on any thread until `release` is; `id` may be written.
stratalloc_status stratalloc_oom_observer_add(uint64_t handle,
                                              stratalloc_oom_observer told,
                                              stratalloc_release release,
                                              void *user,
                                              uint64_t *id);

// Calls `observer` for every request that `throw_on_cudamalloc_oom` rejects from now on, and stores a number
// to remove it by. It stays through a switch of strategy. Observers of failed requests are not called then.
//
// # Safety
//
// `observer` may be called with `user` on any thread until `release` is; `id` may be written.
stratalloc_status stratalloc_oom_rejection_observer_add(uint64_t handle,
                                                        stratalloc_oom_rejection_observer observer,
                                                        stratalloc_release release,
                                                        void *user,
                                                        uint64_t *id);

// Removes an observer or a free-memory callback, as `stratalloc_tracker_remove` does.
stratalloc_status stratalloc_hook_remove(uint64_t handle, uint64_t id);

// Lets `asked` free something from now on whenever memory would be taken from the device, and stores a
// number to remove it by. It stays through a switch of strategy. What it asks for itself asks nobody.
//
// # Safety
//
// `asked` may be called with `user` on any thread until `release` is; `id` may be written.
stratalloc_status stratalloc_free_memory_callback_add(uint64_t handle,
                                                      stratalloc_free_memory_callback asked,
                                                      stratalloc_release release,
                                                      void *user,
                                                      uint64_t *id);

// Hands out a block for PyTorch. Null for zero bytes, without an error; null with the thread's last
// error set when there is no memory, no such device, or the environment cannot be used. The variable
// `STRATALLOC_DEVICE` may say `sim` or `host` instead of `cuda`, for tests.
void *stratalloc_torch_malloc(size_t size,
                              int device,
                              void *stream);

// Takes a block of PyTorch's back; null is ignored, and so is, in the child of a fork, a block of the
// parent's. `size` and `stream` are not looked at: the allocator knows them.
void stratalloc_torch_free(void *pointer,
                           size_t size,
                           int device,
                           void *stream);

// `set_init_fn`: reads the environment, so that a string that cannot be used is said at once.
void stratalloc_torch_init(int device_count);

// `set_reset_fn`: empties the caches of all devices. Waits for them.
void stratalloc_torch_reset(void);

// Does what `stratalloc_history_drop_stack_source` does for the allocators of all devices.
stratalloc_status stratalloc_torch_drop_stack_sources(void);

// `set_memory_fraction_fn`: limits a device's allocator to a part of its memory.
void stratalloc_torch_memory_fraction(double fraction, int device);

// `set_base_alloc_fn`: start and size of what the block was cut from; the pointer itself, and no
// size (0), if it is not ours. Walks over all segments.
//
// # Safety
//
// `size` may be written, unless it is null.
void *stratalloc_torch_base_allocation(void *pointer, size_t *size);

// `set_record_stream_fn`: announces that work on `stream` uses the block; null is ignored.
void stratalloc_torch_record_stream(void *pointer, void *stream);

// `set_begin_allocate_to_pool`: routes the requests that a filter accepts to a pool, before all scopes that
// are open already. The filter is copied, and asked for the stream of each request on the requesting
// thread; an empty one means the calling thread's requests.
//
// # Safety
//
// `filter` is null, or a `std::function<bool(cudaStream_t)>` of GNU's C++ library.
void stratalloc_torch_begin_allocate_to_pool(int device,
                                             stratalloc_pool pool,
                                             void *filter);

// `set_end_allocate_to_pool_fn`: ends the routing; the pool stays in use until it is released.
void stratalloc_torch_end_allocate_to_pool(int device, stratalloc_pool pool);

// `set_release_pool`: removes a user from a pool. Without users its memory goes back whenever memory
// is released.
void stratalloc_torch_release_pool(int device,
                                   stratalloc_pool pool);

// Stores a handle of the allocator that PyTorch has on a device, for the other calls of this
// interface; the allocator is made if there is none yet. It cannot be destroyed. The handle is
// `STRATALLOC_TORCH_HANDLE` and the number of the device, added up; calls find its allocator without a lock.
//
// # Safety
//
// `handle` may be written.
stratalloc_status stratalloc_torch_handle(int device,
                                          uint64_t *handle);

// Empties the caches of all devices, as `stratalloc_torch_reset` does, and returns how it ended: also
// after a failure all the others are emptied, and the last one counts. Waits for the devices.
stratalloc_status stratalloc_torch_empty_cache(void);

// Hands out a block of the allocator that PyTorch has on a device, which is made if there is none yet, and
// stores its address. Zero bytes store null and are no error.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate(int device,
                                            uint64_t bytes,
                                            void *stream,
                                            void **pointer);

// Allocates a block at exactly `address` from free memory of the cache: of the pool that the request is
// routed to. `STRATALLOC_STATUS_INVALID_ARGUMENT` if no free block of the stream holds the bytes from
// there on. The bytes before `address` stay free.
//
// # Safety
//
// `pointer` may be written.
stratalloc_status stratalloc_torch_allocate_at(int device,
                                               uint64_t bytes,
                                               void *stream,
                                               void *address,
                                               void **pointer);

// Stores an entry of the history that describes the live block that starts at `pointer`: where, how many
// bytes were requested, stream, pool, and the present time. Its action is 9, PyTorch's `ANNOTATE`; it is
// not recorded. `STRATALLOC_STATUS_UNKNOWN_ADDRESS` if there is no such block. Walks over all segments.
//
// # Safety
//
// `entry` may be written.
stratalloc_status stratalloc_torch_describe_block(uint64_t handle,
                                                  void *pointer,
                                                  stratalloc_entry *entry);

// Shows the stack of the live block that starts at `pointer`, as its source gathered it: nothing is shown if
// there is no such block, or stacks are not gathered. The stack is valid during the call.
//
// # Safety
//
// `show` may be called with `user` during this call, and does not unwind.
stratalloc_status stratalloc_torch_visit_stack(uint64_t handle,
                                               void *pointer,
                                               stratalloc_stack_visitor show,
                                               void *user);

// Takes a block back from whichever device it is of, `likely` being asked first, and stores the device and
// how many bytes were asked for. Null is ignored, and so is, in the child of a fork, a block of the
// parent's: -1 and 0 are stored then.
//
// # Safety
//
// `device` and `bytes` may be written, each unless it is null.
stratalloc_status stratalloc_torch_delete(void *pointer,
                                          int likely,
                                          int *device,
                                          uint64_t *bytes);

// Routes the requests that a filter accepts to a pool, before all scopes that are open already, and adds a
// user, which stays until it is released. A pool that is unknown is made.
//
// # Safety
//
// `filter` may be read, and does what `stratalloc_stream_filter` asks of it.
stratalloc_status stratalloc_torch_scope_open(uint64_t handle,
                                              stratalloc_pool pool,
                                              const stratalloc_stream_filter *filter);

// Ends the routing to a pool, from any thread. The user that it added stays.
stratalloc_status stratalloc_torch_scope_close(uint64_t handle, stratalloc_pool pool);

// Removes a user from a pool. Without users its idle memory goes back when memory is released, or by
// `stratalloc_pool_empty`.
stratalloc_status stratalloc_torch_pool_release(uint64_t handle,
                                                stratalloc_pool pool);

// Lets pages that PyTorch's allocators map leave the process, unless the environment says
// `expandable_segments_ipc`: as the default of allocators that are made from now on, or no more if `on` is
// 0.
stratalloc_status stratalloc_torch_share_pages(int on);

// Names the version of PyTorch that runs in this process: `compat:pytorch` means its decisions, in every
// configuration that is read from now on. A version that is not known counts as the nearest known one.
//
// Call it before the first other call that reads a configuration. Fails if `major` is 0.
stratalloc_status stratalloc_torch_version(uint32_t major,
                                           uint32_t minor);

// Puts a further configuration string in force on all devices that PyTorch has used, and on those that it
// uses later. If one device refuses the string, all keep what they had. May wait for the driver and for
// running work.
//
// # Safety
//
// `conf` ends with a zero byte.
stratalloc_status stratalloc_torch_set_conf(const char *conf);

// Stores the settings in force.
//
// # Safety
//
// `settings` may be written.
stratalloc_status stratalloc_torch_settings(uint64_t handle, stratalloc_torch_settings_t *settings);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STRATALLOC_H */
