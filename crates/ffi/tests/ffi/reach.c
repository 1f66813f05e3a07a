/* A C program that uses every feature besides allocating and freeing, correctly and with wrong arguments, on the
   device that its argument names. */
#include "stratalloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            char text[512];                                                              \
            stratalloc_last_error(text, sizeof text);                                    \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, text); \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)
#define IS(expected, call) CHECK((call) == STRATALLOC_STATUS_##expected)

static const char *device;
static const uint64_t MIB = 1 << 20;
static void *const SEVEN = (void *)7;

/* The `user` of a callback: counts its calls and its releases. */
typedef struct {
    int calls, released;
    uint64_t handle, last;
    void *block;
} Book;

static void release(void *user) { ((Book *)user)->released++; }

static uint64_t create(const char *conf) {
    uint64_t handle = 0;
    IS(OK, stratalloc_create(conf, device, &handle));
    return handle;
}

static int has(uint64_t handle, const char *words) {
    static char json[1 << 16];
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, json, sizeof json, NULL));
    return strstr(json, words) != NULL;
}

static void figures(const char *conf) {
    uint64_t handle = create(conf), allocated, peak, reserved, reserved_peak, size = 0;
    void *a = NULL, *base = NULL;
    IS(OK, stratalloc_allocate(handle, MIB, NULL, &a));
    IS(OK, stratalloc_usage(handle, &allocated, &peak, &reserved, &reserved_peak));
    CHECK(allocated == MIB && peak == MIB && reserved == 2 * MIB && reserved_peak == 2 * MIB);
    IS(OK, stratalloc_base_allocation(handle, (char *)a + 512, &base, &size));
    CHECK(base == a && size == 2 * MIB);
    IS(UNKNOWN_ADDRESS, stratalloc_base_allocation(handle, &handle, &base, &size));
    char text[4096], address[64];
    size_t needed = 0;
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_LAYOUT, text, sizeof text, &needed));
    snprintf(address, sizeof address, "\"address\":%llu,\"size\":%llu,", (unsigned long long)(size_t)a,
             (unsigned long long)MIB);
    CHECK(strlen(text) + 1 == needed && strstr(text, address) && strstr(text, "active_allocated"));
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_NAME, text, sizeof text, &needed));
    CHECK(strcmp(text, "native") == 0 && needed == 7);
    IS(BUFFER_TOO_SMALL, stratalloc_text_write(handle, STRATALLOC_TEXT_NAME, text, 6, NULL));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_reset_peaks(handle));
    IS(OK, stratalloc_usage(handle, &allocated, &peak, &reserved, &reserved_peak));
    CHECK(allocated == 0 && peak == 0 && reserved_peak == 2 * MIB);
    CHECK(has(handle, "\"hits\":0,\"misses\":1,\"num_oom_rejections\":0"));
    IS(OK, stratalloc_reset_accumulated(handle));
    CHECK(has(handle, "\"allocation.all.allocated\":0,") && has(handle, "\"misses\":0,"));
    stratalloc_cache_info_t info;
    IS(OK, stratalloc_cache_info(handle, &info));
    CHECK(info.largest_cached_bytes == 2 * MIB && info.free_blocks == 1);
    uint64_t free_bytes = 0, total_bytes = 0;
    IS(OK, stratalloc_memory_info(handle, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && free_bytes < total_bytes);
    CHECK(info.device_free_bytes == free_bytes && info.device_total_bytes == total_bytes);
    double fraction = 0;
    IS(OK, stratalloc_memory_fraction(handle, &fraction));
    CHECK(fraction == 1.0);
    IS(OK, stratalloc_set_memory_fraction(handle, 0.25));
    IS(OK, stratalloc_memory_fraction(handle, &fraction));
    CHECK(fraction > 0.2499 && fraction <= 0.25);
    IS(OK, stratalloc_destroy(handle));
}

