/* Replaces CUDA to record histories of PyTorch's own allocator: one device that counts memory and chooses
   addresses, without real memory. Compiled with the headers of the wheel's CUDA.

   STAND_IN_MEMORY_MIB   memory of the device
   STAND_IN_LATE         how many queries find an event not ready
   STAND_IN_NEW          if set, no address is used twice */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { Ok = 0, OutOfMemory = 2, InvalidValue = 1, NotSupported = 801, NotReady = 600 };
static const uint64_t page_bytes = 2ull << 20;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int last_error;

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}
static uint64_t memory_bytes(void) { return number("STAND_IN_MEMORY_MIB", 8192) << 20; }
static uint64_t whole_pages(uint64_t bytes) { return (bytes + page_bytes - 1) & ~(page_bytes - 1); }
static int result(int error) { return error ? last_error = error : Ok; }

/* Address ranges of memory and of reservations, sorted by address. */
typedef struct Range {
    struct Range *next;
    uint64_t start, end;
} Range;
typedef struct {
    uint64_t base, highest;
    Range *first;
} Space;
static Space memory = {.base = 0x7a0000000000}, reserved = {.base = 0x620000000000};
static uint64_t used_bytes;

/* Returns the lowest gap of this size, or the addresses after all that were used so far. */
static uint64_t occupy(Space *space, uint64_t bytes) {
    Range **link = &space->first, *range = malloc(sizeof *range);
    uint64_t start = getenv("STAND_IN_NEW") && space->highest ? space->highest : space->base;
    for (; *link && (*link)->start < start + bytes; link = &(*link)->next)
        if ((*link)->end > start) start = (*link)->end;
    *range = (Range){.next = *link, .start = start, .end = start + bytes};
    *link = range;
    if (range->end > space->highest) space->highest = range->end;
    return start;
}
/* Returns the size of the removed range. */
static uint64_t vacate(Space *space, uint64_t start) {
    for (Range **link = &space->first; *link; link = &(*link)->next)
        if ((*link)->start == start) {
            Range *range = *link;
            uint64_t bytes = range->end - start;
            *link = range->next;
            free(range);
            return bytes;
        }
    return 0;
}
static int take(uint64_t bytes) {
    if (bytes > memory_bytes() - used_bytes) return OutOfMemory;
    used_bytes += bytes;
    return Ok;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    pthread_mutex_lock(&mutex);
    int error = take(whole_pages(bytes));
    if (!error) *address = (void *)occupy(&memory, whole_pages(bytes));
    pthread_mutex_unlock(&mutex);
    return result(error);
}
cudaError_t cudaFree(void *address) {
    pthread_mutex_lock(&mutex);
    uint64_t bytes = address ? vacate(&memory, (uint64_t)address) : 0;
    used_bytes -= bytes;
    pthread_mutex_unlock(&mutex);
    return result(address && !bytes ? InvalidValue : Ok);
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = memory_bytes();
    *free_bytes = *total_bytes - used_bytes;
    return Ok;
}

/* The driver's functions for expandable segments. A physical allocation's handle is its size. */
static int reserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t hint, uint64_t flags) {
    (void)alignment, (void)hint, (void)flags;
    pthread_mutex_lock(&mutex);
    *address = occupy(&reserved, bytes);
    pthread_mutex_unlock(&mutex);
    return Ok;
}
static int unreserve(uint64_t address, size_t bytes) {
    (void)bytes;
    pthread_mutex_lock(&mutex);
    uint64_t had = vacate(&reserved, address);
    pthread_mutex_unlock(&mutex);
    return had ? Ok : InvalidValue;
}
static int create(uint64_t *piece, size_t bytes, const int *properties, uint64_t flags) {
    (void)flags;
    /* Fabric handles need hardware. */
    if (properties[1] & 8) return NotSupported;
    pthread_mutex_lock(&mutex);
    int error = take(bytes);
    pthread_mutex_unlock(&mutex);
    *piece = bytes;
    return error;
}
static int release(uint64_t piece) {
    pthread_mutex_lock(&mutex);
    used_bytes -= piece;
    pthread_mutex_unlock(&mutex);
    return Ok;
}
static int granularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    return *bytes = page_bytes, Ok;
}
static int error_text(int error, const char **text) { return (void)error, *text = "refused", Ok; }
static int device_of(int *device, int ordinal) { return *device = ordinal, Ok; }
/* Every feature but fabric handles. */
static int device_attribute(int *value, int attribute, int device) {
    return (void)device, *value = attribute != 128, Ok;
}
static int context(void **of_thread) { return *of_thread = &memory, Ok; }
static int nothing(void) { return Ok; }

