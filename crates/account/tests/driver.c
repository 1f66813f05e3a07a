/* A stand-in for CUDA's driver with one device. It counts used bytes, and checks that the memory is only read
 * in the relaxed capture mode. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, NO_CONTEXT = 201, NOT_FOUND = 500, WRONG_MODE = 900, MIB = 1 << 20 };

static size_t used = (size_t)500 * MIB;
static int has_context;
static _Thread_local int capture_mode;
static uintptr_t launched;
/* Both threads of an overlapping call wait here until the memory of both is allocated. */
static pthread_barrier_t overlap;

__attribute__((constructor)) static void start(void) { pthread_barrier_init(&overlap, NULL, 2); }

void driver_make_context(void) { has_context = 1; }
int driver_capture_mode(void) { return capture_mode; }

int cuCtxGetDevice(int *device) {
    *device = 0;
    return has_context ? SUCCESS : NO_CONTEXT;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int former = capture_mode;
    capture_mode = *mode;
    *mode = former;
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    if (capture_mode != 2) return WRONG_MODE;
    *total_bytes = (size_t)80000 * MIB;
    *free_bytes = *total_bytes - __atomic_load_n(&used, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    *address = bytes;
    __atomic_add_fetch(&used, bytes, __ATOMIC_SEQ_CST);
    if (bytes % MIB == 1) pthread_barrier_wait(&overlap);
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    __atomic_sub_fetch(&used, address, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void **graph, void *from, unsigned long long flags) {
    *graph = from;
    __atomic_add_fetch(&used, flags * MIB, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

/* Takes as many arguments as any function that is measured. The first launch of a kernel loads it. */
int cuLaunchKernel(uintptr_t kernel, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    if (a != 1 || b != 2 || c != 3 || d != 4 || e != 5 || f != 6 || shared != 7 || stream != (void *)8 ||
        parameters != (void **)9 || extra != (void **)10)
        return NOT_FOUND;
    /* A later launch that allocates is not measured. */
    __atomic_add_fetch(&used, (kernel == launched ? 1 : 7) * (size_t)MIB, __ATOMIC_SEQ_CST);
    launched = kernel;
    return SUCCESS;
}

/* Does not load the kernel. */
int cuFuncSetAttribute(uintptr_t kernel, int attribute, int value) {
    return kernel && attribute == 8 && value == 9 ? SUCCESS : NOT_FOUND;
}

/* A function that is not measured, with a structure that is passed on the stack. */
struct Handle {
    char bytes[64];
};
int cuIpcOpenMemHandle_v2(uint64_t *address, struct Handle handle, unsigned flags) {
    *address = 0;
    for (int at = 0; at < 64; at++)
        if (handle.bytes[at] != at + 1) return NOT_FOUND;
    return flags == 1 ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *result) {
    *result = 0;
    if (version < 12000 || flags) return NOT_FOUND;
    if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    else if (!strcmp(name, "cuMemFree")) *function = (void *)cuMemFree_v2;
    else if (!strcmp(name, "cuMemAlloc")) *function = (void *)cuMemAlloc_v2;
    else if (!strcmp(name, "cuIpcOpenMemHandle")) *function = (void *)cuIpcOpenMemHandle_v2;
    else if (!strcmp(name, "cuLaunchKernel")) *function = (void *)cuLaunchKernel;
    else return NOT_FOUND;
    return SUCCESS;
}