static void caching(void) {
    uint64_t handle = create("backend:native"), allocated, peak, reserved, reserved_peak, size = 0;
    uint64_t before, after, total;
    void *a = NULL, *b = NULL, *base = NULL;
    int on = 7;
    IS(OK, stratalloc_allocate(handle, MIB, NULL, &a));
    IS(OK, stratalloc_memory_info(handle, &before, &total));
    IS(OK, stratalloc_set_caching(handle, 0));
    IS(OK, stratalloc_caching(handle, &on));
    CHECK(on == 0);
    IS(OK, stratalloc_allocate(handle, MIB, NULL, &b));
    IS(OK, stratalloc_memory_info(handle, &after, &total));
    CHECK(b != NULL && after <= before - MIB);
    IS(OK, stratalloc_usage(handle, &allocated, &peak, &reserved, &reserved_peak));
    CHECK(allocated == MIB && reserved == 2 * MIB);
    IS(OK, stratalloc_base_allocation(handle, (char *)b + MIB - 1, &base, &size));
    CHECK(base == b && size == MIB);
    IS(OK, stratalloc_record_stream(handle, b, SEVEN));
    IS(UNKNOWN_ADDRESS, stratalloc_record_stream(handle, (char *)b + 512, SEVEN));
    IS(UNKNOWN_ADDRESS, stratalloc_free(handle, (char *)b + 512));
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, UINT64_MAX, NULL, &base));
    IS(OK, stratalloc_set_caching(handle, 1));
    IS(OK, stratalloc_free(handle, b));
    IS(UNKNOWN_ADDRESS, stratalloc_free(handle, b));
    IS(OK, stratalloc_memory_info(handle, &after, &total));
    CHECK(after == before);
    IS(OK, stratalloc_set_caching(handle, 0));
    IS(OK, stratalloc_allocate(handle, MIB, NULL, &b));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_switch(handle, "backend:cudaMallocAsync"));
    IS(OK, stratalloc_caching(handle, &on));
    CHECK(on == 1);
    /* Blocks that were not freed are released when the allocator is destroyed. */
    IS(OK, stratalloc_destroy(handle));
    handle = create("backend:cpu");
    IS(NOT_SUPPORTED, stratalloc_set_caching(handle, 0));
    IS(OK, stratalloc_set_caching(handle, 1));
    IS(OK, stratalloc_destroy(handle));
}

static void *lend_segment(void *user, uint64_t size, void *stream) {
    Book *book = user;
    book->calls++;
    CHECK(stream == SEVEN && size % 512 == 0);
    return book->block = aligned_alloc(512, size);
}

static void take_segment(void *user, void *pointer, uint64_t size, void *stream) {
    Book *book = user;
    book->calls--;
    CHECK(pointer == book->block && size >= 512 && stream == SEVEN);
    free(pointer);
}

static int is_seven(void *user, void *stream) {
    ((Book *)user)->calls++;
    return stream == SEVEN;
}

