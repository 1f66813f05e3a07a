/* Uses the driver through a library, and functions that it is linked with. Prints what was measured. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

void driver_make_context(void);
int driver_capture_mode(void);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuMemFree_v2(uint64_t);
int cuFuncSetAttribute(uintptr_t, int, int);
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);
int worker_start(void);
int worker_allocate(size_t);
int worker_launch(uintptr_t);

#define CHECK(condition)                                         \
    if (!(condition)) {                                          \
        fprintf(stderr, "line %d: %s\n", __LINE__, #condition);  \
        return 1;                                                \
    }

static void *allocate(void *bytes) { return worker_allocate((size_t)bytes) ? (void *)1 : NULL; }

int main(void) {
    CHECK(worker_start() == 0);
    /* Not measured, because there is no context. */
    CHECK(worker_allocate((size_t)100 * MIB) == 0);
    driver_make_context();
    CHECK(worker_allocate((size_t)30 * MIB) == 0);
    CHECK(cuMemFree_v2((size_t)10 * MIB) == 0);
    for (int launch = 0; launch < 3; launch++) CHECK(worker_launch(64) == 0);
    CHECK(worker_launch(128) == 0);
    /* The first launch is measured although another function has been called with the kernel. */
    CHECK(cuFuncSetAttribute(192, 8, 9) == 0 && worker_launch(192) == 0);
    void *graph;
    CHECK(cuGraphInstantiateWithFlags(&graph, NULL, 2) == 0);
    /* A lookup that is linked returns measured functions, too. */
    int (*free_memory)(uint64_t), result;
    CHECK(cuGetProcAddress_v2("cuMemFree", (void **)&free_memory, 12000, 0, &result) == 0);
    CHECK(free_memory((size_t)1 * MIB) == 0);
    struct Handle {
        char bytes[64];
    } handle;
    for (int at = 0; at < 64; at++) handle.bytes[at] = (char)(at + 1);
    int (*open_handle)(uint64_t *, struct Handle, unsigned);
    uint64_t address;
    CHECK(cuGetProcAddress_v2("cuIpcOpenMemHandle", (void **)&open_handle, 12000, 0, &result) == 0);
    CHECK(open_handle(&address, handle, 1) == 0);
    /* The memory of both calls is allocated before the first of them returns. */
    pthread_t threads[2];
    void *failed;
    for (int round = 0; round < 200; round++) {
        for (size_t at = 0; at < 2; at++)
            CHECK(pthread_create(&threads[at], NULL, allocate, (void *)((at + 5) * MIB + 1)) == 0);
        for (int at = 0; at < 2; at++) CHECK(pthread_join(threads[at], &failed) == 0 && !failed);
    }
    CHECK(driver_capture_mode() == 0);

    pid_t (*original)(void) = (pid_t(*)(void))dlsym(dlopen("libc.so.6", RTLD_NOW), "getppid");
    CHECK(original && getppid() == original() + 1);

    size_t (*json)(char *, size_t) = (size_t(*)(char *, size_t))dlsym(RTLD_DEFAULT, "stratalloc_account_json");
    CHECK(json);
    char text[4096] = "unwritten";
    size_t needed = json(text, 10);
    CHECK(text[0] == 'u' && needed <= sizeof text && json(text, sizeof text) == needed);
    puts(text);
    return 0;
}
