// Private pools, their checkpoints, and memory shared with other processes and devices.
#include <c10/cuda/CUDAGuard.h>

#include "allocator.h"

namespace stratalloc_torch {

namespace {

// An allocator that the program gave to PyTorch for a pool. The library calls it for segments.
struct Source {
  std::shared_ptr<torch_cuda::CUDAAllocator> allocator;
  DeviceIndex device;
};

void* source_allocate(void* user, uint64_t size, void* stream) {
  try {
    auto* source = static_cast<Source*>(user);
    c10::cuda::CUDAGuard guard(source->device);
    return source->allocator->raw_alloc_with_stream(size, static_cast<cudaStream_t>(stream));
  } catch (const std::exception&) {
    // Returns null, as for out of memory. The error of the request then reports it.
    return nullptr;
  }
}

void source_free(void* user, void* pointer, uint64_t, void*) {
  try {
    auto* source = static_cast<Source*>(user);
    c10::cuda::CUDAGuard guard(source->device);
    source->allocator->raw_delete(pointer);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: a pool's allocator keeps a segment: %s\n", error.what());
  }
}

using Filter = std::function<bool(cudaStream_t)>;

int filter_accepts(void* user, void* stream) {
  try {
    return (*static_cast<Filter*>(user))(static_cast<cudaStream_t>(stream));
  } catch (const std::exception&) {
    // The driver does not know the stream, so no capture includes the stream.
    return 0;
  }
}

// A checkpoint of a pool.
struct Checkpoint : AllocatorState {
  explicit Checkpoint(stratalloc_checkpoint* taken) : taken(taken) {}
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint() override {
    library.checkpoint_drop(taken);
  }
  stratalloc_checkpoint* taken;
};

// Collects the blocks of the pool while a checkpoint is restored.
struct Restored {
  CheckpointDelta delta;
  c10::Device device;
};

void block_allocated(void* user, void* address, uint64_t, void*) {
  auto* restored = static_cast<Restored*>(user);
  restored->delta.dataptrs_allocd.emplace_back(
      address, address, Allocator::get().raw_deleter(), restored->device);
}

void block_freed(void* user, void* address, uint64_t) {
  static_cast<Restored*>(user)->delta.ptrs_freed.push_back(address);
}

void expandable_segment(void* user, void* stream, int is_small, uint64_t mapped) {
  static_cast<std::vector<StreamSegmentSize>*>(user)->emplace_back(
      static_cast<cudaStream_t>(stream), is_small, mapped);
}

} // namespace

void Allocator::createOrIncrefPool(
    DeviceIndex device,
    MempoolId_t id,
    std::shared_ptr<torch_cuda::CUDAAllocator> source) {
  auto handle = open(device);
  if (!source) {
    check(library.pool_ensure(handle, pool_of(id), 0, nullptr));
    return;
  }
  lend(Source{std::move(source), device}, [&](stratalloc_release release, void* user) {
    stratalloc_segment_source functions{source_allocate, source_free, release, user};
    return library.pool_ensure(handle, pool_of(id), 0, &functions);
  });
}

void Allocator::beginAllocateToPool(DeviceIndex device, MempoolId_t id, Filter filter) {
  auto handle = open(device);
  lend(std::move(filter), [&](stratalloc_release release, void* user) {
    stratalloc_stream_filter functions{filter_accepts, release, user};
    return library.torch_scope_open(handle, pool_of(id), &functions);
  });
}

void Allocator::endAllocateToPool(DeviceIndex device, MempoolId_t id) {
  check(library.torch_scope_close(open(device), pool_of(id)));
}

void Allocator::releasePool(DeviceIndex device, MempoolId_t id) {
  check(library.torch_pool_release(open(device), pool_of(id)));
  if (getPoolUseCount(device, id) == 0) {
    std::lock_guard<std::mutex> guard(pools_lock_);
    pool_options_.erase({device, id});
  }
}

int Allocator::getPoolUseCount(DeviceIndex device, MempoolId_t id) {
  uint32_t users = 0;
  check(library.pool_users(open(device), pool_of(id), &users));
  return static_cast<int>(users);
}

void Allocator::set_pool_options(
    DeviceIndex device,
    MempoolId_t id,
    uint32_t set,
    uint32_t clear) {
  auto handle = open(device);
  std::lock_guard<std::mutex> guard(pools_lock_);
  auto found = pool_options_.find({device, id});
  auto before = found == pool_options_.end() ? 0 : found->second;
  auto options = (before | set) & ~clear;
  if (options == before) {
    return;
  }
  check(library.pool_set_options(handle, pool_of(id), options));
  pool_options_[{device, id}] = options;
}

void Allocator::setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) {
  uint32_t bit = STRATALLOC_POOL_USE_ON_OOM;
  set_pool_options(device, id, use_on_oom ? bit : 0, use_on_oom ? 0 : bit);
}

void Allocator::setNoSplit(DeviceIndex device, MempoolId_t id) {
  set_pool_options(device, id, STRATALLOC_POOL_NO_SPLIT, 0);
}