static void pools(void) {
    uint64_t handle = create("");
    stratalloc_pool pool = {0, 900001}, default_pool = {0, 0};
    Book lender = {0}, second = {0}, chooser = {0};
    stratalloc_segment_source source = {lend_segment, take_segment, release, &lender};
    uint32_t users = 7;
    size_t count = 7;
    void *a = NULL, *b = NULL, *live[2] = {NULL, NULL};
    IS(OK, stratalloc_pool_users(handle, pool, &users));
    CHECK(users == 0);
    IS(BAD_POOL, stratalloc_pool_set_options(handle, pool, 1));
    IS(BAD_POOL, stratalloc_pool_live(handle, pool, NULL, 0, &count));
    IS(OK, stratalloc_pool_ensure(handle, pool, STRATALLOC_POOL_NO_SPLIT, &source));
    source.user = &second;
    IS(OK, stratalloc_pool_ensure(handle, pool, 0, &source));
    CHECK(second.released == 1 && lender.released == 0);
    IS(BAD_POOL, stratalloc_pool_ensure(handle, default_pool, 0, &source));
    IS(INVALID_ARGUMENT, stratalloc_pool_ensure(handle, pool, 4, &source));
    CHECK(second.released == 1);
    IS(OK, stratalloc_pool_users(handle, pool, &users));
    CHECK(users == 2);
    IS(OK, stratalloc_pool_set_options(handle, pool, STRATALLOC_POOL_USE_ON_OOM));
    IS(INVALID_ARGUMENT, stratalloc_pool_set_options(handle, pool, 4));

    stratalloc_stream_filter filter = {is_seven, release, &chooser};
    IS(OK, stratalloc_pool_scope_open_filter(handle, pool, &filter));
    IS(BAD_POOL, stratalloc_pool_scope_open_filter(handle, pool, &filter));
    CHECK(chooser.released == 0);
    IS(OK, stratalloc_allocate(handle, 4096, SEVEN, &a));
    IS(OK, stratalloc_allocate(handle, 4096, NULL, &b));
    CHECK(chooser.calls == 2 && lender.calls == 1 && a == lender.block);
    IS(OK, stratalloc_pool_scope_close(handle, pool));
    CHECK(chooser.released == 1);
    IS(BAD_POOL, stratalloc_pool_scope_close(handle, pool));
    IS(NOT_SUPPORTED, stratalloc_pool_set_options(handle, pool, STRATALLOC_POOL_NO_SPLIT));
    IS(OK, stratalloc_pool_set_options(handle, pool, 0));
    IS(OK, stratalloc_pool_live(handle, pool, live, 2, &count));
    CHECK(count == 1 && live[0] == a && live[1] == NULL);
    IS(OK, stratalloc_pool_live(handle, pool, NULL, 0, &count));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_pool_empty(handle, pool));
    CHECK(lender.calls == 1);
    IS(OK, stratalloc_pool_release(handle, pool));
    IS(OK, stratalloc_pool_release(handle, pool));
    IS(BAD_POOL, stratalloc_pool_empty(handle, pool));
    CHECK(lender.calls == 0 && lender.released == 1);
    IS(OK, stratalloc_destroy(handle));
    CHECK(lender.released == 1 && second.released == 1 && chooser.released == 1);
    handle = create("backend:cudaMallocAsync");
    IS(NOT_SUPPORTED, stratalloc_pool_ensure(handle, pool, 0, &source));
    IS(OK, stratalloc_pool_ensure(handle, pool, 1, NULL));
    IS(NOT_SUPPORTED, stratalloc_pool_set_options(handle, pool, 2));
    IS(OK, stratalloc_pool_set_options(handle, pool, 0));
    IS(OK, stratalloc_destroy(handle));
    CHECK(second.released == 1);
}

static void came(void *user, void *address, uint64_t size, void *stream) {
    CHECK(size == 4096 && stream == SEVEN && address != NULL);
    ((Book *)user)->calls++;
}

static void went(void *user, void *address, uint64_t size) {
    Book *book = user;
    CHECK(size == 4096 && address == book->block);
    /* The callbacks of a restore may use the allocator. */
    void *other = NULL;
    IS(OK, stratalloc_allocate(book->handle, 512, NULL, &other));
    IS(OK, stratalloc_free(book->handle, other));
    book->released++;
}

static void checkpoints(void) {
    uint64_t handle = create("backend:native"), other = create("");
    stratalloc_pool pool = {5, 0};
    stratalloc_checkpoint *checkpoint = NULL;
    void *a = NULL, *b = NULL, *c = NULL;
    IS(BAD_POOL, stratalloc_checkpoint_take(handle, pool, &checkpoint));
    IS(OK, stratalloc_pool_ensure(handle, pool, 0, NULL));
    IS(OK, stratalloc_pool_scope_open_stream(handle, pool, SEVEN));
    IS(OK, stratalloc_allocate(handle, 4096, SEVEN, &a));
    IS(OK, stratalloc_allocate(handle, 4096, SEVEN, &b));
    IS(OK, stratalloc_checkpoint_take(handle, pool, &checkpoint));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_free(handle, b));
    IS(OK, stratalloc_allocate(handle, 4096, SEVEN, &c));
    Book book = {.handle = handle, .block = c};
    IS(INVALID_ARGUMENT, stratalloc_checkpoint_restore(other, checkpoint, came, went, &book));
    IS(OK, stratalloc_checkpoint_restore(handle, checkpoint, came, went, &book));
    CHECK(book.calls == 2 && book.released == 1);
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_checkpoint_restore(handle, checkpoint, NULL, NULL, NULL));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_free(handle, b));
    IS(OK, stratalloc_checkpoint_drop(checkpoint));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_drop(checkpoint));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_restore(handle, checkpoint, came, went, &book));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_drop(NULL));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_drop((stratalloc_checkpoint *)&book));
    IS(INVALID_ARGUMENT, stratalloc_checkpoint_take(handle, pool, NULL));
    IS(OK, stratalloc_destroy(handle));
    IS(OK, stratalloc_destroy(other));
    handle = create("backend:cudaMallocAsync");
    IS(NOT_SUPPORTED, stratalloc_checkpoint_take(handle, pool, &checkpoint));
    IS(OK, stratalloc_destroy(handle));
}

