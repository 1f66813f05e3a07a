#include "host.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <set>

namespace stratalloc_torch {

namespace {

using c10::DeviceIndex;
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

// Lets the calling thread allocate, free and query events without invalidating a graph capture.
struct Relaxed : c10::cuda::CUDAStreamCaptureModeGuard {
  Relaxed() : CUDAStreamCaptureModeGuard(cudaStreamCaptureModeRelaxed) {}
};

// The deleter of every block. Prints errors, because a deleter must not throw. After an error the block is
// not reused.
void release_block(void* pointer) {
  try {
    HostAllocator::get().free(pointer);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "stratalloc: pinned memory: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: pinned memory: %s\n", error.what());
  }
}

bool is_capturing(const CUDAStream& stream) {
  // The legacy stream cannot be captured.
  if (!stream.stream()) {
    return false;
  }
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream.stream(), &status) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

// Makes a stream of `device` wait for the work that `other`, a stream of another device, has now, and
// returns it: an allocator can record events only on streams of its own device.
cudaStream_t joined(const CUDAStream& other, DeviceIndex device) {
  static auto* lock = new std::mutex;
  static std::array<cudaStream_t, C10_COMPILE_TIME_MAX_GPUS> streams{};
  std::lock_guard<std::mutex> guard(*lock);
  CUDAGuard on(other.device_index());
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, other.stream()));
  on.set_index(device);
  if (!streams[device]) {
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&streams[device], cudaStreamNonBlocking, 0));
  }
  C10_CUDA_CHECK(cudaStreamWaitEvent(streams[device], event, 0));
  C10_CUDA_CHECK(cudaEventDestroy(event));
  return streams[device];
}

// Returns the `pinned_*` keys of a configuration string, with their values.
std::string pinned_keys(const std::string& conf) {
  c10::CachingAllocator::ConfigTokenizer tokens(conf);
  std::string text;
  for (size_t at = 0; at + 2 < tokens.size(); at++) {
    bool is_key = (at == 0 || tokens[at - 1] == ",") && tokens[at + 1] == ":";
    if (is_key && tokens[at].rfind("pinned_", 0) == 0) {
      text += (text.empty() ? "" : ",") + tokens[at] + ":" + tokens[at + 2];
    }
  }
  return text;
}

// Returns the configuration string of PyTorch's allocators, which the first of these variables contains.
std::string environment() {
  for (auto name :
       {"ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    if (auto conf = c10::utils::get_env(name)) {
      return *conf;
    }
  }
  return {};
}

void add(at::Stat& to, const stratalloc_host_counter& from) {
  to.current += from.current;
  to.peak += from.peak;
  to.allocated += from.allocated;
  to.freed += from.freed;
}

void add(at::DurationStat& to, const stratalloc_host_times& from) {
  // 0 means that there was no call.
  to.min = to.min == 0 || from.min == 0 ? to.min + from.min : std::min<int64_t>(to.min, from.min);
  to.max = std::max<int64_t>(to.max, from.max);
  to.total += from.total;
  to.count += from.count;
}

template <class Value>
void add_once(std::vector<Value>& to, const Value& value) {
  if (std::find(to.begin(), to.end(), value) == to.end()) {
    to.push_back(value);
  }
}

} // namespace

HostAllocator& HostAllocator::get() {
  static auto* allocator = new HostAllocator;
  return *allocator;
}

HostAllocator::HostAllocator() {
  auto before = [] { get().lock_.lock(); };
  auto in_parent = [] { get().lock_.unlock(); };
  auto in_child = [] {
    get().forget_all();
    get().lock_.unlock();
  };
  pthread_atfork(before, in_parent, in_child);
}

void HostAllocator::forget_all() {
  for (auto& handle : handles_) {
    handle = 0;
  }
  // Another thread of the parent may hold this lock, and this one is the only thread of the child.
  new (&settings_lock_) std::mutex;
  blocks_.clear();
  captured_.clear();
  captures_.clear();
  users_.clear();
}

DeviceIndex HostAllocator::device_for_request() const {
  DeviceIndex current = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&current));
  if (handles_.at(current).load(std::memory_order_acquire)) {
    return current;
  }
  return c10::cuda::getDeviceIndexWithPrimaryContext().value_or(current);
}

