// Allocates and frees blocks, and applies the settings to each device that is opened.
#include "allocator.h"
#include "stacks.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/env.h>

#include <algorithm>
#include <cstdio>
#include <sstream>

namespace stratalloc_torch {

namespace {

constexpr size_t kExabyte = 1ULL << 60;

// The deleter of every block. Prints errors, because a deleter must not throw.
void release_block(void* pointer) {
  try {
    Allocator::get().raw_delete(pointer);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "stratalloc: %s\n", error.what_without_backtrace());
  }
}

// Called before memory is acquired from the device. Runs the free-memory callbacks that are registered
// with PyTorch. Also passes the stream's reserve class to the library, because an expandable segment
// may be reserved next.
int run_free_memory_callbacks(void* device) {
  bool freed = false;
  try {
    auto index = static_cast<DeviceIndex>(reinterpret_cast<intptr_t>(device));
    Allocator::get().follow_reserve_class(index);
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: a free-memory callback failed: %s\n", error.what());
  }
  return freed;
}

// Returns whether the profiler or a trace may observe this thread's blocks. A cache hit reads no other
// state of PyTorch.
bool is_watched() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) ||
      c10::impl::GPUTrace::haveState;
}

[[noreturn]] C10_NOINLINE void refuse_size() {
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate more than 1EB memory.");
  __builtin_unreachable();
}

[[noreturn]] void fail_to_delete(stratalloc_status status) {
  fail(status, "invalid device pointer");
}

} // namespace

Allocator& Allocator::get() {
  static auto* allocator = new Allocator;
  return *allocator;
}

Allocator::Allocator()
    : caches_by_default_(
          !c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING") &&
          !c10::utils::has_env("PYTORCH_NO_HIP_MEMORY_CACHING")),
      caching_(caches_by_default_) {}

uint64_t Allocator::open_new(DeviceIndex device) {
  check_place(device);
  std::lock_guard<std::mutex> guard(settings_lock_);
  if (auto handle = opened(device)) {
    return handle;
  }
  uint64_t handle = 0;
  check(library.torch_handle(device, &handle));
  prepare(device, handle);
  if (open_count_.fetch_add(1) == 0) {
    first_open_ = device;
  }
  is_open_[device].store(true, std::memory_order_release);
  return handle;
}

void Allocator::prepare(DeviceIndex device, uint64_t handle) {
  if (open_count_ == 0) {
    settings_.conf = text_of(handle, STRATALLOC_TEXT_CONF);
  }
  if (caching_ != caches_by_default_) {
    auto status = library.set_caching(handle, caching_);
    TORCH_CHECK(
        status == STRATALLOC_STATUS_OK || status == STRATALLOC_STATUS_NOT_SUPPORTED, last_error());
  }
  if (settings_.has_metadata) {
    check(library.history_set_thread_metadata(handle, thread_metadata));
  }
  for (const auto& tracker : settings_.trackers) {
    add_tracker(device, handle, tracker);
  }
  for (const auto& observer : settings_.observers) {
    add_observer(handle, observer);
  }
  for (const auto& observer : settings_.rejection_observers) {
    add_rejection_observer(handle, observer);
  }
  // The library calls this source only if it gathers stacks, for `layers:[track]` or a recording.
  auto source = stack_source(nullptr);
  check(library.history_set_stack_source(handle, &source));
  if (settings_.recording || !settings_.trackers.empty()) {
    apply_recording(handle, false);
  }
  uint64_t id = 0;
  auto* user = reinterpret_cast<void*>(static_cast<intptr_t>(device));
  check(library.free_memory_callback_add(handle, run_free_memory_callbacks, nullptr, user, &id));
}

void Allocator::follow_reserve_class(DeviceIndex device) {
  if constexpr (kHasReserveClasses) {
    auto handle = opened(device);
    // Only the class of the current stream is passed on. The class of another stream follows at a
    // request while that stream is current.
    auto stream = c10::cuda::getCurrentCUDAStream(device).stream();
    auto name = reserve_class_of(stream);
    std::lock_guard<std::mutex> guard(classes_lock_);
    auto& known = reserve_classes_[{device, stream}];
    if (known != name) {
      auto status = library.set_reserve_class(handle, stream, name.c_str());
      // Strategies without expandable segments have no reserve classes.
      if (status != STRATALLOC_STATUS_NOT_SUPPORTED) {
        check(status);
        known = name;
      }
    }
    if (known.empty()) {
      reserve_classes_.erase({device, stream});
    }
  }
}

