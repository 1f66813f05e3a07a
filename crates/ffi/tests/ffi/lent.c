/* Threads add and remove functions, open and close scopes, and take snapshots and checkpoints. One of them destroys
   the allocator while the others use it. Each `user` is released exactly once. */
#include "stratalloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

enum { THREADS = 6, ROUNDS = 600, LIVES = 4 };

static uint64_t shared;
static atomic_int lent, released, entries;

static void use(uint64_t size, void *stream) {
    void *block = NULL;
    if (stratalloc_allocate(shared, size, stream, &block) == STRATALLOC_STATUS_OK)
        stratalloc_free(shared, block);
}

/* The library holds no lock here, so the allocator can be used. */
static void release(void *user) {
    CHECK(user == &lent);
    released++;
    use(512, NULL);
}

static void tracked(void *user, const stratalloc_entry *entry) {
    /* The size of an entry for a snapshot (action 7) is the active bytes, which may be 0. */
    CHECK((user == &lent || user == NULL) && (entry->size_bytes > 0 || entry->action == 7));
    entries++;
}

static void failed(void *user, int device, uint64_t size, uint64_t total, uint64_t free_bytes) {
    CHECK(user == &lent && device == 0 && size > 0 && free_bytes <= total);
}

static int free_memory(void *user) {
    CHECK(user == &lent);
    return 0;
}

static int accepts(void *user, void *stream) {
    CHECK(user == &lent);
    return stream == (void *)9;
}

static void scope(uint64_t number) {
    stratalloc_pool pool = {0, 900000 + number};
    stratalloc_stream_filter filter = {accepts, release, &lent};
    stratalloc_checkpoint *checkpoint = NULL;
    if (stratalloc_pool_ensure(shared, pool, 0, NULL) != STRATALLOC_STATUS_OK) return;
    if (stratalloc_pool_scope_open_filter(shared, pool, &filter) == STRATALLOC_STATUS_OK) {
        lent++;
        use(4096, (void *)9);
        if (stratalloc_checkpoint_take(shared, pool, &checkpoint) == STRATALLOC_STATUS_OK) {
            stratalloc_checkpoint_restore(shared, checkpoint, NULL, NULL, NULL);
            CHECK(stratalloc_checkpoint_drop(checkpoint) == STRATALLOC_STATUS_OK);
        }
        stratalloc_pool_scope_close(shared, pool);
    }
    stratalloc_pool_release(shared, pool);
}

static void read_state(void) {
    stratalloc_snapshot *snapshot = NULL;
    stratalloc_snapshot_visitor visitor = {NULL, NULL, tracked, NULL};
    if (stratalloc_snapshot_take(shared, NULL, 1, &snapshot) != STRATALLOC_STATUS_OK) return;
    CHECK(stratalloc_snapshot_visit(snapshot, &visitor) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_snapshot_drop(snapshot) == STRATALLOC_STATUS_OK);
}

static void *work(void *argument) {
    uint64_t number = (uint64_t)(size_t)argument, id = 0, n;
    for (int round = 0; round < ROUNDS; round++) {
        /* The `user` of a function that is not removed is released when the allocator is destroyed. */
        int keeps = round % 3 == 0;
        switch ((number + round) % 8) {
        case 0:
            if (stratalloc_tracker_add(shared, tracked, release, &lent, &id) != STRATALLOC_STATUS_OK) break;
            lent++;
            if (!keeps) stratalloc_tracker_remove(shared, id);
            break;
        case 1:
            if (stratalloc_oom_observer_add(shared, failed, release, &lent, &id) != STRATALLOC_STATUS_OK) break;
            lent++;
            if (!keeps) stratalloc_hook_remove(shared, id);
            use(UINT64_MAX / 2, NULL);
            break;
        case 2:
            if (stratalloc_free_memory_callback_add(shared, free_memory, release, &lent, &id) != STRATALLOC_STATUS_OK)
                break;
            lent++;
            if (!keeps) stratalloc_hook_remove(shared, id);
            break;
        case 3: scope(number); break;
        case 4:
            if (round % 20 == 4) read_state();
            break;
        case 5:
            stratalloc_set_caching(shared, round % 2);
            use(5000, NULL);
            break;
        case 6:
            stratalloc_usage(shared, &n, &n, &n, &n);
            stratalloc_reset_peaks(shared);
            break;
        default: use((uint64_t)1 << (10 + round % 12), (void *)(size_t)(number % 3));
        }
        if (number == 0 && round == ROUNDS / 2) stratalloc_destroy(shared);
    }
    return NULL;
}

static void release_of_another(void *user) {
    CHECK(user == &lent);
    released++;
}

/* `stratalloc_callbacks_end` stops only the functions that were added with the given release function. */
static void end(const char *device) {
    uint64_t id, inside = 7;
    CHECK(stratalloc_create("", device, &shared) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_history_start(shared, 0, 1000, NULL, 0) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_tracker_add(shared, tracked, release_of_another, &lent, &id) == STRATALLOC_STATUS_OK);
    int before = entries;
    use(512, NULL);
    CHECK(entries > before);
    CHECK(stratalloc_callbacks_end((const void *)release, 1000, &inside) == STRATALLOC_STATUS_OK && inside == 0);
    before = entries;
    use(512, NULL);
    CHECK(entries > before);
    CHECK(stratalloc_callbacks_end((const void *)release_of_another, 1000, NULL) != STRATALLOC_STATUS_OK);
    inside = 7;
    CHECK(stratalloc_callbacks_end((const void *)release_of_another, 1000, &inside) == STRATALLOC_STATUS_OK);
    CHECK(inside == 0);
    before = entries;
    int kept = released;
    use(512, NULL);
    CHECK(stratalloc_tracker_remove(shared, id) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_destroy(shared) == STRATALLOC_STATUS_OK);
    CHECK(entries == before && released == kept);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    for (int life = 0; life < LIVES; life++) {
        CHECK(stratalloc_create("", argv[1], &shared) == STRATALLOC_STATUS_OK);
        CHECK(stratalloc_history_start(shared, 0, 1000, NULL, 0) == STRATALLOC_STATUS_OK);
        pthread_t threads[THREADS];
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
        for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(lent == released && lent > 0 && entries > 0);
    }
    end(argv[1]);
    puts("good");
    return 0;
}
