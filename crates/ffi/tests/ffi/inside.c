/* Every callback calls every kind of function of the library. Each call returns, and none returns
   `STRATALLOC_STATUS_INTERNAL`. Each pair of callback and function runs in a process of its own, because the function
   may destroy the allocator. Argument: the device. */
#include "stratalloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WHERES = 13, WHATS = 28, MOST_CALLS = 200 };

static uint64_t handle, ids[3];
static int where, what, depth, calls;
static stratalloc_pool pool = {0, 77}, made;
static stratalloc_checkpoint *checkpoint, *other;
static void *kept;

static stratalloc_status call(void) {
    static char text[1 << 16];
    uint64_t numbers[4];
    size_t size;
    double fraction;
    void *block;
    stratalloc_snapshot *snapshot;
    stratalloc_status status;
    switch (what) {
        case 0:
            status = stratalloc_allocate(handle, 1 << 21, NULL, &block);
            return status ? status : stratalloc_free(handle, block);
        case 1: return stratalloc_empty_cache(handle);
        case 2: return stratalloc_destroy(handle);
        case 3: return stratalloc_switch(handle, "backend:cudaMallocAsync");
        case 4: return stratalloc_set_conf(handle, "max_split_size_mb:50");
        case 5: return stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, text, sizeof text, &size);
        case 6: return stratalloc_text_write(handle, STRATALLOC_TEXT_LAYOUT, text, sizeof text, &size);
        case 7: return stratalloc_history_stop(handle);
        case 8: return stratalloc_history_start(handle, 3, 10, NULL, 1);
        case 9: return stratalloc_tracker_remove(handle, ids[0]);
        case 10: return stratalloc_hook_remove(handle, ids[1]);
        case 11: return stratalloc_hook_remove(handle, ids[2]);
        case 12: return stratalloc_history_set_stack_source(handle, NULL);
        case 13: return stratalloc_history_drop_stack_source(handle);
        case 14: return stratalloc_pool_create(handle, 0, &made);
        case 15: return stratalloc_pool_release(handle, pool);
        case 16: return stratalloc_pool_scope_close(handle, pool);
        case 17:
            status = stratalloc_snapshot_take(handle, 0, 1, &snapshot);
            return status ? status : stratalloc_snapshot_drop(snapshot);
        case 18: return stratalloc_set_memory_fraction(handle, .5);
        case 19: return stratalloc_memory_fraction(handle, &fraction);
        case 20: return stratalloc_history_clear(handle);
        case 21: return stratalloc_usage(handle, numbers, numbers + 1, numbers + 2, numbers + 3);
        case 22: return stratalloc_checkpoint_restore(handle, checkpoint, NULL, NULL, NULL);
        case 23: return stratalloc_pool_empty(handle, pool);
        case 24: return stratalloc_free(handle, kept);
        case 25: return stratalloc_allocate(handle, 1ull << 46, NULL, &block);
        case 26: return stratalloc_checkpoint_take(handle, pool, &other);
        default: return stratalloc_pool_scope_open_thread(handle, pool);
    }
}

static void in(int place) {
    /* Counts the calls of callbacks. Too many mean that a call inside a callback causes it again. */
    if (where != place || depth || ++calls > MOST_CALLS) return;
    depth++;
    if (call() == STRATALLOC_STATUS_INTERNAL) _exit(7);
    depth--;
}

static void tracker(void *user, const stratalloc_entry *entry) { if (user == entry) _exit(8); in(0); }
static void observer(void *user, int device, uint64_t a, uint64_t b, uint64_t c) {
    if (user || device || a + b + c == 0) _exit(8);
    in(1);
}
static int callback(void *user) { in(2); return user != NULL; }
static void *gather(void *user) { in(3); return user ? user : malloc(8); }
static void drop(void *user, void *stack) { in(user ? -1 : 4); free(stack); }
static size_t frames(void *user, void *stack, stratalloc_stack_frame *to, size_t room) {
    in(user || !stack || !room ? -1 : 5);
    to[0] = (stratalloc_stack_frame){"function", "file", 3};
    return 1;
}
static int writer(void *user, const void *bytes, size_t size) { in(user || !bytes || !size ? -1 : 6); return 0; }
static void *take(void *user, uint64_t size, void *stream) {
    in(user || stream ? -1 : 7);
    return aligned_alloc(4096, (size + 4095) & ~4095ull);
}
static void give(void *user, void *memory, uint64_t size, void *stream) {
    in(user || stream || !size ? -1 : 8);
    free(memory);
}
static void release(void *user) { in(user ? -1 : 9); }
static int accepts(void *user, void *stream) { in(user || stream ? -1 : 10); return 1; }
static void live(void *user, void *block, uint64_t size, void *stream) {
    in(user || !block || !size || stream ? -1 : 11);
}
static void freed(void *user, void *block, uint64_t size) { in(user || !block || !size ? -1 : 12); }

static void run(const char *conf, const char *device) {
    void *big, *small, *block;
    stratalloc_stack_source stacks = {gather, drop, frames, NULL};
    stratalloc_segment_source segments = {take, give, release, NULL};
    stratalloc_stream_filter filter = {accepts, release, NULL};
    if (stratalloc_create(conf, device, &handle)) _exit(9);
    stratalloc_history_start(handle, 3, 1000, NULL, 0);
    stratalloc_history_set_stack_source(handle, &stacks);
    stratalloc_tracker_add(handle, tracker, release, NULL, ids);
    stratalloc_oom_observer_add(handle, observer, release, NULL, ids + 1);
    stratalloc_free_memory_callback_add(handle, callback, release, NULL, ids + 2);
    stratalloc_allocate(handle, 3000, NULL, &kept);
    stratalloc_pool_ensure(handle, pool, 0, &segments);
    stratalloc_pool_scope_open_filter(handle, pool, &filter);
    stratalloc_allocate(handle, 5 << 20, NULL, &big);
    stratalloc_allocate(handle, 5000, NULL, &small);
    stratalloc_checkpoint_take(handle, pool, &checkpoint);
    stratalloc_free(handle, small);
    stratalloc_checkpoint_restore(handle, checkpoint, live, freed, NULL);
    stratalloc_pool_scope_close(handle, pool);
    stratalloc_allocate(handle, 1ull << 45, NULL, &block);
    stratalloc_allocate(handle, 30 << 20, NULL, &block);
    stratalloc_record_stream(handle, block, (void *)7);
    stratalloc_free(handle, block);
    stratalloc_snapshot_write(handle, 0, writer, NULL);
    stratalloc_free(handle, big);
    stratalloc_pool_release(handle, pool);
    stratalloc_empty_cache(handle);
    stratalloc_tracker_remove(handle, ids[0]);
    stratalloc_history_clear(handle);
    stratalloc_destroy(handle);
    _exit(calls > MOST_CALLS ? 10 : 0);
}

int main(int count, char **arguments) {
    static const char *confs[] = {"backend:native", "expandable_segments:True"};
    if (count != 2) return 2;
    for (size_t conf = 0; conf < sizeof confs / sizeof *confs; conf++)
        for (where = 0; where < WHERES; where++)
            for (what = 0; what < WHATS; what++) {
                int status = 0;
                pid_t child = fork();
                if (child == 0) {
                    alarm(60);
                    run(confs[conf], arguments[1]);
                }
                if (child < 0 || waitpid(child, &status, 0) != child) return 3;
                if (status != 0) {
                    fprintf(stderr, "%s: in %d, call %d: status %x\n", confs[conf], where, what, status);
                    return 4;
                }
            }
    puts("good");
    return 0;
}