static const struct {
    const char *name;
    void *function;
} driver[] = {
    {"cuMemAddressReserve", reserve},      {"cuMemAddressFree", unreserve},
    {"cuMemCreate", create},               {"cuMemRelease", release},
    {"cuMemGetAllocationGranularity", granularity},
    {"cuGetErrorString", error_text},      {"cuDeviceGet", device_of},
    {"cuDeviceGetAttribute", device_attribute}, {"cuCtxGetCurrent", context},
};
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    (void)version, (void)flags;
    *function = nothing;
    for (size_t at = 0; at < sizeof driver / sizeof *driver; at++)
        if (!strcmp(driver[at].name, name)) *function = driver[at].function;
    if (found) *found = cudaDriverEntryPointSuccess;
    return Ok;
}

/* An event completes after a number of queries. */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return (void)flags, *event = calloc(1, sizeof(uint64_t)), Ok;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), Ok; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return (void)stream, *(uint64_t *)event = number("STAND_IN_LATE", 0), Ok;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    uint64_t *left = (uint64_t *)event;
    return *left ? (--*left, result(NotReady)) : Ok;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return *(uint64_t *)event = 0, Ok; }

/* One capture at a time, of one stream. Nothing is recorded into its graph. */
static struct {
    int is_active;
    cudaStream_t stream;
    unsigned long long number;
} capture;
static const cudaGraph_t graph = (cudaGraph_t)0x7700;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode;
    capture.is_active = 1, capture.stream = stream, capture.number++;
    return Ok;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *of) {
    (void)stream;
    capture.is_active = 0, *of = graph;
    return Ok;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    int is_captured = capture.is_active && stream == capture.stream;
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return Ok;
}
#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData **edges,
#else
#define EDGES
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *number, cudaGraph_t *of, const cudaGraphNode_t **ends,
                                     EDGES size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (number) *number = capture.number;
    if (of) *of = graph;
    if (ends) *ends = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (count) *count = 0;
    return Ok;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t of, unsigned long long flags) {
    return (void)of, (void)flags, *made = (cudaGraphExec_t)0x7800, Ok;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t of, unsigned long long flags) {
    return cudaGraphInstantiate(made, of, flags);
}
/* A graph without nodes is reported to the user with a warning. */
cudaError_t cudaGraphGetNodes(cudaGraph_t of, cudaGraphNode_t *nodes, size_t *count) {
    return (void)of, (void)nodes, *count = 1, Ok;
}

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, Ok; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, Ok; }
cudaError_t cudaGetLastError(void) {
    int error = last_error;
    return last_error = Ok, error;
}
const char *cudaGetErrorString(cudaError_t error) { return error == OutOfMemory ? "out of memory" : "refused"; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    (void)device;
    memset(of, 0, sizeof *of);
    strcpy(of->name, "stand-in");
    of->totalGlobalMem = memory_bytes();
    of->major = 9, of->multiProcessorCount = 100, of->warpSize = 32;
    of->maxThreadsPerBlock = 1024, of->maxThreadsPerMultiProcessor = 2048;
    return Ok;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return (void)attribute, (void)device, *value = 1, Ok;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -1, Ok; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static uintptr_t last = 0x5000;
    (void)flags, (void)priority;
    return *stream = (cudaStream_t)(last += 64), Ok;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, Ok; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, Ok; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { return (void)from, (void)to, *can = 0, Ok; }
