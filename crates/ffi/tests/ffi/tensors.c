/* A C program that exports blocks as DLPack tensors and imports tensors, with right and with wrong calls. */
#include "stratalloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)
#define IS(expected, call) CHECK((call) == STRATALLOC_STATUS_##expected)

/* The structures of dlpack.h, version 1.0. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;
typedef struct Versioned {
    uint32_t major, minor;
    void *manager_ctx;
    void (*deleter)(struct Versioned *self);
    uint64_t flags;
    Tensor tensor;
} Versioned;
typedef struct Unversioned {
    Tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct Unversioned *self);
} Unversioned;

static uint64_t live(uint64_t handle) {
    uint64_t count;
    IS(OK, stratalloc_block_count(handle, &count));
    return count;
}

static int deleted;

static void delete(Versioned *self) {
    (void)self;
    deleted++;
}

int main(void) {
    uint64_t handle, block, imported, other = 0;
    stratalloc_tensor info, wanted, seen;
    void *managed = NULL, *second = NULL;
    IS(OK, stratalloc_create("backend:native", "host", &handle));
    IS(OK, stratalloc_owned_allocate(handle, 100, NULL, &block, &info));
    CHECK(info.size_bytes == 100 && info.device_type == 1 && info.dimensions == 1 && info.shape[0] == 100);
    CHECK(info.type_code == 1 && info.type_bits == 8 && info.type_lanes == 1 && !info.is_read_only);
    memset((void *)(size_t)info.address, 1, 100);

    /* 3 x 4 floats in both structures. */
    wanted = info;
    wanted.type_code = 2, wanted.type_bits = 32, wanted.dimensions = 2, wanted.shape[0] = 3, wanted.shape[1] = 4;
    IS(OK, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    IS(OK, stratalloc_tensor_export(block, &wanted, STRATALLOC_TENSOR_UNVERSIONED, NULL, &second));
    Versioned *versioned = managed;
    Unversioned *unversioned = second;
    CHECK(versioned->major == 1 && versioned->flags == 0);
    CHECK(memcmp(&versioned->tensor, &unversioned->tensor, offsetof(Tensor, shape)) == 0);
    CHECK((size_t)versioned->tensor.data == info.address && versioned->tensor.shape[1] == 4);
    CHECK(versioned->tensor.strides[0] == 4 && versioned->tensor.strides[1] == 1);

    /* Wrong calls change nothing. */
    managed = NULL;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, NULL, 0, NULL, &managed));
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, NULL));
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 4, NULL, &managed));
    IS(UNKNOWN_HANDLE, stratalloc_tensor_export(handle, &wanted, 0, NULL, &managed));
    wanted.shape[0] = 7;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    wanted.shape[0] = -1;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    wanted.shape[0] = INT64_MAX;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    wanted.dimensions = 65;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    wanted.dimensions = 0, wanted.type_bits = 256;
    IS(INVALID_ARGUMENT, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    wanted.type_bits = 4;
    IS(NOT_SUPPORTED, stratalloc_tensor_export(block, &wanted, 0, NULL, &managed));
    IS(INVALID_ARGUMENT, stratalloc_owned_allocate(handle, 1, NULL, NULL, &info));
    IS(INVALID_ARGUMENT, stratalloc_owned_allocate(handle, 1, NULL, &other, NULL));
    IS(OUT_OF_MEMORY, stratalloc_owned_allocate(handle, UINT64_MAX, NULL, &other, &info));
    IS(OUT_OF_MEMORY, stratalloc_owned_allocate(handle, (uint64_t)1 << 60, NULL, &other, &info));
    CHECK(managed == NULL && other == 0 && live(handle) == 1);

    /* An imported tensor is deleted at its release; the block is freed with its last tensor. */
    IS(INVALID_ARGUMENT, stratalloc_tensor_import(versioned, 0, NULL, &seen));
    IS(INVALID_ARGUMENT, stratalloc_tensor_import(versioned, 0, &imported, NULL));
    IS(INVALID_ARGUMENT, stratalloc_tensor_import(versioned, 2, &imported, &seen));
    IS(INVALID_ARGUMENT, stratalloc_tensor_import(NULL, 0, &imported, &seen));
    IS(OK, stratalloc_tensor_import(versioned, 0, &imported, &seen));
    CHECK(seen.address == info.address && seen.size_bytes == 48 && seen.dimensions == 2 && seen.shape[1] == 4);
    CHECK(seen.type_code == 2 && seen.type_bits == 32);
    IS(OK, stratalloc_owned_release(block));
    IS(UNKNOWN_HANDLE, stratalloc_owned_release(block));
    IS(UNKNOWN_HANDLE, stratalloc_tensor_export(block, &info, 0, NULL, &managed));
    IS(UNKNOWN_HANDLE, stratalloc_owned_release(imported));
    IS(OK, stratalloc_tensor_release(imported));
    IS(UNKNOWN_HANDLE, stratalloc_tensor_release(imported));
    CHECK(live(handle) == 1);
    unversioned->deleter(unversioned);
    CHECK(live(handle) == 0);

    /* A foreign tensor that is refused is deleted once, and so is one that is released. */
    int64_t shape = 5;
    Versioned foreign = {2, 0, NULL, delete, 1, {&shape, 1, 0, 1, 0, 64, 1, &shape, NULL, 0}};
    IS(INVALID_ARGUMENT, stratalloc_tensor_import(&foreign, 0, &imported, &seen));
    CHECK(deleted == 1);
    foreign.major = 1;
    IS(OK, stratalloc_tensor_import(&foreign, 0, &imported, &seen));
    CHECK(deleted == 1 && seen.size_bytes == 40 && seen.is_read_only == 1);
    IS(OK, stratalloc_tensor_release(imported));
    CHECK(deleted == 2);

    /* A block keeps a destroyed allocator. */
    IS(OK, stratalloc_owned_allocate(handle, 100, NULL, &block, &info));
    IS(OK, stratalloc_destroy(handle));
    memset((void *)(size_t)info.address, 2, 100);
    IS(OK, stratalloc_owned_release(block));
    IS(UNKNOWN_HANDLE, stratalloc_owned_allocate(handle, 100, NULL, &block, &info));
    IS(OK, stratalloc_create("", "sim", &handle));
    IS(NOT_SUPPORTED, stratalloc_owned_allocate(handle, 100, NULL, &block, &info));
    CHECK(live(handle) == 0);
    IS(OK, stratalloc_destroy(handle));
    puts("good");
    return 0;
}