static void add_segment(void *user, void *stream, int is_small, uint64_t bytes) {
    Book *book = user;
    CHECK(stream == SEVEN && !is_small);
    book->calls++;
    book->last += bytes;
}

static void sharing(void) {
    int real = strcmp(device, "host") == 0;
    uint64_t handle = create("expandable_segments:True,expandable_segments_ipc:True");
    uint64_t shared = 0, size = 0, offset = 7;
    char bytes[1 << 12];
    size_t needed = 0;
    void *a = NULL, *seen = NULL;
    Book book = {0};
    IS(OK, stratalloc_set_reserve_class(handle, SEVEN, "weights"));
    IS(OK, stratalloc_set_reserve_class(handle, SEVEN, NULL));
    IS(INVALID_ARGUMENT, stratalloc_set_reserve_class(handle, SEVEN, "\xff"));
    IS(OK, stratalloc_allocate(handle, 3 * MIB, SEVEN, &a));
    IS(OK, stratalloc_expandable_segments(handle, add_segment, &book));
    CHECK(book.calls == 1 && book.last >= 3 * MIB);
    IS(INVALID_ARGUMENT, stratalloc_expandable_segments(handle, NULL, &book));
    IS(OK, stratalloc_share(handle, a, NULL, 0, &needed, NULL));
    CHECK(needed > 16 && needed <= sizeof bytes);
    bytes[needed] = 7;
    IS(BUFFER_TOO_SMALL, stratalloc_share(handle, a, bytes, needed - 1, NULL, &offset));
    IS(INVALID_ARGUMENT, stratalloc_share(handle, a, NULL, needed, NULL, &offset));
    IS(UNKNOWN_ADDRESS, stratalloc_share(handle, (char *)a + 512, bytes, needed, NULL, &offset));
    CHECK(offset == 7);
    IS(OK, stratalloc_share(handle, a, bytes, needed, NULL, &offset));
    CHECK(offset == 0 && bytes[needed] == 7);
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, bytes, needed - 1, &shared, &seen, &size));
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, NULL, needed, &shared, &seen, &size));
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, bytes, SIZE_MAX, &shared, &seen, &size));
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, bytes, needed, NULL, &seen, &size));
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, bytes, needed, &shared, NULL, &size));
    IS(INVALID_ARGUMENT, stratalloc_open_shared(handle, bytes, needed, &shared, &seen, NULL));
    IS(OK, stratalloc_open_shared(handle, bytes, needed, &shared, &seen, &size));
    CHECK(size == 3 * MIB && seen != a && shared != 0);
    if (real) {
        memset(a, 0x5a, 3 * MIB);
        CHECK(((unsigned char *)seen)[3 * MIB - 1] == 0x5a);
    }
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_drop((stratalloc_checkpoint *)(size_t)shared));
    IS(OK, stratalloc_close_shared(shared));
    IS(UNKNOWN_HANDLE, stratalloc_close_shared(shared));
    IS(INVALID_ARGUMENT, stratalloc_enable_peer(handle, -1));
    CHECK(stratalloc_enable_peer(handle, 1) ==
          (real ? STRATALLOC_STATUS_NOT_SUPPORTED : STRATALLOC_STATUS_OK));
    IS(OK, stratalloc_destroy(handle));
    handle = create("backend:cudaMallocAsync");
    IS(NOT_SUPPORTED, stratalloc_share(handle, a, bytes, sizeof bytes, &needed, NULL));
    IS(NOT_SUPPORTED, stratalloc_expandable_segments(handle, add_segment, &book));
    IS(NOT_SUPPORTED, stratalloc_set_reserve_class(handle, NULL, NULL));
    IS(OK, stratalloc_destroy(handle));
}

