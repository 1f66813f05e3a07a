// An allocator for TensorRT over the process's allocator of a device, for C++ programs. Link with libstratalloc.
//
//     stratalloc::tensorrt_allocator allocator{0};
//     runtime->setGpuAllocator(&allocator);
//
// It must live longer than the objects that use it. For TensorRT from 10.0 on.
#pragma once

#include <cstdint>

#include <NvInferRuntime.h>

#include "stratalloc.h"

namespace stratalloc {

// Thread-safe. If a call fails, `stratalloc_last_error` has the message.
class tensorrt_allocator final : public nvinfer1::IGpuAsyncAllocator {
 public:
  explicit tensorrt_allocator(int device) : device_{device} {}

  // The alignment is met by every block: TensorRT asks for at most that of `cudaMalloc`.
  void* allocateAsync(
      uint64_t size,
      uint64_t /*alignment*/,
      nvinfer1::AllocatorFlags /*flags*/,
      cudaStream_t stream) noexcept override {
    return stratalloc_library_malloc("TensorRT", size, device_, stream);
  }

  bool deallocateAsync(void* memory, cudaStream_t stream) noexcept override {
    return stratalloc_library_free(memory, device_, stream) == STRATALLOC_STATUS_OK;
  }

 private:
  int device_;
};

}  // namespace stratalloc
