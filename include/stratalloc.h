/* Device-memory allocators, chosen at run time by one string. Made by tests/header.rs; do not edit. */

#ifndef STRATALLOC_H
#define STRATALLOC_H

#include <stddef.h>
#include <stdint.h>

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
  // No allocator has this handle, or it was destroyed.
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
  // The text does not fit in the buffer.
  STRATALLOC_STATUS_BUFFER_TOO_SMALL = 9,
  // A defect of the library. The allocator may be unusable.
  STRATALLOC_STATUS_INTERNAL = 10,
} stratalloc_status;

// Names a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
typedef struct {
  // Number of a graph capture's pool, or 0.
  uint64_t capture;
  // Number of a user's pool, or 0.
  uint64_t user;
} stratalloc_pool;

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

// Takes the next bytes of a snapshot; anything but 0 ends it.
typedef int (*stratalloc_snapshot_writer)(void *user, const void *bytes, size_t size);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

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

// Limits what the allocator may hold to a part of the device's memory, from 0 to 1; 1 removes the
// limit. Releases nothing by itself.
stratalloc_status stratalloc_set_memory_fraction(uint64_t handle, double fraction);

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

// Writes the counters as one flat JSON object of whole numbers: the keys of
// `torch.cuda.memory_stats()`, and behind them counters that only this strategy has. Those of
// `backend:cudaMallocAsync` are `malloc_async.deferred_frees` (frees that wait for the end of a capture),
// `malloc_async.frees_after_capture` (blocks of a graph that were freed when its capture had ended),
// `malloc_async.own_stream_recorded` (announcements of a block's own stream, which do nothing) and
// `malloc_async.trims_that_helped` (requests that succeeded only after the pool was trimmed). `needed`,
// if not null, is set to the bytes that all of it takes, with the zero at its end; a `size` of 0 only
// asks for that.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_statistics_json(uint64_t handle,
                                             char *buffer,
                                             size_t size,
                                             size_t *needed);

// Writes the counters as a table for people, in the manner of `stratalloc_statistics_json`.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_summary(uint64_t handle, char *buffer, size_t size, size_t *needed);

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

// Makes a pool with one user, the caller, and stores its name. `options` is a sum of
// `STRATALLOC_POOL_USE_ON_OOM` and `STRATALLOC_POOL_NO_SPLIT`, or 0.
//
// # Safety
//
// `pool` may be written.
stratalloc_status stratalloc_pool_create(uint64_t handle, uint32_t options, stratalloc_pool *pool);

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

// Ends the routing to a pool, from any thread. Where the driver fails, the scope is closed all the same and
// its user has gone.
stratalloc_status stratalloc_pool_scope_close(uint64_t handle,
                                              stratalloc_pool pool);

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

// Forgets all entries. Recording goes on, and live blocks keep their stacks.
stratalloc_status stratalloc_history_clear(uint64_t handle);

// Lets stacks come from a source from now on, or, with null, from nobody.
//
// # Safety
//
// `source` may be read if it is not null, and does what `stratalloc_stack_source` asks of it.
stratalloc_status stratalloc_history_set_stack_source(uint64_t handle,
                                                      const stratalloc_stack_source *source);

// Gives entries from now on these words of the program's, or none.
//
// # Safety
//
// `metadata` ends with a zero byte if it is not null.
stratalloc_status stratalloc_history_set_metadata(uint64_t handle, const char *metadata);

// Names what the calling thread does from now on: entries have the name as their innermost frame. Every name
// is taken back by a `stratalloc_context_pop` of the same thread.
//
// # Safety
//
// `name` ends with a zero byte if it is not null.
stratalloc_status stratalloc_context_push(const char *name);

// Takes the calling thread's last name back.
stratalloc_status stratalloc_context_pop(void);

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
// interface; the allocator is made if there is none yet. It cannot be destroyed.
//
// # Safety
//
// `handle` may be written.
stratalloc_status stratalloc_torch_handle(int device, uint64_t *handle);

// Empties the caches of all devices, as `stratalloc_torch_reset` does, and returns how it ended: also
// after a failure all the others are emptied, and the last one counts. Waits for the devices.
stratalloc_status stratalloc_torch_empty_cache(void);

// Writes the counters of the allocator that PyTorch has on a device, in the manner of
// `stratalloc_statistics_json`. Opens no device: one that nobody has used has zeros.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_torch_statistics_json(int device,
                                                   char *buffer,
                                                   size_t size,
                                                   size_t *needed);

// Writes the same counters as a table for people, in the manner of `stratalloc_summary`.
//
// # Safety
//
// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
stratalloc_status stratalloc_torch_summary(int device, char *buffer, size_t size, size_t *needed);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STRATALLOC_H */