void Allocator::configure(const std::string& conf) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  check(library.torch_set_conf(conf.c_str()));
  if (auto handle = first_opened()) {
    settings_.conf = text_of(handle, STRATALLOC_TEXT_CONF);
  }
}

int Allocator::likely_device() const {
  if (open_count_.load(std::memory_order_relaxed) <= 1) {
    return first_open_.load(std::memory_order_relaxed);
  }
  DeviceIndex device = 0;
  return c10::cuda::GetDevice(&device) == cudaSuccess ? device : 0;
}

// Inlined, because each call adds to the cost of a cache hit.
C10_ALWAYS_INLINE void* Allocator::take(size_t size, DeviceIndex device, cudaStream_t stream) {
  if (C10_UNLIKELY(size >= kExabyte)) {
    refuse_size();
  }
  open(device);
  void* pointer;
  auto status = library.torch_allocate(device, size, stream, &pointer);
  if (C10_UNLIKELY(status != STRATALLOC_STATUS_OK)) {
    fail_to_take(status, size, device);
  }
  if (C10_UNLIKELY(is_watched())) {
    report_to_profiler(pointer, static_cast<int64_t>(size), device);
  }
  return pointer;
}

void Allocator::report_to_profiler(void* pointer, int64_t size, DeviceIndex device) {
  if (c10::memoryProfilingEnabled()) {
    uint64_t allocated = 0, reserved = 0, peak = 0;
    if (auto handle = opened(device)) {
      check(library.usage(handle, &allocated, &peak, &reserved, &peak));
    }
    c10::reportMemoryUsageToProfiler(
        pointer, size, allocated, reserved, c10::Device(c10::DeviceType::CUDA, device));
  }
  if (const auto* trace = c10::impl::GPUTrace::get_trace()) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (size > 0) {
      (*trace)->trace_gpu_memory_allocation(c10::kCUDA, address);
    } else {
      (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, address);
    }
  }
}

void Allocator::fail_to_take(stratalloc_status status, size_t size, DeviceIndex device) {
  if (status != STRATALLOC_STATUS_OUT_OF_MEMORY) {
    fail(status);
  }
  auto report = last_error();
  auto handle = open(device);
  uint64_t allocated = 0, reserved = 0, peak = 0, free = 0, total = 0;
  // Failures are ignored and leave zeros, because the out-of-memory error must be thrown in any case.
  library.usage(handle, &allocated, &peak, &reserved, &peak);
  library.memory_info(handle, &free, &total);
  c10::reportOutOfMemoryToProfiler(
      static_cast<int64_t>(size), allocated, reserved, c10::Device(c10::DeviceType::CUDA, device));
  // The text begins as PyTorch's own errors do, which differ by strategy, because programs search for
  // these words.
  auto number = static_cast<int>(device);
  std::ostringstream text;
  using c10::CachingAllocator::format_size;
  text << text_of(device, STRATALLOC_TEXT_TORCH_OOM_LINE) << "CUDA out of memory. Tried to allocate " << format_size(size) << ". GPU " << number
       << " has a total capacity of " << format_size(total) << " of which " << format_size(free)
       << " is free.\n"
       << report;
  TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
}

c10::DataPtr Allocator::allocate(size_t size) {
  auto device = current_device();
  auto* pointer =
      size ? take(size, device, c10::cuda::getCurrentCUDAStream(device)) : nullptr;
  return {pointer, pointer, &release_block, c10::Device(c10::DeviceType::CUDA, device)};
}

c10::DataPtr Allocator::allocateWithAddress(size_t size, void* address) {
  auto device = current_device();
  open(device);
  void* pointer = nullptr;
  auto stream = c10::cuda::getCurrentCUDAStream(device);
  check(library.torch_allocate_at(device, size, stream, address, &pointer));
  if (is_watched()) {
    report_to_profiler(pointer, static_cast<int64_t>(size), device);
  }
  return {pointer, pointer, &release_block, c10::Device(c10::DeviceType::CUDA, device)};
}

c10::DeleterFnPtr Allocator::raw_deleter() const {
  return &release_block;
}

void* Allocator::raw_alloc(size_t size) {
  if (size == 0) {
    return nullptr;
  }
  auto device = current_device();
  return take(size, device, c10::cuda::getCurrentCUDAStream(device));
}

