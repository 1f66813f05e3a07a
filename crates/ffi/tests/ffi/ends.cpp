// A per-thread cache frees its block when the thread exits: in the destructor of a `thread_local`.
#include "stratalloc.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

static uint64_t handle;
static int tracked, ended;

static void check(stratalloc_status status, const char *what) {
    if (status != STRATALLOC_STATUS_OK) {
        char text[512];
        stratalloc_last_error(text, sizeof text);
        std::fprintf(stderr, "%s: %d %s\n", what, status, text);
        std::exit(1);
    }
}

struct Cache {
    void *block = nullptr;
    ~Cache() {
        check(stratalloc_free(handle, block), "free");
        check(stratalloc_empty_cache(handle), "empty_cache");
        ended++;
    }
};

static thread_local Cache cache;

int main(int, char **arguments) {
    uint64_t id;
    check(stratalloc_create("", arguments[1], &handle), "create");
    check(stratalloc_history_start(handle, 0, 1000, nullptr, 0), "history_start");
    auto tracker = [](void *, const stratalloc_entry *) { tracked++; };
    check(stratalloc_tracker_add(handle, tracker, nullptr, nullptr, &id), "tracker_add");
    std::thread([] {
        // Constructed before the library's own thread-locals, so it is destroyed after them.
        cache.block = nullptr;
        check(stratalloc_allocate(handle, 1 << 20, nullptr, &cache.block), "allocate");
    }).join();
    // The five entries: segment_alloc, alloc, free_requested, free_completed, segment_free.
    if (tracked != 5 || ended != 1) return 2;
    check(stratalloc_destroy(handle), "destroy");
    std::puts("good");
}
