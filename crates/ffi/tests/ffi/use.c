/* A C program that uses every call in the normal way, on the device that its argument names. */
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
#define OK(call) CHECK((call) == STRATALLOC_STATUS_OK)

static int contains(uint64_t handle, const char *words) {
    size_t needed = 0;
    OK(stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, NULL, 0, &needed));
    char *json = malloc(needed);
    OK(stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, json, needed, NULL));
    CHECK(strlen(json) + 1 == needed && json[0] == '{');
    int found = strstr(json, words) != NULL;
    CHECK(stratalloc_text_write(handle, STRATALLOC_TEXT_STATISTICS, json, needed - 1, &needed) ==
          STRATALLOC_STATUS_BUFFER_TOO_SMALL);
    CHECK(json[0] == 0 && strlen(json) == 0);
    free(json);
    return found;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    uint64_t handle = 0;
    OK(stratalloc_check_conf("backend:native"));
    OK(stratalloc_create("backend:native", argv[1], &handle));
    CHECK(handle != 0);

    void *a = NULL, *b = NULL, *other = (void *)0x10;
    OK(stratalloc_allocate(handle, 1 << 20, NULL, &a));
    OK(stratalloc_allocate(handle, 64, other, &b));
    CHECK(a != NULL && b != NULL && a != b);
    CHECK(contains(handle, "\"allocation.all.current\":2,"));
    OK(stratalloc_record_stream(handle, a, other));
    OK(stratalloc_free(handle, a));
    OK(stratalloc_free(handle, b));
    OK(stratalloc_free(handle, NULL));
    OK(stratalloc_empty_cache(handle));
    CHECK(contains(handle, "\"reserved_bytes.all.current\":0,"));

    OK(stratalloc_set_conf(handle, "max_split_size_mb:64"));
    OK(stratalloc_set_memory_fraction(handle, 0.0));
    CHECK(stratalloc_allocate(handle, 64, NULL, &a) == STRATALLOC_STATUS_OUT_OF_MEMORY);
    char text[4096];
    CHECK(stratalloc_last_error(text, sizeof text) == strlen(text) + 1);
    CHECK(strstr(text, "out of memory on device 0") != NULL);
    OK(stratalloc_set_memory_fraction(handle, 1.0));

    OK(stratalloc_allocate(handle, 1 << 20, NULL, &a));
    OK(stratalloc_switch(handle, "backend:native,expandable_segments:True"));
    OK(stratalloc_allocate(handle, 1 << 20, other, &b));
    CHECK(a != b && contains(handle, "\"allocation.all.current\":2,"));
    CHECK(stratalloc_switch(handle, "backend:no_such") == STRATALLOC_STATUS_BAD_CONFIGURATION);
    OK(stratalloc_record_stream(handle, a, other));
    OK(stratalloc_free(handle, a));
    CHECK(stratalloc_free(handle, a) == STRATALLOC_STATUS_UNKNOWN_ADDRESS);
    OK(stratalloc_free(handle, b));
    OK(stratalloc_set_conf(handle, "backend:cudaMallocAsync"));
    OK(stratalloc_allocate(handle, 1 << 20, NULL, &a));
    OK(stratalloc_switch(handle, "backend:native"));
    OK(stratalloc_free(handle, a));
    OK(stratalloc_empty_cache(handle));
    CHECK(contains(handle, "\"reserved_bytes.all.current\":0,"));

    stratalloc_pool pool = {0, 0};
    OK(stratalloc_pool_create(handle, STRATALLOC_POOL_NO_SPLIT, &pool));
    CHECK(pool.capture == 0 && pool.user != 0);
    OK(stratalloc_pool_retain(handle, pool));
    OK(stratalloc_pool_scope_open_thread(handle, pool));
    CHECK(stratalloc_pool_scope_open_stream(handle, pool, other) == STRATALLOC_STATUS_BAD_POOL);
    CHECK(stratalloc_switch(handle, "") == STRATALLOC_STATUS_BAD_POOL);
    OK(stratalloc_allocate(handle, 4096, NULL, &a));
    OK(stratalloc_pool_scope_close(handle, pool));
    OK(stratalloc_pool_scope_open_stream(handle, pool, other));
    OK(stratalloc_allocate(handle, 4096, other, &b));
    OK(stratalloc_pool_scope_close(handle, pool));
    OK(stratalloc_free(handle, a));
    OK(stratalloc_free(handle, b));
    OK(stratalloc_empty_cache(handle));
    CHECK(!contains(handle, "\"reserved_bytes.all.current\":0,"));
    OK(stratalloc_pool_release(handle, pool));
    OK(stratalloc_pool_release(handle, pool));
    CHECK(contains(handle, "\"reserved_bytes.all.current\":0,"));
    CHECK(stratalloc_pool_release(handle, pool) == STRATALLOC_STATUS_BAD_POOL);

    size_t needed = 0;
    OK(stratalloc_text_write(handle, STRATALLOC_TEXT_SUMMARY, NULL, 0, &needed));
    CHECK(needed > 100);
    CHECK(strlen(stratalloc_version()) >= 5);
    OK(stratalloc_destroy(handle));
    puts("good");
    return 0;
}