void* Allocator::raw_alloc_with_stream(size_t size, cudaStream_t stream) {
  return size ? take(size, current_device(), stream) : nullptr;
}

void Allocator::raw_delete(void* pointer) {
  if (C10_UNLIKELY(is_watched())) {
    return delete_watched(pointer);
  }
  auto likely = likely_device();
  auto status = library.torch_delete(pointer, likely, nullptr, nullptr);
  if (C10_UNLIKELY(status != STRATALLOC_STATUS_OK)) {
    fail_to_delete(status);
  }
}

void Allocator::delete_watched(void* pointer) {
  int device = -1;
  uint64_t size = 0;
  auto status = library.torch_delete(pointer, likely_device(), &device, &size);
  if (status != STRATALLOC_STATUS_OK) {
    fail_to_delete(status);
  }
  if (device >= 0) {
    report_to_profiler(pointer, -static_cast<int64_t>(size), static_cast<DeviceIndex>(device));
  }
}

void Allocator::copy_data(void* to, const void* from, size_t size) const {
  C10_CUDA_CHECK(cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice));
}

void Allocator::recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) {
  // Blocks of other allocators, such as those shared by another process, are ignored.
  if (!block.get() || block.get_deleter() != &release_block) {
    return;
  }
  check(library.record_stream(open(block.device().index()), block.get(), stream.stream()));
}

bool Allocator::initialized() {
  return device_count_.load() > 0;
}

void Allocator::init(int device_count) {
  device_count_ = device_count;
}

void Allocator::emptyCache(MempoolId_t id) {
  bool is_default = id.first == 0 && id.second == 0;
  auto failed = STRATALLOC_STATUS_OK;
  std::string message;
  for_each_open([&](DeviceIndex, uint64_t handle) {
    auto status = is_default ? library.empty_cache(handle) : library.pool_empty(handle, pool_of(id));
    // A pool belongs to one device, so the other devices do not know it. After its memory was released,
    // no device knows it.
    if (status != STRATALLOC_STATUS_OK && (is_default || status != STRATALLOC_STATUS_BAD_POOL)) {
      failed = status;
      message = last_error();
    }
  });
  TORCH_CHECK(failed == STRATALLOC_STATUS_OK, message);
}

void Allocator::enable(bool on) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  auto status = STRATALLOC_STATUS_OK;
  for_each_open([&](DeviceIndex, uint64_t handle) {
    auto ended = library.set_caching(handle, on);
    status = ended == STRATALLOC_STATUS_OK ? status : ended;
  });
  if (status == STRATALLOC_STATUS_NOT_SUPPORTED) {
    // PyTorch ignores this call for cudaMallocAsync too.
    TORCH_WARN_ONCE(last_error());
    return;
  }
  check(status);
  caching_ = on;
}

bool Allocator::isEnabled() const {
  return caching_;
}

double Allocator::getMemoryFraction(DeviceIndex device) {
  double fraction = 1;
  check(library.memory_fraction(open(device), &fraction));
  return fraction;
}

void Allocator::setMemoryFraction(double fraction, DeviceIndex device) {
  TORCH_CHECK(
      0 <= fraction && fraction <= 1,
      "invalid fraction:",
      fraction,
      ". Please set within [0, 1].");
  check(library.set_memory_fraction(open(device), fraction));
}

void Allocator::cacheInfo(DeviceIndex device, size_t* largest) {
  stratalloc_cache_info_t info{};
  check(library.cache_info(open(device), &info));
  if (*largest == 0) {
    *largest = info.device_free_bytes;
  }
  *largest = std::max<size_t>(*largest, info.largest_cached_bytes);
}

void* Allocator::getBaseAllocation(void* pointer, size_t* size) {
  void* base = nullptr;
  for_each_open([&](DeviceIndex, uint64_t handle) {
    void* found = nullptr;
    uint64_t bytes = 0;
    if (!base &&
        library.base_allocation(handle, pointer, &found, &bytes) == STRATALLOC_STATUS_OK) {
      base = found;
      if (size) {
        *size = bytes;
      }
    }
  });
  TORCH_CHECK(base, "invalid device pointer: ", pointer);
  return base;
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(DeviceIndex device) {
  uint64_t free = 0, total = 0;
  check(library.memory_info(open(device), &free, &total));
  return {free, total};
}

std::string Allocator::name() {
  return text_of(likely_device(), STRATALLOC_TEXT_TORCH_NAME);
}

} // namespace stratalloc_torch
