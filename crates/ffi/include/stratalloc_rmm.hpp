// A memory resource for RMM over the process's allocator of a device, for C++ programs that use RMM, cuDF or
// cuML. Link with libstratalloc.
//
//     stratalloc::rmm_resource resource;
//     rmm::mr::set_current_device_resource_ref(resource);
//
// Works with the RMM versions whose resources are classes with `cuda::mr`'s functions, and with the older ones
// that have the base class `device_memory_resource`.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <rmm/cuda_device.hpp>
#include <rmm/error.hpp>

#if __has_include(<rmm/mr/device_memory_resource.hpp>)
#include <rmm/mr/device_memory_resource.hpp>
#define STRATALLOC_RMM_HAS_BASE_CLASS
#elif __has_include(<rmm/mr/device/device_memory_resource.hpp>)
#include <rmm/mr/device/device_memory_resource.hpp>
#define STRATALLOC_RMM_HAS_BASE_CLASS
#else
#include <cuda/memory_resource>
#include <cuda/stream_ref>
#endif

#include "stratalloc.h"

namespace stratalloc {
namespace detail {

// The alignment of the allocator's blocks, in bytes.
inline constexpr std::size_t block_alignment = 512;

// Returns the stream by its own name. Null is the default stream, which is that of the thread if the program is
// compiled so. The legacy default stream has two names.
inline cudaStream_t named(cudaStream_t stream) {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
  if (stream == nullptr) {
    return cudaStreamPerThread;
  }
#endif
  return stream == cudaStreamLegacy ? nullptr : stream;
}

// Throws `rmm::out_of_memory` if there is not enough memory, and `rmm::bad_alloc` if the request fails otherwise,
// with the allocator's message.
inline void* rmm_allocate(int device, std::size_t bytes, std::size_t alignment, cudaStream_t stream) {
  if (alignment > block_alignment) {
    throw rmm::bad_alloc{"stratalloc: an alignment of more than 512 bytes"};
  }
  void* const block = stratalloc_library_malloc("RMM", bytes, device, named(stream));
  if (block == nullptr && bytes != 0) {
    char message[1024];
    stratalloc_last_error(message, sizeof message);
    if (stratalloc_last_status() == STRATALLOC_STATUS_OUT_OF_MEMORY) {
      throw rmm::out_of_memory{message};
    }
    throw rmm::bad_alloc{message};
  }
  return block;
}

inline void rmm_free(int device, void* block, cudaStream_t stream) noexcept {
  // A failure cannot be reported. The block then stays allocated.
  (void)stratalloc_library_free(block, device, named(stream));
}

}  // namespace detail

// Allocates on one device. A block that is freed on another stream than it was requested for is reused when
// the work on both has finished. All resources of one device are equal. Thread-safe.
#ifdef STRATALLOC_RMM_HAS_BASE_CLASS
class rmm_resource final : public rmm::mr::device_memory_resource {
 public:
  explicit rmm_resource(int device = rmm::get_current_cuda_device().value()) : device_{device} {}

 private:
  void* do_allocate(std::size_t bytes, rmm::cuda_stream_view stream) override {
    return detail::rmm_allocate(device_, bytes, 0, stream.value());
  }

  void do_deallocate(void* block, std::size_t, rmm::cuda_stream_view stream) noexcept override {
    detail::rmm_free(device_, block, stream.value());
  }

  bool do_is_equal(device_memory_resource const& other) const noexcept override {
    auto const* const same = dynamic_cast<rmm_resource const*>(&other);
    return same != nullptr && same->device_ == device_;
  }

  int device_;
};
#else
class rmm_resource final {
 public:
  explicit rmm_resource(int device = rmm::get_current_cuda_device().value()) : device_{device} {}

  void* allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = detail::block_alignment) {
    return detail::rmm_allocate(device_, bytes, alignment, stream.get());
  }

  void deallocate(
      cuda::stream_ref stream,
      void* block,
      std::size_t,
      std::size_t = detail::block_alignment) noexcept {
    detail::rmm_free(device_, block, stream.get());
  }

  // Waits for the default stream, whose earlier work may still use the block.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = detail::block_alignment) {
    void* const block = detail::rmm_allocate(device_, bytes, alignment, nullptr);
    rmm::cuda_set_device_raii const on{rmm::cuda_device_id{device_}};
    if (cudaStreamSynchronize(detail::named(nullptr)) != cudaSuccess) {
      detail::rmm_free(device_, block, nullptr);
      throw rmm::bad_alloc{"stratalloc: earlier work on the default stream failed"};
    }
    return block;
  }

  void deallocate_sync(void* block, std::size_t, std::size_t = detail::block_alignment) noexcept {
    detail::rmm_free(device_, block, nullptr);
  }

  bool operator==(rmm_resource const& other) const noexcept { return device_ == other.device_; }
  bool operator!=(rmm_resource const& other) const noexcept { return device_ != other.device_; }

  friend void get_property(rmm_resource const&, cuda::mr::device_accessible) noexcept {}

 private:
  int device_;
};
#endif

}  // namespace stratalloc
