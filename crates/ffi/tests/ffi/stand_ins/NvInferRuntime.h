// The parts of TensorRT's header that `stratalloc_tensorrt.hpp` uses.
#pragma once
#include <cstdint>

#include "cuda_runtime_api.h"

namespace nvinfer1 {
using AllocatorFlags = uint32_t;
class IGpuAsyncAllocator {
 public:
  virtual ~IGpuAsyncAllocator() = default;
  virtual void* allocateAsync(uint64_t, uint64_t, AllocatorFlags, cudaStream_t) noexcept = 0;
  virtual bool deallocateAsync(void*, cudaStream_t) noexcept = 0;
};
}  // namespace nvinfer1
