/* A C program with wrong calls: null pointers, invalid handles, wrong sizes, calls after the allocator was destroyed
   and from many threads. Every call returns a status. */
#include "stratalloc.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)
#define IS(expected, call) CHECK((call) == STRATALLOC_STATUS_##expected)

enum { THREADS = 8, ROUNDS = 2000 };

static uint64_t shared;

static void *hammer(void *argument) {
    uint64_t number = (uint64_t)(size_t)argument;
    for (int round = 0; round < ROUNDS; round++) {
        void *block = NULL;
        void *stream = (void *)(size_t)(number % 3);
        stratalloc_status status =
            stratalloc_allocate(shared, 1 + (number * 7919 + round * 613) % 300000, stream, &block);
        if (status == STRATALLOC_STATUS_OK) {
            /* Another thread may have destroyed the allocator since. */
            status = stratalloc_free(shared, (char *)block + 1);
            CHECK(status == STRATALLOC_STATUS_UNKNOWN_ADDRESS || status == STRATALLOC_STATUS_UNKNOWN_HANDLE);
            status = stratalloc_free(shared, block);
        }
        /* The first thread destroys the allocator while the others use it. */
        if (number == 0 && round == ROUNDS / 2) IS(OK, stratalloc_destroy(shared));
        CHECK(status == STRATALLOC_STATUS_OK || status == STRATALLOC_STATUS_UNKNOWN_HANDLE);
        if (status == STRATALLOC_STATUS_UNKNOWN_HANDLE) break;
    }
    return NULL;
}

