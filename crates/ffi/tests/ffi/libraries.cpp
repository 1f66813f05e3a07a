// Uses the allocators for RMM and TensorRT as these libraries do. Their headers are stand-ins (`stand_ins`).

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stratalloc_rmm.hpp"
#include "stratalloc_tensorrt.hpp"

#define CHECK(condition)                                            \
  do {                                                              \
    if (!(condition)) {                                             \
      std::printf("line %d: %s\n", __LINE__, #condition);           \
      std::exit(1);                                                 \
    }                                                               \
  } while (0)

static uint64_t live_blocks() {
  uint64_t handle = 0, count = 0;
  CHECK(stratalloc_torch_handle(0, &handle) == STRATALLOC_STATUS_OK);
  CHECK(stratalloc_block_count(handle, &count) == STRATALLOC_STATUS_OK);
  return count;
}

// Returns true if the layout of the segments contains the text.
static bool has_stream(char const* text) {
  uint64_t handle = 0;
  CHECK(stratalloc_torch_handle(0, &handle) == STRATALLOC_STATUS_OK);
  static char layout[1 << 16];
  size_t needed = 0;
  CHECK(stratalloc_text_write(handle, STRATALLOC_TEXT_LAYOUT, layout, sizeof layout, &needed) == STRATALLOC_STATUS_OK);
  return std::strstr(layout, text) != nullptr;
}

#ifdef STRATALLOC_RMM_HAS_BASE_CLASS
static void use_rmm() {
  stratalloc::rmm_resource resource, other{1};
  ::rmm::mr::device_memory_resource& base = resource;
  CHECK(base.is_equal(stratalloc::rmm_resource{0}) && !base.is_equal(other));
  ::rmm::cuda_stream_view const stream{reinterpret_cast<cudaStream_t>(7)};
  void* const block = base.allocate(1000, stream);
  CHECK(block != nullptr && live_blocks() == 1 && has_stream("\"stream\":7,"));
  base.deallocate(block, 1000, stream);
  CHECK(base.allocate(1000, stream) == block);
  base.deallocate(block, 1000, stream);
  CHECK(live_blocks() == 0);
}
#else
static void use_rmm() {
  stratalloc::rmm_resource resource, same{0}, other{1};
  CHECK(resource == same && resource != other);
  cuda::stream_ref const stream{reinterpret_cast<cudaStream_t>(7)};
  void* const block = resource.allocate(stream, 1000, 256);
  CHECK(block != nullptr && live_blocks() == 1);
  resource.deallocate(stream, block, 1000, 256);
  CHECK(resource.allocate(stream, 1000) == block);
  resource.deallocate(stream, block, 1000);
  void* const now = resource.allocate_sync(1000);
  CHECK(now != nullptr && now != block);
  resource.deallocate_sync(now, 1000);
  CHECK(resource.allocate(stream, 0) == nullptr && live_blocks() == 0);
  resource.deallocate(stream, nullptr, 0);
  try {
    (void)resource.allocate(stream, std::size_t{1} << 50);
    CHECK(!"it fits");
  } catch (::rmm::out_of_memory const& error) {
    CHECK(std::strstr(error.what(), "out of memory on device 0"));
  }
  try {
    (void)resource.allocate(stream, 1000, 4096);
    CHECK(!"the alignment is possible");
  } catch (::rmm::bad_alloc const&) {
  }
  try {
    (void)stratalloc::rmm_resource{500}.allocate(stream, 1000);
    CHECK(!"there is such a device");
  } catch (::rmm::out_of_memory const&) {
    CHECK(!"it is no lack of memory");
  } catch (::rmm::bad_alloc const&) {
  }
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
  CHECK(has_stream("\"stream\":2,"));
#else
  CHECK(has_stream("\"stream\":0,") && !has_stream("\"stream\":1,"));
#endif
  void* const legacy = resource.allocate(cudaStreamLegacy, 1000);
  resource.deallocate(cudaStreamLegacy, legacy, 1000);
  CHECK(live_blocks() == 0 && !has_stream("\"stream\":1,"));
}
#endif

static void use_tensorrt() {
  stratalloc::tensorrt_allocator own{0};
  nvinfer1::IGpuAsyncAllocator& allocator = own;
  auto const stream = reinterpret_cast<cudaStream_t>(7);
  void* const block = allocator.allocateAsync(1000, 256, 0, stream);
  CHECK(block != nullptr && live_blocks() == 1);
  CHECK(allocator.deallocateAsync(block, stream) && live_blocks() == 0);
  CHECK(!allocator.deallocateAsync(block, stream));
  CHECK(allocator.deallocateAsync(nullptr, stream) && !allocator.allocateAsync(0, 0, 0, stream));
  CHECK(!allocator.allocateAsync(uint64_t{1} << 50, 0, 0, stream));
  CHECK(!stratalloc::tensorrt_allocator{-1}.allocateAsync(1000, 0, 0, stream));
}

int main() {
  use_rmm();
  use_tensorrt();
  std::puts("good");
}