static void see_entry(void *user, const stratalloc_entry *entry) {
    Book *book = user;
    /* A tracker may use the allocator, and is not called for its own requests. While the allocator is destroyed,
       trackers are called with entries for its segments, but the handle is already invalid. */
    void *other = NULL;
    if (entry->action != 0) return;
    IS(OK, stratalloc_allocate(book->handle, 512, NULL, &other));
    IS(OK, stratalloc_free(book->handle, other));
    book->calls++;
    CHECK(entry->size_bytes == 700 && entry->stream == SEVEN && entry->pool.user == 0);
    CHECK(strcmp(entry->compile_context, "[2/0]") == 0 && strcmp(entry->user_metadata, "epoch") == 0);
    CHECK(entry->time_us > 1600000000000000 && entry->stack == NULL);
}

static void see_failure(void *user, int ordinal, uint64_t size, uint64_t total, uint64_t free_bytes) {
    Book *book = user;
    CHECK(ordinal == 0 && size == 700 && total > 0 && free_bytes <= total);
    book->calls++;
}

static int give(void *user) {
    Book *book = user;
    book->calls++;
    if (book->block == NULL) return 0;
    IS(OK, stratalloc_free(book->handle, book->block));
    book->block = NULL;
    return 1;
}

static void hooks(const char *conf) {
    uint64_t handle = create(conf), id = 0, observer = 0, callback = 0;
    Book tracker = {.handle = handle}, failures = {0}, giver = {.handle = handle};
    char text[16];
    void *a = NULL;
    IS(OK, stratalloc_tracker_add(handle, see_entry, release, &tracker, &id));
    int on = 7;
    IS(OK, stratalloc_history_is_on(handle, &on));
    CHECK(on == 0);
    IS(OK, stratalloc_history_start(handle, 2, 1000, NULL, 0));
    IS(OK, stratalloc_history_is_on(handle, &on));
    CHECK(on == 1);
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_METADATA, text, sizeof text, NULL));
    CHECK(strcmp(text, "") == 0);
    IS(OK, stratalloc_history_set_metadata(handle, "epoch"));
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_METADATA, text, sizeof text, NULL));
    CHECK(strcmp(text, "epoch") == 0);
    IS(OK, stratalloc_compile_context_push("[2/0]"));
    IS(OK, stratalloc_allocate(handle, 700, SEVEN, &a));
    CHECK(tracker.calls == 1);
    IS(OK, stratalloc_tracker_remove(handle, id));
    CHECK(tracker.released == 1);
    IS(INVALID_ARGUMENT, stratalloc_tracker_remove(handle, id));
    IS(OK, stratalloc_free(handle, a));
    IS(OK, stratalloc_compile_context_pop());
    IS(INVALID_ARGUMENT, stratalloc_compile_context_pop());
    IS(INVALID_ARGUMENT, stratalloc_compile_context_push(NULL));
    CHECK(tracker.calls == 1);

    /* Hooks stay after a switch, until they are removed. */
    IS(OK, stratalloc_oom_observer_add(handle, see_failure, release, &failures, &observer));
    IS(OK, stratalloc_free_memory_callback_add(handle, give, release, &giver, &callback));
    IS(OK, stratalloc_empty_cache(handle));
    IS(OK, stratalloc_switch(handle, "backend:native,expandable_segments:True"));
    IS(OK, stratalloc_set_memory_fraction(handle, 0.0));
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, 700, NULL, &a));
    CHECK(failures.calls == 1 && giver.calls >= 1);
    IS(OK, stratalloc_set_memory_fraction(handle, 1.0));
    IS(OK, stratalloc_allocate(handle, 700, NULL, &giver.block));
    void *held = giver.block;
    IS(OK, stratalloc_allocate(handle, 4 * MIB, NULL, &a));
    CHECK(giver.block == NULL && held != NULL);
    IS(OK, stratalloc_hook_remove(handle, callback));
    IS(INVALID_ARGUMENT, stratalloc_hook_remove(handle, callback));
    CHECK(giver.released == 1);
    int before = giver.calls;
    IS(OK, stratalloc_set_memory_fraction(handle, 0.0));
    IS(OK, stratalloc_empty_cache(handle));
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, 700, SEVEN, &a));
    CHECK(failures.calls == 2 && giver.calls == before);
    IS(OK, stratalloc_hook_remove(handle, observer));
    CHECK(failures.released == 1);
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, 700, SEVEN, &a));
    CHECK(failures.calls == 2);
    /* The `user` of a hook that is not removed is released when the allocator is destroyed. */
    IS(OK, stratalloc_oom_observer_add(handle, see_failure, release, &failures, &observer));
    IS(OK, stratalloc_tracker_add(handle, see_entry, release, &tracker, &id));
    IS(OK, stratalloc_tracker_add(handle, see_entry, NULL, NULL, &id));
    IS(OK, stratalloc_destroy(handle));
    CHECK(failures.released == 2 && tracker.released == 2);
}

