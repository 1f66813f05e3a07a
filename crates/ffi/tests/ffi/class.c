/* A C program that calls the functions for a subclass of PyTorch's allocator: pointers without a device, users of
   pools that outlive scopes, names before a device is open. STRATALLOC_DEVICE is the kind of device. */
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

static const uint64_t MIB = 1 << 20;

static void *allocate(int device, uint64_t bytes) {
    void *block = NULL;
    IS(OK, stratalloc_torch_allocate(device, bytes, NULL, &block));
    return block;
}

static void blocks(int other) {
    int device = 7;
    uint64_t bytes = 7;
    void *near = allocate(0, MIB), *far = allocate(other, 3 * MIB);
    CHECK(near && far && allocate(0, 0) == NULL);
    /* The block's device is found and stored, whichever device is passed as likely. */
    IS(OK, stratalloc_torch_delete(far, 0, &device, &bytes));
    CHECK(device == other && bytes == 3 * MIB);
    IS(OK, stratalloc_torch_delete(near, -5, &device, &bytes));
    CHECK(device == 0 && bytes == MIB);
    IS(OK, stratalloc_torch_delete(NULL, 0, &device, &bytes));
    CHECK(device == -1 && bytes == 0);
    IS(UNKNOWN_ADDRESS, stratalloc_torch_delete(near, 0, &device, &bytes));
    IS(UNKNOWN_ADDRESS, stratalloc_torch_delete(&device, 1 << 30, NULL, NULL));
    IS(OK, stratalloc_torch_delete(allocate(other, 1), 1, NULL, NULL));
    void *block = &device;
    IS(INVALID_ARGUMENT, stratalloc_torch_allocate(0, 1, NULL, NULL));
    IS(INVALID_ARGUMENT, stratalloc_torch_allocate(-1, 1, NULL, &block));
    IS(OUT_OF_MEMORY, stratalloc_torch_allocate(0, 1ULL << 55, NULL, &block));
    CHECK(block == &device);
}

static int released;
static int all(void *user, void *stream) { return (void)user, (void)stream, 1; }
static void release(void *user) { (void)user, released++; }

static void pools(uint64_t handle) {
    stratalloc_pool pool = {7, 0}, unknown = {8, 0}, none = {0, 0};
    stratalloc_stream_filter filter = {all, release, NULL}, empty = {NULL, release, NULL};
    uint32_t users = 9;
    /* The pool is created, and its user stays when the scope is closed. */
    IS(OK, stratalloc_torch_scope_open(handle, pool, &filter));
    IS(OK, stratalloc_pool_users(handle, pool, &users));
    CHECK(users == 1);
    IS(BAD_POOL, stratalloc_torch_scope_open(handle, pool, &filter));
    void *inside = allocate(0, 1);
    IS(OK, stratalloc_torch_scope_close(handle, pool));
    CHECK(released == 1);
    IS(BAD_POOL, stratalloc_torch_scope_close(handle, pool));
    IS(OK, stratalloc_pool_users(handle, pool, &users));
    CHECK(users == 1);
    size_t live = 0;
    IS(OK, stratalloc_pool_live(handle, pool, NULL, 0, &live));
    CHECK(live == 1);
    IS(OK, stratalloc_torch_delete(inside, 0, NULL, NULL));
    /* The pool's memory stays until the pool is emptied. */
    IS(OK, stratalloc_torch_pool_release(handle, pool));
    IS(BAD_POOL, stratalloc_torch_pool_release(handle, pool));
    IS(OK, stratalloc_pool_users(handle, pool, &users));
    CHECK(users == 0);
    IS(OK, stratalloc_pool_empty(handle, pool));
    IS(BAD_POOL, stratalloc_torch_scope_close(handle, unknown));
    IS(BAD_POOL, stratalloc_torch_pool_release(handle, unknown));
    IS(BAD_POOL, stratalloc_torch_scope_open(handle, none, &filter));
    IS(INVALID_ARGUMENT, stratalloc_torch_scope_open(handle, pool, NULL));
    IS(INVALID_ARGUMENT, stratalloc_torch_scope_open(handle, pool, &empty));
    IS(UNKNOWN_HANDLE, stratalloc_torch_scope_open(99, pool, &filter));
    IS(UNKNOWN_HANDLE, stratalloc_torch_scope_close(99, pool));
    IS(UNKNOWN_HANDLE, stratalloc_torch_pool_release(99, pool));
    CHECK(released == 1);
}

static void names(const char *expected) {
    char text[4096];
    size_t needed = 0;
    IS(OK, stratalloc_text_write(0, STRATALLOC_TEXT_TORCH_NAME, text, sizeof text, &needed));
    CHECK(!strcmp(text, expected) && needed == strlen(expected) + 1);
    IS(BUFFER_TOO_SMALL, stratalloc_text_write(0, STRATALLOC_TEXT_TORCH_NAME, text, 2, &needed));
    IS(INVALID_ARGUMENT, stratalloc_text_write(-1, STRATALLOC_TEXT_TORCH_NAME, text, sizeof text, &needed));
    IS(OK, stratalloc_text_write(0, STRATALLOC_TEXT_CONF_KEYS, text, sizeof text, &needed));
    CHECK(strstr(text, "max_split_size_mb,") && strstr(text, "layers") && !strchr(text, ' '));
}

int main(void) {
    /* No device is open yet, and reading the name opens none. */
    names("native");
    uint64_t handle = 0;
    IS(OK, stratalloc_torch_share_pages(1));
    IS(INVALID_ARGUMENT, stratalloc_torch_version(0, 13));
    IS(OK, stratalloc_torch_version(2, 13));
    IS(OK, stratalloc_torch_handle(0, &handle));
    int on_host = !strcmp(getenv("STRATALLOC_DEVICE"), "host");
    /* Simulated devices use the same addresses, so the test uses a second device only on `host`. */
    blocks(on_host);
    pools(handle);
    if (on_host) {
        /* Pages can be shared, because `stratalloc_torch_share_pages` has set this default. */
        IS(OK, stratalloc_set_conf(handle, "expandable_segments:True"));
        IS(OK, stratalloc_empty_cache(handle));
        void *block = allocate(0, MIB);
        size_t needed = 0;
        IS(OK, stratalloc_share(handle, block, NULL, 0, &needed, NULL));
        CHECK(needed > 0);
        IS(OK, stratalloc_torch_delete(block, 0, NULL, NULL));
    }
    IS(OK, stratalloc_switch(handle, "backend:cudaMallocAsync"));
    names("cudaMallocAsync");
    /* No leak report was requested, so recording stops and no stacks are kept. */
    int on = 7;
    IS(OK, stratalloc_history_start(handle, 3, 10, NULL, 0));
    IS(OK, stratalloc_torch_drop_stack_sources());
    IS(OK, stratalloc_history_is_on(handle, &on));
    CHECK(on == 0);
    IS(OK, stratalloc_history_drop_stack_source(handle));
    IS(UNKNOWN_HANDLE, stratalloc_history_drop_stack_source(handle + 77));
    puts("good");
    return 0;
}
