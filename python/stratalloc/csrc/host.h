// PyTorch's `HostAllocator`: pinned host memory from the library's strategy `pinned`. This class keeps the
// device of each block, and the streams and graph captures that use it. The library makes all other
// decisions.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "library.h"

namespace stratalloc_torch {

class HostAllocator final : public at::HostAllocator {
 public:
  using Pool = c10::MempoolId_t;
  using Filter = std::function<bool(c10::Stream)>;

  // Returns the process's only instance. It is never destroyed, because tensors may be freed very late.
  static HostAllocator& get();

  // c10::Allocator. The memory of a block is its context, too.
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t size) const override;

  // at::HostAllocator
  bool record_event(void* pointer, void* context, c10::Stream stream) override;
  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;
  // These override functions of PyTorch too. They are not marked, because PyTorch 2.10 does not have them.
  void begin_allocate_to_pool(Pool id, Filter filter);
  void end_allocate_to_pool(Pool id);
  void release_pool(Pool id);

  // Replaces PyTorch's host allocator. `conf` is the configuration string of every device's allocator. The
  // `pinned_*` keys of PyTorch's configuration are added to it.
  void install(const std::string& conf);
  // Applies the `pinned_*` keys of a configuration string to all devices, including those that are opened
  // later. Does nothing if this allocator is not installed.
  void configure(const std::string& conf);
  // Frees a block that `allocate` returned.
  void free(void* pointer);

 private:
  HostAllocator();
  // Removes all allocators and blocks in the child of a fork, where those of the parent cannot be used.
  // Requires `lock_`.
  void forget_all();

  struct Block {
    c10::DeviceIndex device;
    // The streams that used the block and are announced to the library when it is freed, without duplicates:
    // those of other devices, and those of captures.
    std::vector<c10::cuda::CUDAStream> streams;
    // The pools of the graph captures that used the block.
    std::vector<Pool> captured_in;
  };
  using Freed = std::pair<void*, Block>;

  // Returns the device for a request, as PyTorch does: the current one, or if that has no primary context,
  // one that has.
  c10::DeviceIndex device_for_request() const;
  // Returns the handle of a device's allocator. Creates it if there is none yet.
  uint64_t open(c10::DeviceIndex device);
  // Returns the pool of the capture that includes a stream. {0, 0} if PyTorch did not begin the capture.
  // Requires `lock_`.
  Pool capture_pool_of(c10::Stream stream) const;
  // Frees a block in the library, which reuses it when its streams have finished with it.
  void free_in_library(const Freed& freed);
  // Frees the blocks of `captured_` in the library whose pools have no users any more. Waits for the devices
  // that used them.
  void free_captured();

  template <class Call>
  void for_each_open(Call call) const {
    for (const auto& handle : handles_) {
      if (auto open = handle.load(std::memory_order_acquire)) {
        call(open);
      }
    }
  }

  std::array<std::atomic<uint64_t>, C10_COMPILE_TIME_MAX_GPUS> handles_{};
  // Protects the creation of allocators and their settings.
  std::mutex settings_lock_;
  // The configuration of allocators that are created later. Empty if this allocator is not installed.
  std::string conf_;

  // Protects the members below.
  std::mutex lock_;
  std::unordered_map<void*, Block> blocks_;
  // Freed blocks that a captured graph uses.
  std::vector<Freed> captured_;
  // The pools of running captures, and the number of users of each pool.
  std::vector<std::pair<Pool, Filter>> captures_;
  std::map<Pool, int> users_;
};

} // namespace stratalloc_torch