static void *gather(void *user) { return user; }
static void drop_stack(void *user, void *stack) { CHECK(user == stack); }
static size_t no_frames(void *user, void *stack, stratalloc_stack_frame *frames, size_t room) {
    CHECK(user == stack && frames != NULL && room > 0);
    return 0;
}

typedef struct {
    int segments, blocks, live, entries, stacks;
    void *stack, *address;
} Seen;

static void show_segment(void *user, const stratalloc_segment *segment) {
    Seen *seen = user;
    seen->segments++;
    CHECK(segment->total_bytes == 2 * MIB && segment->stream == SEVEN && !segment->is_large);
    CHECK(segment->requested_bytes == 700 && segment->allocated_bytes == 1024);
    CHECK(segment->active_bytes == 1024 && !segment->is_expandable);
    CHECK(segment->stack == seen->stack);
}

static void show_block(void *user, const stratalloc_block *block) {
    Seen *seen = user;
    CHECK(seen->segments > 0);
    seen->blocks++;
    if (block->state != 0) return;
    seen->live++;
    CHECK(block->address == (uint64_t)(size_t)seen->address && block->requested_bytes == 700);
    CHECK(block->size_bytes == 1024 && block->stack == seen->stack);
}

static void show_entry(void *user, const stratalloc_entry *entry) {
    Seen *seen = user;
    seen->entries++;
    seen->stacks += entry->stack == seen->stack;
}

static void snapshots(void) {
    uint64_t handle = create("");
    static int here;
    Seen seen = {.stack = &here};
    stratalloc_stack_source source = {gather, drop_stack, no_frames, &here};
    IS(OK, stratalloc_history_set_stack_source(handle, &source));
    IS(OK, stratalloc_history_start(handle, 3, 1000, NULL, 0));
    IS(OK, stratalloc_allocate(handle, 700, SEVEN, &seen.address));
    stratalloc_snapshot *all = NULL, *none = NULL;
    stratalloc_pool other = {0, 900009};
    IS(OK, stratalloc_snapshot_take(handle, NULL, 1, &all));
    IS(OK, stratalloc_snapshot_take(handle, &other, 1, &none));
    stratalloc_snapshot_visitor visitor = {show_segment, show_block, show_entry, &seen};
    IS(OK, stratalloc_snapshot_visit(none, &visitor));
    CHECK(seen.segments == 0 && seen.blocks == 0 && seen.entries == 0);
    /* A snapshot does not change, even after its allocator was destroyed. */
    IS(OK, stratalloc_free(handle, seen.address));
    IS(OK, stratalloc_destroy(handle));
    IS(OK, stratalloc_snapshot_visit(all, &visitor));
    CHECK(seen.segments == 1 && seen.blocks == 2 && seen.live == 1);
    CHECK(seen.entries == 2 && seen.stacks == 2);
    visitor.segment = NULL, visitor.block = NULL, visitor.entry = NULL;
    IS(OK, stratalloc_snapshot_visit(all, &visitor));
    IS(INVALID_ARGUMENT, stratalloc_snapshot_visit(all, NULL));
    IS(OK, stratalloc_snapshot_drop(all));
    IS(OK, stratalloc_snapshot_drop(none));
    IS(UNKNOWN_HANDLE, stratalloc_snapshot_drop(all));
    IS(UNKNOWN_HANDLE, stratalloc_snapshot_visit(all, &visitor));
    IS(UNKNOWN_HANDLE, stratalloc_snapshot_visit(NULL, &visitor));
    handle = create("");
    IS(OK, stratalloc_snapshot_take(handle, NULL, 0, &all));
    IS(OK, stratalloc_snapshot_drop(all));
    IS(INVALID_ARGUMENT, stratalloc_snapshot_take(handle, NULL, 0, NULL));
    IS(OK, stratalloc_destroy(handle));
}

