/* A thread uses the library in the destructor of a pthread key, after the library's thread-locals were destroyed.
   Every valid call works. Arguments: the configuration, the device, and the sum of the features that are on (see the
   enum below). */
#include "stratalloc.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                          \
    do {                                                                                  \
        stratalloc_status got = (call);                                                   \
        if (got != STRATALLOC_STATUS_OK) {                                                \
            char text[512];                                                               \
            stratalloc_last_error(text, sizeof text);                                     \
            fprintf(stderr, "%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, got, text);  \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

enum { BLOCKS = 8, HISTORY = 1, CALLBACKS = 2, STACKS = 4, NAMES = 8 };

static uint64_t handle;
static pthread_key_t key;
static int mode, tracked, failed, called_back, gathered, released, ended;

struct cache {
    void *blocks[BLOCKS];
    int rounds;
};

static void use(uint64_t bytes) {
    void *block = NULL;
    OK(stratalloc_allocate(handle, bytes, NULL, &block));
    OK(stratalloc_free(handle, block));
}

static void end(void *of_thread) {
    struct cache *cache = of_thread;
    void *block = NULL;
    stratalloc_pool pool;
    /* A destructor that sets its key again is called again: the last time after all other destructors. */
    if (cache->rounds++ < 3) {
        pthread_setspecific(key, cache);
        return;
    }
    for (int i = 0; i < BLOCKS; i++) OK(stratalloc_free(handle, cache->blocks[i]));
    OK(stratalloc_context_push("late"));
    OK(stratalloc_compile_context_push("late"));
    use(5000);
    use(4 << 20);
    OK(stratalloc_compile_context_pop());
    OK(stratalloc_context_pop());
    if (stratalloc_context_pop() != STRATALLOC_STATUS_INVALID_ARGUMENT) exit(2);
    OK(stratalloc_empty_cache(handle));
    if (stratalloc_allocate(handle, 1ull << 60, NULL, &block) != STRATALLOC_STATUS_OUT_OF_MEMORY) exit(3);
    if (stratalloc_allocate(handle, 1ull << 46, NULL, &block) != STRATALLOC_STATUS_OUT_OF_MEMORY) exit(4);
    stratalloc_status made = stratalloc_pool_create(handle, 0, &pool);
    if (made != STRATALLOC_STATUS_NOT_SUPPORTED) {
        OK(made);
        OK(stratalloc_pool_scope_open_thread(handle, pool));
        use(5000);
        OK(stratalloc_pool_scope_close(handle, pool));
        OK(stratalloc_pool_release(handle, pool));
    }
    OK(stratalloc_context_push("left open"));
    free(cache);
    ended++;
}

static void *work(void *unused) {
    struct cache *cache = calloc(1, sizeof *cache);
    pthread_setspecific(key, cache);
    if (mode & NAMES) OK(stratalloc_context_push("early"));
    for (int i = 0; i < BLOCKS; i++)
        OK(stratalloc_allocate(handle, 3000u << (2 * i), NULL, &cache->blocks[i]));
    if (mode & NAMES) OK(stratalloc_context_pop());
    return unused;
}

static void tracker(void *user, const stratalloc_entry *entry) {
    tracked += user == NULL && entry != NULL;
}

static void observer(void *user, int device, uint64_t size, uint64_t total, uint64_t device_free) {
    failed += user == NULL && device == 0 && size > 0 && device_free <= total;
}

static int callback(void *user) {
    called_back += user == NULL;
    return 0;
}

static void *gather(void *user) {
    gathered++;
    return user ? user : malloc(8);
}

static void release(void *user, void *stack) {
    released += user == NULL;
    free(stack);
}

static size_t frames(void *user, void *stack, stratalloc_stack_frame *to, size_t room) {
    if (user || !stack || !room) return 0;
    to[0] = (stratalloc_stack_frame){"function", "file", 3};
    return 1;
}

int main(int count, char **arguments) {
    uint64_t id;
    stratalloc_stack_source source = {gather, release, frames, NULL};
    if (count != 4) return 5;
    mode = atoi(arguments[3]);
    pthread_key_create(&key, end);
    OK(stratalloc_create(arguments[1], arguments[2], &handle));
    if (mode & HISTORY) OK(stratalloc_history_start(handle, 3, 1000, NULL, 0));
    if (mode & STACKS) OK(stratalloc_history_set_stack_source(handle, &source));
    if (mode & CALLBACKS) {
        OK(stratalloc_tracker_add(handle, tracker, NULL, NULL, &id));
        OK(stratalloc_oom_observer_add(handle, observer, NULL, NULL, &id));
        OK(stratalloc_free_memory_callback_add(handle, callback, NULL, NULL, &id));
    }
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, work, NULL);
        pthread_join(thread, NULL);
    }
    if (ended != 3) return 6;
    if ((mode & CALLBACKS) && (failed < 3 || called_back < 3)) return 7;
    if ((mode & HISTORY) && (mode & CALLBACKS) && tracked < 3 * (3 * BLOCKS + 6)) return 8;
    uint64_t allocated, ignored[3];
    OK(stratalloc_usage(handle, &allocated, ignored, ignored + 1, ignored + 2));
    if (allocated) return 9;
    OK(stratalloc_destroy(handle));
    if (gathered != released || ((mode & HISTORY) && (mode & STACKS) && !gathered)) return 10;
    puts("good");
    return 0;
}