uint64_t HostAllocator::open(DeviceIndex device) {
  auto& place = handles_.at(device);
  if (auto handle = place.load(std::memory_order_acquire)) {
    return handle;
  }
  std::lock_guard<std::mutex> guard(settings_lock_);
  auto handle = place.load();
  if (!handle) {
    auto kind = c10::utils::get_env("STRATALLOC_DEVICE").value_or("cuda");
    auto name = kind + ":" + std::to_string(device);
    check(library.create(conf_.c_str(), name.c_str(), &handle));
    place.store(handle, std::memory_order_release);
  }
  return handle;
}

c10::DataPtr HostAllocator::allocate(size_t size) {
  void* pointer = nullptr;
  if (size > 0) {
    Relaxed relaxed;
    auto device = device_for_request();
    auto status = library.allocate(open(device), size, nullptr, &pointer);
    TORCH_CHECK(status != STRATALLOC_STATUS_OUT_OF_MEMORY, "out of pinned host memory: ", last_error());
    check(status);
    std::lock_guard<std::mutex> guard(lock_);
    blocks_[pointer].device = device;
  }
  return {pointer, pointer, &release_block, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const {
  return &release_block;
}

void HostAllocator::copy_data(void* to, const void* from, size_t size) const {
  default_copy_data(to, from, size);
}

bool HostAllocator::record_event(void* pointer, void* context, c10::Stream stream) {
  std::lock_guard<std::mutex> guard(lock_);
  // PyTorch passes tensors of any allocator, so both pointers may have any value.
  auto found = blocks_.find(context);
  found = found == blocks_.end() ? blocks_.find(pointer) : found;
  if (found == blocks_.end()) {
    return false;
  }
  auto& block = found->second;
  CUDAStream used(stream);
  if (is_capturing(used)) {
    add_once(block.streams, used);
    add_once(block.captured_in, capture_pool_of(stream));
  } else if (used.device_index() == block.device) {
    // Announced now, because the stream may be captured when the block is freed, by a graph that does not
    // use it.
    Relaxed relaxed;
    check(library.record_stream(open(block.device), found->first, used.stream()));
  } else {
    add_once(block.streams, used);
  }
  return true;
}

void HostAllocator::free(void* pointer) {
  std::unique_lock<std::mutex> guard(lock_);
  auto found = blocks_.find(pointer);
  if (found == blocks_.end()) {
    // The block belongs to the parent of a fork.
    return;
  }
  // Removed first, because another thread can get the same block as soon as the library has it.
  Freed freed(pointer, std::move(found->second));
  blocks_.erase(found);
  if (!freed.second.captured_in.empty()) {
    captured_.push_back(std::move(freed));
    return;
  }
  guard.unlock();
  free_in_library(freed);
}

void HostAllocator::free_in_library(const Freed& freed) {
  const auto& [pointer, block] = freed;
  Relaxed relaxed;
  auto handle = open(block.device);
  for (const auto& stream : block.streams) {
    bool is_own = stream.device_index() == block.device;
    check(library.record_stream(
        handle, pointer, is_own ? stream.stream() : joined(stream, block.device)));
  }
  check(library.free(handle, pointer));
}

void HostAllocator::free_captured() {
  std::unique_lock<std::mutex> guard(lock_);
  if (!captures_.empty()) {
    // A device cannot be waited for during a capture.
    return;
  }
  auto has_users = [&](Pool id) { return id == Pool{0, 0} || users_.count(id) > 0; };
  auto is_in_use = [&](const Freed& freed) {
    const auto& pools = freed.second.captured_in;
    return std::any_of(pools.begin(), pools.end(), has_users);
  };
  auto unused = std::partition(captured_.begin(), captured_.end(), is_in_use);
  std::vector<Freed> all(unused, captured_.end());
  captured_.erase(unused, captured_.end());
  guard.unlock();
  std::set<DeviceIndex> devices;
  for (auto& [pointer, block] : all) {
    for (const auto& stream : block.streams) {
      devices.insert(stream.device_index());
    }
    block.streams.clear();
  }
  // A graph may still run after the program has destroyed it.
  try {
    for (auto device : devices) {
      CUDAGuard on(device);
      C10_CUDA_CHECK(cudaDeviceSynchronize());
    }
    for (; !all.empty(); all.pop_back()) {
      free_in_library(all.back());
    }
  } catch (...) {
    guard.lock();
    captured_.insert(captured_.end(), all.begin(), all.end());
    throw;
  }
}

void HostAllocator::empty_cache() {
  free_captured();
  Relaxed relaxed;
  for_each_open([](uint64_t handle) { check(library.empty_cache(handle)); });
}

at::HostStats HostAllocator::get_stats() {
  at::HostStats stats;
  for_each_open([&](uint64_t handle) {
    stratalloc_host_statistics_t own{};
    check(library.host_statistics(handle, &own));
    add(stats.allocations, own.blocks);
    add(stats.allocated_bytes, own.reserved_bytes);
    add(stats.active_requests, own.live_blocks);
    add(stats.active_bytes, own.live_bytes);
    add(stats.host_alloc_time, own.allocate_time);
    add(stats.host_free_time, own.free_time);
    stats.num_host_alloc += own.driver_allocations;
    stats.num_host_free += own.driver_frees;
  });
  return stats;
}

void HostAllocator::reset_accumulated_stats() {
  for_each_open([](uint64_t handle) { check(library.reset_accumulated(handle)); });
}

void HostAllocator::reset_peak_stats() {
  for_each_open([](uint64_t handle) { check(library.reset_peaks(handle)); });
}

HostAllocator::Pool HostAllocator::capture_pool_of(c10::Stream stream) const {
  for (const auto& [id, filter] : captures_) {
    if (filter(stream)) {
      return id;
    }
  }
  return {0, 0};
}

void HostAllocator::begin_allocate_to_pool(Pool id, Filter filter) {
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& capture : captures_) {
    TORCH_CHECK(capture.first != id, "beginAllocateToPool: already recording to mempool_id");
  }
  users_[id]++;
  captures_.emplace_back(id, std::move(filter));
}

void HostAllocator::end_allocate_to_pool(Pool id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto has_id = [&](const auto& capture) { return capture.first == id; };
  auto found = std::find_if(captures_.begin(), captures_.end(), has_id);
  TORCH_CHECK(found != captures_.end(), "endAllocatePool: not currently recording to mempool_id");
  captures_.erase(found);
}

void HostAllocator::release_pool(Pool id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = users_.find(id);
  TORCH_CHECK(found != users_.end(), "no pool {", id.first, ", ", id.second, "} has users");
  if (--found->second == 0) {
    users_.erase(found);
  }
}

void HostAllocator::install(const std::string& conf) {
  auto keys = pinned_keys(environment());
  auto whole = keys.empty() ? conf : keys + "," + conf;
  check(library.check_conf(whole.c_str()));
  // Tries priorities from the lowest up, so that another allocator can still replace this one with a
  // higher one.
  for (int priority = 0; at::getHostAllocator(c10::DeviceType::CUDA) != this; priority++) {
    TORCH_CHECK(priority < 256, "PyTorch has another host allocator already");
    at::setHostAllocator(c10::DeviceType::CUDA, this, static_cast<uint8_t>(priority));
  }
  std::lock_guard<std::mutex> guard(settings_lock_);
  conf_ = whole;
}

void HostAllocator::configure(const std::string& conf) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  auto keys = pinned_keys(conf);
  if (conf_.empty() || keys.empty()) {
    return;
  }
  auto next = conf_ + "," + keys;
  std::vector<std::pair<uint64_t, std::string>> before;
  try {
    for_each_open([&](uint64_t handle) {
      before.emplace_back(handle, text_of(handle, STRATALLOC_TEXT_CONF));
      check(library.set_conf(handle, keys.c_str()));
      next = text_of(handle, STRATALLOC_TEXT_CONF);
    });
  } catch (...) {
    for (const auto& [handle, conf] : before) {
      static_cast<void>(library.set_conf(handle, conf.c_str()));
    }
    throw;
  }
  conf_ = next;
}

} // namespace stratalloc_torch