bool Allocator::checkPoolLiveAllocations(
    DeviceIndex device,
    MempoolId_t id,
    const std::unordered_set<void*>& expected) {
  auto handle = open(device);
  size_t count = 0;
  check(library.pool_live(handle, pool_of(id), nullptr, 0, &count));
  if (count != expected.size()) {
    return false;
  }
  std::vector<void*> live(count);
  auto status = library.pool_live(handle, pool_of(id), live.data(), live.size(), &count);
  // Another thread has allocated or freed a block since `count` was queried.
  if (status == STRATALLOC_STATUS_BUFFER_TOO_SMALL || count != expected.size()) {
    return false;
  }
  check(status);
  return std::unordered_set<void*>(live.begin(), live.end()) == expected;
}

std::shared_ptr<AllocatorState> Allocator::getCheckpointState(DeviceIndex device, MempoolId_t id) {
  stratalloc_checkpoint* taken = nullptr;
  check(library.checkpoint_take(open(device), pool_of(id), &taken));
  return std::make_shared<Checkpoint>(taken);
}

CheckpointDelta Allocator::setCheckpointPoolState(
    DeviceIndex device,
    std::shared_ptr<AllocatorState> state) {
  auto* checkpoint = dynamic_cast<Checkpoint*>(state.get());
  TORCH_CHECK(checkpoint, "the state is another allocator's");
  Restored restored{{}, c10::Device(c10::DeviceType::CUDA, device)};
  auto status = library.checkpoint_restore(
      open(device), checkpoint->taken, block_allocated, block_freed, &restored);
  check(status);
  return std::move(restored.delta);
}

ShareableHandle Allocator::shareIpcHandle(void* pointer) {
  ShareableHandle shared{0, {}};
  auto ended = STRATALLOC_STATUS_UNKNOWN_ADDRESS;
  for_each_open([&](DeviceIndex, uint64_t handle) {
    if (ended != STRATALLOC_STATUS_UNKNOWN_ADDRESS) {
      return;
    }
    size_t needed = 0;
    uint64_t offset = 0;
    ended = library.share(handle, pointer, nullptr, 0, &needed, &offset);
    if (ended == STRATALLOC_STATUS_OK) {
      shared.handle.resize(needed);
      ended = library.share(handle, pointer, shared.handle.data(), needed, &needed, &offset);
      shared.offset = static_cast<ptrdiff_t>(offset);
    }
  });
  TORCH_CHECK(ended != STRATALLOC_STATUS_UNKNOWN_ADDRESS, "invalid device pointer: ", pointer);
  check(ended);
  return shared;
}

std::shared_ptr<void> Allocator::getIpcDevPtr(std::string handle) {
  auto device = c10::cuda::current_device();
  auto own = open(device);
  std::lock_guard<std::mutex> guard(shared_lock_);
  if (auto found = shared_.find(handle); found != shared_.end()) {
    if (auto open_already = found->second.lock()) {
      return open_already;
    }
  }
  uint64_t number = 0, size = 0;
  void* address = nullptr;
  check(library.open_shared(own, handle.data(), handle.size(), &number, &address, &size));
  auto close = [this, handle, number](void*) {
    {
      std::lock_guard<std::mutex> guard(shared_lock_);
      // Another thread may have opened the block again before this thread locked.
      if (auto found = shared_.find(handle); found != shared_.end() && found->second.expired()) {
        shared_.erase(found);
      }
    }
    library.close_shared(number);
  };
  std::shared_ptr<void> shared(address, std::move(close));
  shared_[handle] = shared;
  return shared;
}

void Allocator::enablePeerAccess(DeviceIndex device, DeviceIndex to) {
  c10::cuda::CUDAGuard guard(device);
  auto error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    // Clears the error. Otherwise it would stay as the thread's last CUDA error.
    static_cast<void>(cudaGetLastError());
  } else {
    C10_CUDA_CHECK(error);
  }
  auto status = library.enable_peer(open(to), device);
  // If the library has no memory that needs peer access of its own, that of the runtime is sufficient.
  if (status != STRATALLOC_STATUS_NOT_SUPPORTED) {
    check(status);
  }
}

cudaError_t Allocator::memcpyAsync(
    void* to,
    int to_device,
    const void* from,
    int from_device,
    size_t size,
    cudaStream_t stream,
    bool is_peer_enabled) {
  // A plain copy reaches memory of the virtual memory API and of the driver's pools only if the devices
  // have access to it.
  if (is_peer_enabled || to_device == from_device) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
  }
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, stream);
}

std::vector<StreamSegmentSize> Allocator::getExpandableSegmentSizes(DeviceIndex device) {
  std::vector<StreamSegmentSize> sizes;
  auto status = library.expandable_segments(open(device), expandable_segment, &sizes);
  // Strategies without expandable segments return an empty list.
  if (status != STRATALLOC_STATUS_NOT_SUPPORTED) {
    check(status);
  }
  return sizes;
}

} // namespace stratalloc_torch
