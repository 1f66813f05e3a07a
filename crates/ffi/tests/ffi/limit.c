/* Threads share a limit. They never allocate more than the limit in total, and no thread is refused its share. After
   they have ended, one request can have all bytes of the limit. Arguments: configuration, device, limit in bytes, threads. */
#include "stratalloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 1500, BLOCKS = 64, GENERATIONS = 3, THREADS_MAX = 64 };

static uint64_t handle, limit, share;
static atomic_long held, above, refused;

static void *work(void *number) {
    uint64_t random = (uint64_t)(size_t)number * 2654435761u + 12345, own = 0, sizes[BLOCKS];
    void *blocks[BLOCKS];
    int count = 0, fills = 1;
    for (int step = 0; step < STEPS || count; step++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t bytes = (random >> 33) % (share / 8) + 1;
        fills = step < STEPS && (fills || !count) && count < BLOCKS && own + bytes <= share;
        if (fills) {
            if (stratalloc_allocate(handle, bytes, NULL, &blocks[count]) != STRATALLOC_STATUS_OK) {
                refused++;
                continue;
            }
            if ((uint64_t)(atomic_fetch_add(&held, (long)bytes) + (long)bytes) > limit) above++;
            sizes[count++] = bytes;
            own += bytes;
        } else if (count) {
            count--;
            own -= sizes[count];
            atomic_fetch_sub(&held, (long)sizes[count]);
            if (stratalloc_free(handle, blocks[count]) != STRATALLOC_STATUS_OK) exit(2);
        }
    }
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS_MAX];
    void *all, *more;
    if (count != 5) return 3;
    size_t thread_count = (size_t)atoi(arguments[4]);
    limit = strtoull(arguments[3], NULL, 0);
    share = limit / thread_count;
    if (thread_count > THREADS_MAX) return 4;
    if (stratalloc_create(arguments[1], arguments[2], &handle) != STRATALLOC_STATUS_OK) return 5;
    for (size_t generation = 0; generation < GENERATIONS; generation++) {
        for (size_t i = 0; i < thread_count; i++)
            pthread_create(&threads[i], NULL, work, (void *)(generation * 1000 + i));
        for (size_t i = 0; i < thread_count; i++) pthread_join(threads[i], NULL);
        if (stratalloc_allocate(handle, limit, NULL, &all) != STRATALLOC_STATUS_OK) return 6;
        if (stratalloc_allocate(handle, 1, NULL, &more) != STRATALLOC_STATUS_OUT_OF_MEMORY) return 7;
        if (stratalloc_free(handle, all) != STRATALLOC_STATUS_OK) return 8;
    }
    if (above || refused) return 9;
    if (stratalloc_destroy(handle) != STRATALLOC_STATUS_OK) return 10;
    puts("good");
    return 0;
}
