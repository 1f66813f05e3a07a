/* Memory that the library maps: large blocks of backend:cpu, and the contents of a tag. Runs under valgrind, which
   hides a part of what the system passes to a program. */
#include <stdio.h>

#include "stratalloc.h"

#define CHECK(condition)                                                               \
    do {                                                                               \
        if ((condition) != STRATALLOC_STATUS_OK) {                                     \
            fprintf(stderr, "%d: %s\n", __LINE__, #condition);                         \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

int main(void) {
    uint64_t handle;
    void *block;
    CHECK(stratalloc_create("backend:cpu", "host", &handle));
    CHECK(stratalloc_allocate(handle, 4 << 20, NULL, &block));
    CHECK(stratalloc_free(handle, block));
    CHECK(stratalloc_destroy(handle));
    stratalloc_pool pool;
    stratalloc_paused paused;
    CHECK(stratalloc_create("backend:native", "host", &handle));
    CHECK(stratalloc_tag_create(handle, "tag", 1, &pool));
    CHECK(stratalloc_pool_scope_open_thread(handle, pool));
    CHECK(stratalloc_allocate(handle, 4 << 20, NULL, &block));
    CHECK(stratalloc_pool_scope_close(handle, pool));
    CHECK(stratalloc_tag_pause(handle, pool, 0, NULL, 0, &paused));
    CHECK(stratalloc_destroy(handle));
    puts("good");
    return 0;
}