static void refused_by_all(uint64_t handle) {
    uint64_t n = 0;
    uint32_t users;
    int on;
    double fraction;
    void *pointer = NULL;
    size_t count;
    Book book = {0};
    stratalloc_pool pool = {0, 1};
    stratalloc_cache_info_t info;
    stratalloc_segment_source source = {lend_segment, take_segment, release, &book};
    stratalloc_stream_filter filter = {is_seven, release, &book};
    stratalloc_checkpoint *checkpoint = NULL;
    stratalloc_snapshot *snapshot = NULL;
    IS(UNKNOWN_HANDLE, stratalloc_reset_peaks(handle));
    IS(UNKNOWN_HANDLE, stratalloc_reset_accumulated(handle));
    IS(UNKNOWN_HANDLE, stratalloc_memory_fraction(handle, &fraction));
    IS(UNKNOWN_HANDLE, stratalloc_memory_info(handle, &n, &n));
    IS(UNKNOWN_HANDLE, stratalloc_cache_info(handle, &info));
    IS(UNKNOWN_HANDLE, stratalloc_base_allocation(handle, &n, &pointer, &n));
    IS(UNKNOWN_HANDLE, stratalloc_usage(handle, &n, &n, &n, &n));
    IS(UNKNOWN_HANDLE, stratalloc_text_write(handle, STRATALLOC_TEXT_NAME, NULL, 0, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_text_write(handle, STRATALLOC_TEXT_LAYOUT, NULL, 0, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_set_caching(handle, 0));
    IS(UNKNOWN_HANDLE, stratalloc_caching(handle, &on));
    IS(UNKNOWN_HANDLE, stratalloc_pool_ensure(handle, pool, 0, &source));
    IS(UNKNOWN_HANDLE, stratalloc_pool_set_options(handle, pool, 0));
    IS(UNKNOWN_HANDLE, stratalloc_pool_users(handle, pool, &users));
    IS(UNKNOWN_HANDLE, stratalloc_pool_live(handle, pool, NULL, 0, &count));
    IS(UNKNOWN_HANDLE, stratalloc_pool_empty(handle, pool));
    IS(UNKNOWN_HANDLE, stratalloc_pool_scope_open_filter(handle, pool, &filter));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_take(handle, pool, &checkpoint));
    IS(UNKNOWN_HANDLE, stratalloc_checkpoint_restore(handle, NULL, came, went, &book));
    IS(UNKNOWN_HANDLE, stratalloc_share(handle, &n, NULL, 0, NULL, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_open_shared(handle, &n, 8, &n, &pointer, &n));
    IS(UNKNOWN_HANDLE, stratalloc_enable_peer(handle, 1));
    IS(UNKNOWN_HANDLE, stratalloc_expandable_segments(handle, add_segment, &book));
    IS(UNKNOWN_HANDLE, stratalloc_set_reserve_class(handle, NULL, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_history_is_on(handle, &on));
    IS(UNKNOWN_HANDLE, stratalloc_text_write(handle, STRATALLOC_TEXT_METADATA, NULL, 0, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_tracker_add(handle, see_entry, release, &book, &n));
    IS(UNKNOWN_HANDLE, stratalloc_tracker_remove(handle, 0));
    IS(UNKNOWN_HANDLE, stratalloc_oom_observer_add(handle, see_failure, release, &book, &n));
    IS(UNKNOWN_HANDLE, stratalloc_hook_remove(handle, 0));
    IS(UNKNOWN_HANDLE, stratalloc_free_memory_callback_add(handle, give, release, &book, &n));
    IS(UNKNOWN_HANDLE, stratalloc_hook_remove(handle, 0));
    IS(UNKNOWN_HANDLE, stratalloc_snapshot_take(handle, NULL, 1, &snapshot));
    IS(UNKNOWN_HANDLE, stratalloc_close_shared(handle));
    CHECK(book.released == 0 && checkpoint == NULL && snapshot == NULL);
}

static void nulls(void) {
    uint64_t handle = create(""), n = 0;
    void *pointer = NULL;
    Book book = {0};
    stratalloc_pool pool = {0, 900002};
    stratalloc_segment_source half = {lend_segment, NULL, release, &book};
    stratalloc_stream_filter empty = {NULL, release, &book};
    IS(INVALID_ARGUMENT, stratalloc_memory_fraction(handle, NULL));
    IS(INVALID_ARGUMENT, stratalloc_memory_info(handle, &n, NULL));
    IS(INVALID_ARGUMENT, stratalloc_memory_info(handle, NULL, &n));
    IS(INVALID_ARGUMENT, stratalloc_cache_info(handle, NULL));
    IS(INVALID_ARGUMENT, stratalloc_base_allocation(handle, &n, NULL, &n));
    IS(INVALID_ARGUMENT, stratalloc_base_allocation(handle, &n, &pointer, NULL));
    IS(UNKNOWN_ADDRESS, stratalloc_base_allocation(handle, NULL, &pointer, &n));
    IS(INVALID_ARGUMENT, stratalloc_usage(handle, NULL, &n, &n, &n));
    IS(INVALID_ARGUMENT, stratalloc_usage(handle, &n, &n, &n, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(handle, STRATALLOC_TEXT_NAME, NULL, 1, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(handle, STRATALLOC_TEXT_LAYOUT, NULL, 1, NULL));
    IS(INVALID_ARGUMENT, stratalloc_caching(handle, NULL));
    IS(INVALID_ARGUMENT, stratalloc_pool_ensure(handle, pool, 0, &half));
    IS(INVALID_ARGUMENT, stratalloc_pool_users(handle, pool, NULL));
    IS(INVALID_ARGUMENT, stratalloc_pool_live(handle, pool, &pointer, 1, NULL));
    IS(INVALID_ARGUMENT, stratalloc_pool_live(handle, pool, NULL, 1, (size_t *)&n));
    IS(INVALID_ARGUMENT, stratalloc_pool_scope_open_filter(handle, pool, NULL));
    IS(INVALID_ARGUMENT, stratalloc_pool_scope_open_filter(handle, pool, &empty));
    IS(INVALID_ARGUMENT, stratalloc_tracker_add(handle, NULL, release, &book, &n));
    IS(INVALID_ARGUMENT, stratalloc_tracker_add(handle, see_entry, release, &book, NULL));
    IS(INVALID_ARGUMENT, stratalloc_oom_observer_add(handle, NULL, release, &book, &n));
    IS(INVALID_ARGUMENT, stratalloc_free_memory_callback_add(handle, give, release, &book, NULL));
    IS(OK, stratalloc_destroy(handle));
    CHECK(book.released == 0);
    refused_by_all(handle);
}

/* The variable turns the cache off only in allocators that get their configuration from the environment. */
static void turned_off(void) {
    uint64_t handle = 0;
    int on = 7;
    IS(OK, stratalloc_create(NULL, device, &handle));
    IS(OK, stratalloc_caching(handle, &on));
    CHECK(on == 0);
    IS(OK, stratalloc_torch_handle(0, &handle));
    IS(OK, stratalloc_caching(handle, &on));
    CHECK(on == 0);
    void *block = stratalloc_torch_malloc(700, 0, NULL);
    CHECK(block != NULL && has(handle, "\"allocation.all.allocated\":0,"));
    stratalloc_torch_free(block, 700, 0, NULL);
    IS(UNKNOWN_ADDRESS, stratalloc_free(handle, block));
    IS(OK, stratalloc_caching(create("backend:native"), &on));
    CHECK(on == 1);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 || argc == 3);
    device = argv[1];
    if (argc == 3) {
        turned_off();
        puts("good");
        return 0;
    }
    figures("backend:native");
    figures("layers:[statistics]");
    caching();
    pools();
    checkpoints();
    sharing();
    hooks("backend:native");
    hooks("layers:[statistics,oom_retry:1]");
    snapshots();
    uint64_t wild[] = {0, 1, UINT64_MAX, (uint64_t)(size_t)&device};
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) refused_by_all(wild[i]);
    nulls();
    puts("good");
    return 0;
}