static void refused_by_all(uint64_t handle) {
    void *block;
    size_t needed;
    stratalloc_pool pool = {0, 1};
    IS(UNKNOWN_HANDLE, stratalloc_allocate(handle, 1, NULL, &block));
    IS(UNKNOWN_HANDLE, stratalloc_free(handle, &block));
    IS(UNKNOWN_HANDLE, stratalloc_record_stream(handle, &block, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_empty_cache(handle));
    IS(UNKNOWN_HANDLE, stratalloc_set_memory_fraction(handle, 0.5));
    IS(UNKNOWN_HANDLE, stratalloc_set_conf(handle, ""));
    IS(UNKNOWN_HANDLE, stratalloc_switch(handle, ""));
    IS(UNKNOWN_HANDLE, stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, NULL, 0, &needed));
    IS(UNKNOWN_HANDLE, stratalloc_text_write(handle, STRATALLOC_TEXT_SUMMARY, NULL, 0, &needed));
    IS(UNKNOWN_HANDLE, stratalloc_pool_create(handle, 0, &pool));
    IS(UNKNOWN_HANDLE, stratalloc_pool_retain(handle, pool));
    IS(UNKNOWN_HANDLE, stratalloc_pool_release(handle, pool));
    IS(UNKNOWN_HANDLE, stratalloc_pool_scope_open_thread(handle, pool));
    IS(UNKNOWN_HANDLE, stratalloc_pool_scope_open_stream(handle, pool, NULL));
    IS(UNKNOWN_HANDLE, stratalloc_pool_scope_close(handle, pool));
    IS(UNKNOWN_HANDLE, stratalloc_destroy(handle));
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    const char *device = argv[1];
    uint64_t handle = 0;
    IS(INVALID_ARGUMENT, stratalloc_create("", device, NULL));
    IS(INVALID_ARGUMENT, stratalloc_create("", NULL, &handle));
    IS(INVALID_ARGUMENT, stratalloc_create("\xc3\x28", device, &handle));
    IS(INVALID_ARGUMENT, stratalloc_create("", "\xff\xfe", &handle));
    IS(INVALID_ARGUMENT, stratalloc_create("", "sim:99999999999999999999", &handle));
    IS(BAD_CONFIGURATION, stratalloc_create("max_split_size_mb:[[[", device, &handle));
    CHECK(handle == 0);
    IS(OK, stratalloc_create(NULL, device, &handle));

    uint64_t wild[] = {0, 1, UINT64_MAX, handle + 1, handle ^ ((uint64_t)1 << 32), handle << 32,
                       (uint64_t)(size_t)&handle};
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) refused_by_all(wild[i]);

    void *block = NULL;
    IS(INVALID_ARGUMENT, stratalloc_allocate(handle, 1, NULL, NULL));
    IS(OK, stratalloc_allocate(handle, 0, NULL, &block));
    CHECK(block == NULL);
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, UINT64_MAX, NULL, &block));
    IS(OUT_OF_MEMORY, stratalloc_allocate(handle, (uint64_t)1 << 63, (void *)-1, &block));
    IS(UNKNOWN_ADDRESS, stratalloc_free(handle, &handle));
    IS(UNKNOWN_ADDRESS, stratalloc_free(handle, (void *)-1));
    IS(UNKNOWN_ADDRESS, stratalloc_record_stream(handle, NULL, NULL));
    IS(INVALID_ARGUMENT, stratalloc_set_conf(handle, NULL));
    IS(INVALID_ARGUMENT, stratalloc_set_conf(handle, "\x80"));
    IS(BAD_CONFIGURATION, stratalloc_set_conf(handle, "no_such_key:1"));
    IS(INVALID_ARGUMENT, stratalloc_switch(handle, NULL));
    IS(INVALID_ARGUMENT, stratalloc_switch(handle, "\x80"));
    IS(BAD_CONFIGURATION, stratalloc_switch(handle, "no_such_key:1"));
    IS(NOT_SUPPORTED, stratalloc_switch(handle, "backend:cpu,cpu_numa_node:900"));
    double fractions[] = {-1.0, 1.5, 0.0 / 0.0, 1.0 / 0.0};
    for (int i = 0; i < 4; i++)
        IS(INVALID_ARGUMENT, stratalloc_set_memory_fraction(handle, fractions[i]));

    char small[4] = {7, 7, 7, 7};
    IS(INVALID_ARGUMENT, stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, NULL, 100, NULL));
    IS(BUFFER_TOO_SMALL, stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, small, 1, NULL));
    CHECK(small[0] == 0 && small[1] == 7);
    IS(BUFFER_TOO_SMALL, stratalloc_text_write(handle, STRATALLOC_TEXT_SUMMARY, small, 3, NULL));
    CHECK(small[3] == 7);
    IS(OK, stratalloc_text_write(handle, STRATALLOC_TEXT_SUMMARY, small, 0, NULL));
    IS(OK, stratalloc_text_write(0, STRATALLOC_TEXT_TORCH_SUMMARY, small, 0, NULL));
    IS(OK, stratalloc_torch_empty_cache());
    IS(INVALID_ARGUMENT, stratalloc_text_write(0, STRATALLOC_TEXT_TORCH_OOM_LINE + 1, NULL, 0, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(0, UINT32_MAX, NULL, 0, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(0, STRATALLOC_TEXT_TORCH_STATISTICS, NULL, 100, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(-1, STRATALLOC_TEXT_TORCH_STATISTICS, small, 4, NULL));
    IS(INVALID_ARGUMENT, stratalloc_text_write(128, STRATALLOC_TEXT_TORCH_SUMMARY, small, 0, NULL));
    IS(BUFFER_TOO_SMALL, stratalloc_text_write(127, STRATALLOC_TEXT_TORCH_SUMMARY, small, 4, NULL));
    CHECK(stratalloc_last_error(NULL, 5) == 0);
    CHECK(stratalloc_last_error(NULL, 0) > 1);
    CHECK(stratalloc_last_error(small, 2) > 2 && small[1] == 0);
    char misaligned[sizeof(void *) + 1];
    IS(OK, stratalloc_allocate(handle, 1, NULL, (void **)(misaligned + 1)));

    stratalloc_pool pools[] = {{0, 0}, {UINT64_MAX, UINT64_MAX}, {0, 77}, {5, 5}};
    for (size_t i = 0; i < 4; i++) {
        IS(BAD_POOL, stratalloc_pool_retain(handle, pools[i]));
        IS(BAD_POOL, stratalloc_pool_release(handle, pools[i]));
        IS(BAD_POOL, stratalloc_pool_scope_open_thread(handle, pools[i]));
        IS(BAD_POOL, stratalloc_pool_scope_open_stream(handle, pools[i], (void *)-1));
        IS(BAD_POOL, stratalloc_pool_scope_close(handle, pools[i]));
    }
    stratalloc_pool pool;
    IS(INVALID_ARGUMENT, stratalloc_pool_create(handle, 0, NULL));
    IS(INVALID_ARGUMENT, stratalloc_pool_create(handle, 4, &pool));
    IS(INVALID_ARGUMENT, stratalloc_pool_create(handle, UINT32_MAX, &pool));
    /* The allocator is destroyed with an open scope and live blocks. */
    IS(OK, stratalloc_pool_create(handle, 3, &pool));
    IS(OK, stratalloc_pool_scope_open_thread(handle, pool));
    IS(OK, stratalloc_pool_release(handle, pool));
    IS(OK, stratalloc_allocate(handle, 5 << 20, NULL, &block));
    IS(OK, stratalloc_destroy(handle));
    refused_by_all(handle);

    /* The old handle stays invalid after a new allocator is created. */
    IS(OK, stratalloc_create("", device, &shared));
    CHECK(shared != handle);
    refused_by_all(handle);
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, hammer, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    refused_by_all(shared);
    puts("good");
    return 0;
}
