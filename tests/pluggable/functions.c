// A library as users write it for PyTorch, with the required and the optional functions. Each function
// writes a line to a log. The addresses are made up, for devices without memory.
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

typedef struct {
    unsigned long long capture, user;
} pool_id;

static _Atomic uintptr_t next = 0x10000000000;

#define LOG(...)                        \
    do {                                \
        FILE *log = fopen(LOG_PATH, "a"); \
        if (log) {                      \
            fprintf(log, __VA_ARGS__);  \
            fclose(log);                \
        }                               \
    } while (0)

void *my_alloc(size_t size, int device, void *stream) {
    if (size > ((size_t)1 << 36)) return NULL;
    uintptr_t found = atomic_fetch_add(&next, (size + 511) / 512 * 512);
    LOG("alloc %zu %d %zu\n", size, device, (size_t)stream);
    return (void *)found;
}

void my_free(void *ptr, size_t size, int device, void *stream) {
    LOG("free %d %zu %d %zu\n", ptr != NULL, size, device, (size_t)stream);
}

void *quiet_alloc(size_t size, int device, void *stream) {
    (void)device, (void)stream;
    return size > ((size_t)1 << 36) ? NULL : (void *)atomic_fetch_add(&next, (size + 511) / 512 * 512);
}

void quiet_free(void *ptr, size_t size, int device, void *stream) {
    (void)ptr, (void)size, (void)device, (void)stream;
}

void my_init(int devices) { LOG("init %d\n", devices); }
void my_reset(void) { LOG("reset\n"); }
void my_fraction(double fraction, int device) { LOG("fraction %.2f %d\n", fraction, device); }
void my_record(void *ptr, void *stream) { LOG("record %d %zu\n", ptr != NULL, (size_t)stream); }

void *my_base(void *ptr, size_t *size) {
    *size = 4096;
    return (void *)((uintptr_t)ptr / 4096 * 4096);
}

void my_end(int device, pool_id id) { LOG("end %d %llu %llu\n", device, id.capture, id.user); }
void my_release(int device, pool_id id) { LOG("release %d %llu %llu\n", device, id.capture, id.user); }
void my_begin(int device, pool_id id, void *filter) {
    LOG("begin %d %llu %llu %d\n", device, id.capture, id.user, filter != NULL);
}

// Functions that return invalid addresses.
void *same_alloc(size_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    return (void *)0x20000000000;
}
void *odd_alloc(size_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    return (void *)0x20000000001;
}
void *last_alloc(size_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    return (void *)(UINTPTR_MAX - 15);
}
