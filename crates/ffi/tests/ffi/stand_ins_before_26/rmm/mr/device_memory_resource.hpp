// The base class of RMM's resources before version 26.
#pragma once
#include <cstddef>

#include "cuda_runtime_api.h"

namespace rmm {
struct cuda_stream_view {
  cudaStream_t stream;
  cudaStream_t value() const { return stream; }
};
namespace mr {
class device_memory_resource {
 public:
  virtual ~device_memory_resource() = default;
  void* allocate(std::size_t bytes, cuda_stream_view stream) { return do_allocate(bytes, stream); }
  void deallocate(void* block, std::size_t bytes, cuda_stream_view stream) { do_deallocate(block, bytes, stream); }
  bool is_equal(device_memory_resource const& other) const noexcept { return do_is_equal(other); }

 private:
  virtual void* do_allocate(std::size_t, cuda_stream_view) = 0;
  virtual void do_deallocate(void*, std::size_t, cuda_stream_view) = 0;
  virtual bool do_is_equal(device_memory_resource const&) const noexcept = 0;
};
}  // namespace mr
}  // namespace rmm
