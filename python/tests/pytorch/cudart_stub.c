/* Replaces the CUDA runtime on machines without a GPU: two devices with host memory and without streams. Only for
   the test of PyTorch's allocator class. */
#include <stddef.h>
#include <string.h>

typedef int Error;
enum { Success = 0, InvalidDevice = 101, PeerAccessAlreadyEnabled = 704 };

static __thread int current;
static __thread Error last;
static int peers[2][2];
/* Set by the test: the stream that a capture includes. Read by it: numbers of calls. */
void *stub_capturing;
int stub_peer_copies, stub_waits, stub_synchronized;

Error cudaGetDeviceCount(int *count) { return *count = 2, Success; }
Error cudaGetDevice(int *device) { return *device = current, Success; }
Error cudaSetDevice(int device) {
    if (device < 0 || device > 1) return last = InvalidDevice;
    return current = device, Success;
}
Error cudaGetLastError(void) {
    Error error = last;
    return last = Success, error;
}
const char *cudaGetErrorString(Error error) { return error ? "the stub refuses" : "no error"; }
const char *cudaGetErrorName(Error error) { return error ? "cudaErrorStub" : "cudaSuccess"; }
Error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    return (void)kind, memmove(to, from, size), Success;
}
Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return (void)stream, cudaMemcpy(to, from, size, kind);
}
Error cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, void *stream) {
    (void)a, (void)b, (void)stream, stub_peer_copies++;
    return cudaMemcpy(to, from, size, 0);
}
Error cudaDeviceEnablePeerAccess(int device, unsigned flags) {
    (void)flags;
    if (peers[current][device]) return last = PeerAccessAlreadyEnabled;
    return peers[current][device] = 1, Success;
}
Error cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b, Success; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -1, Success;
}
Error cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static size_t next = 0x1000;
    (void)flags, (void)priority;
    return *stream = (void *)__sync_add_and_fetch(&next, 16), Success;
}
Error cudaStreamIsCapturing(void *stream, int *status) { return *status = stream && stream == stub_capturing, Success; }
Error cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return (void)stream, (void)event, (void)flags, stub_waits++, Success;
}
Error cudaDeviceSynchronize(void) { return stub_synchronized++, Success; }
Error cudaThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, Success; }

/* Functions that the test never calls. */
#define NOTHING(name) \
    Error name(void) { return Success; }
NOTHING(cudaDeviceGetDefaultMemPool)
NOTHING(cudaDriverGetVersion)
NOTHING(cudaEventCreateWithFlags)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventQuery)
NOTHING(cudaEventRecord)
NOTHING(cudaEventSynchronize)
NOTHING(cudaFree)
NOTHING(cudaFreeAsync)
NOTHING(cudaGetDeviceProperties)
NOTHING(cudaGetDriverEntryPointByVersion)
NOTHING(cudaGraphNodeGetDependencies)
NOTHING(cudaIpcCloseMemHandle)
NOTHING(cudaIpcGetMemHandle)
NOTHING(cudaIpcOpenMemHandle)
NOTHING(cudaMalloc)
NOTHING(cudaMallocAsync)
NOTHING(cudaMemGetInfo)
NOTHING(cudaMemPoolGetAttribute)
NOTHING(cudaMemPoolSetAccess)
NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaStreamGetCaptureInfo)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamSynchronize)
