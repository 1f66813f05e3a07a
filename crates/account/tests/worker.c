/* A library that finds the driver's functions as CUDA's libraries do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

typedef int (*Find)(const char *, void **, int, unsigned long long, int *);
typedef int (*Allocate)(uint64_t *, size_t);
typedef int (*Launch)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                      void **, void **);

static Find find;

static void *function(const char *name) {
    void *found = NULL;
    int result;
    return find(name, &found, 12000, 0, &result) ? NULL : found;
}

int worker_start(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    find = driver ? (Find)dlsym(driver, "cuGetProcAddress_v2") : NULL;
    /* A library may look the lookup up with itself. */
    if (find) find = (Find)function("cuGetProcAddress");
    return find && !function("cuNothing") ? 0 : 1;
}

int worker_allocate(size_t bytes) {
    uint64_t address;
    return ((Allocate)function("cuMemAlloc"))(&address, bytes);
}

int worker_launch(uintptr_t kernel) {
    return ((Launch)function("cuLaunchKernel"))(kernel, 1, 2, 3, 4, 5, 6, 7, (void *)8, (void **)9, (void **)10);
}

/* Replaces a function and calls the next one of that name, which is in the C library. */
pid_t getppid(void) { return ((pid_t(*)(void))dlsym(RTLD_NEXT, "getppid"))() + 1; }
