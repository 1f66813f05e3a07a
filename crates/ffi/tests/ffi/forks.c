/* Forks while three threads call the library: every child creates its own allocators, and none hangs.
   Arguments: the device for handles, and the number of children. */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <pthread.h>

#include "stratalloc.h"

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            char text[512];                                                            \
            stratalloc_last_error(text, sizeof text);                                  \
            fprintf(stderr, "%s:%d: %s; %s\n", __FILE__, __LINE__, #condition, text);  \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static const char *confs[] = {
    "backend:native,layers:[statistics]",
    "backend:native,expandable_segments:True,max_split_size_mb:64,max_split_size_mb:128",
    "backend:cpu",
};
static const char *device;
static uint64_t shared;
static stratalloc_pool pool;
static void *inherited;
static atomic_int ended;

static void use(uint64_t handle) {
    void *block = NULL;
    CHECK(stratalloc_allocate(handle, 4096, NULL, &block) == STRATALLOC_STATUS_OK && block);
    CHECK(stratalloc_free(handle, block) == STRATALLOC_STATUS_OK);
}

static void make_and_use(const char *conf) {
    uint64_t handle = 0;
    CHECK(stratalloc_create(conf, device, &handle) == STRATALLOC_STATUS_OK);
    use(handle);
    CHECK(stratalloc_destroy(handle) == STRATALLOC_STATUS_OK);
}

static void use_as_pytorch(int ordinal) {
    void *block = stratalloc_torch_malloc(4096, ordinal, NULL);
    CHECK(block);
    stratalloc_torch_free(block, 4096, ordinal, NULL);
}

static void *call(void *conf) {
    while (!atomic_load(&ended)) {
        make_and_use(conf);
        for (int i = 0; i < 100; i++) {
            use(shared);
            use_as_pytorch(0);
        }
        CHECK(stratalloc_switch(shared, "backend:native") == STRATALLOC_STATUS_OK);
    }
    return NULL;
}

static void live_as_child(void) {
    /* Ends a child that hangs. Other children need far less time. */
    alarm(120);
    void *block = NULL;
    CHECK(stratalloc_allocate(shared, 4096, NULL, &block) == STRATALLOC_STATUS_UNKNOWN_HANDLE);
    char message[300];
    stratalloc_last_error(message, sizeof message);
    CHECK(strstr(message, "belongs to the process that forked this one") != NULL);
    /* The end of a block of code that began in the parent. */
    CHECK(stratalloc_pool_scope_close(shared, pool) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_pool_release(shared, pool) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_destroy(shared) == STRATALLOC_STATUS_OK);
    CHECK(stratalloc_destroy(shared + (1 << 20)) == STRATALLOC_STATUS_UNKNOWN_HANDLE);
    stratalloc_torch_free(inherited, 4096, 0, NULL);
    for (int i = 0; i < 3; i++) make_and_use(confs[i]);
    for (int i = 0; i < 2; i++) use_as_pytorch(i);
    exit(0);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    device = argv[1];
    int children = atoi(argv[2]), hung = 0, failed = 0;
    CHECK(stratalloc_create("backend:native", device, &shared) == STRATALLOC_STATUS_OK);
    use(shared);
    CHECK((inherited = stratalloc_torch_malloc(4096, 0, NULL)) != NULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, call, (void *)confs[i]) == 0);
    for (int i = 0; i < children && hung < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) live_as_child();
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) hung++;
        else if (status != 0) failed++;
    }
    atomic_store(&ended, 1);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    stratalloc_torch_free(inherited, 4096, 0, NULL);
    if (hung || failed) fprintf(stderr, "of %d children %d hung and %d failed\n", children, hung, failed);
    else puts("good");
    return hung || failed;
}
