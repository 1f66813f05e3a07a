// Differences between the versions of PyTorch, from 2.10 on. No other file checks the version.
#pragma once

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// True if PyTorch is 2.`minor` or later.
#define STRATALLOC_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace stratalloc_torch {

namespace torch_cuda = c10::cuda::CUDACachingAllocator;
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
using CudaConfig = torch_cuda::CUDAAllocatorConfig;
using c10::DeviceIndex;
using c10::MempoolId_t;
using ConfigHook = std::function<void(const std::string&)>;
#if STRATALLOC_SINCE(12)
using torch_cuda::OomRejectionObserver;
#else
using OomRejectionObserver = std::function<void(int64_t, size_t, size_t, size_t)>;
#endif

// PyTorch's interface with all functions of the latest version that `Allocator` overrides. Where an
// older version declares a function differently, the older form is overridden here and calls the latest
// one.
class Base : public torch_cuda::CUDAAllocator {
#if !STRATALLOC_SINCE(11)
 public:
  using Recorder = torch_cuda::CreateContextFn;
  using Shared = std::shared_ptr<torch_cuda::CUDAAllocator>;
  using When = torch_cuda::RecordContext;
  using Names = std::vector<std::string>;
  virtual torch_cuda::SnapshotInfo snapshot(MempoolId_t id, bool include_traces) = 0;
  virtual void createOrIncrefPool(DeviceIndex device, MempoolId_t id, Shared source) = 0;
  virtual void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) = 0;
  virtual void recordHistory(bool, Recorder, size_t, When, bool, const Names& skip) = 0;

  torch_cuda::SnapshotInfo snapshot(MempoolId_t id) final {
    return snapshot(id, true);
  }
  // The caller must keep the allocator alive as long as the pool.
  void createOrIncrefPool(DeviceIndex device, MempoolId_t id, CUDAAllocator* source) final {
    createOrIncrefPool(device, id, Shared(std::shared_ptr<void>(), source));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t id) final {
    setUseOnOOM(device, id, true);
  }
  void recordHistory(bool on, Recorder recorder, size_t entries_max, When when, bool clear) final {
    recordHistory(on, recorder, entries_max, when, clear, {});
  }
#endif
#if !STRATALLOC_SINCE(12)
 public:
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) = 0;
  virtual void attachOomRejectionObserver(OomRejectionObserver observer) = 0;
#endif
#if !STRATALLOC_SINCE(13)
 public:
  virtual c10::DataPtr allocateWithAddress(size_t size, void* address) = 0;
#endif
#if !STRATALLOC_SINCE(14)
 public:
  virtual bool supportsUserMetadata() = 0;
  virtual void annotateMemory(const void* pointer, const std::string& metadata) = 0;
#endif
};

// The action of entries that `annotateMemory` creates.
#if STRATALLOC_SINCE(14)
constexpr auto kAnnotate = torch_cuda::TraceEntry::ANNOTATE;
#else
constexpr auto kAnnotate = static_cast<torch_cuda::TraceEntry::Action>(9);
#endif

// Throws PyTorch's error if no action has this name.
inline void check_action(const std::string& name) {
#if STRATALLOC_SINCE(11)
  c10::CachingDeviceAllocator::parseTraceEntryAction(name);
#else
  static_cast<void>(name);
#endif
}

inline void set_registration_counter(torch_cuda::SegmentInfo& info, int32_t counter) {
#if STRATALLOC_SINCE(11)
  info.registration_counter = counter;
#else
  static_cast<void>(info), static_cast<void>(counter);
#endif
}

// Returns the counter, or null for a PyTorch before 2.12, which has no such counter.
inline int64_t* oom_rejections_of(c10::CachingDeviceAllocator::DeviceStats& stats) {
#if STRATALLOC_SINCE(12)
  return &stats.num_oom_rejections;
#else
  return static_cast<void>(stats), nullptr;
#endif
}

// Returns the counters of a private pool, or null for a PyTorch before 2.13, which has no such
// counters.
inline c10::CachingAllocator::StatArray* reserved_of_pool(
    c10::CachingDeviceAllocator::DeviceStats& stats,
    MempoolId_t id) {
#if STRATALLOC_SINCE(13)
  return &stats.reserved_bytes_by_private_pools[id];
#else
  return static_cast<void>(stats), static_cast<void>(id), nullptr;
#endif
}

// Stores the settings of pinned memory in `info`, as PyTorch has parsed them.
inline void add_pinned_settings(torch_cuda::AllocatorConfigInfo& info) {
  info.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  info.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
#if STRATALLOC_SINCE(13)
  info.max_round_threshold = Config::pinned_max_round_threshold();
  info.max_cached_size = Config::pinned_max_cached_size();
#endif
}

// Returns the keys that keep their values when PyTorch parses another string, with these values. Omits
// keys that PyTorch has no getter for, and values that no string can express.
inline std::vector<std::pair<std::string, std::string>> kept_settings() {
  auto flag = [](bool on) { return std::string(on ? "True" : "False"); };
  std::vector<std::pair<std::string, std::string>> kept{
      {"expandable_segments", flag(Config::use_expandable_segments())},
      {"pinned_use_background_threads", flag(Config::pinned_use_background_threads())},
      {"release_lock_on_cudamalloc", flag(CudaConfig::release_lock_on_cudamalloc())},
      {"graph_capture_record_stream_reuse", flag(CudaConfig::graph_capture_record_stream_reuse())},
      {"pinned_use_cuda_host_register", flag(CudaConfig::pinned_use_cuda_host_register())},
      {"pinned_num_register_threads", std::to_string(CudaConfig::pinned_num_register_threads())},
      {"pinned_reserve_segment_size_mb",
       std::to_string(CudaConfig::pinned_reserve_segment_size_mb())},
      {"per_process_memory_fraction", std::to_string(CudaConfig::per_process_memory_fraction())},
  };
#if STRATALLOC_SINCE(11)
  kept.emplace_back("large_segment_size_mb", std::to_string(Config::large_segment_size() >> 20));
#endif
#if STRATALLOC_SINCE(12)
  kept.emplace_back("pinned_free_catch_all", flag(CudaConfig::pinned_free_catch_all()));
  kept.emplace_back("throw_on_cudamalloc_oom", flag(CudaConfig::throw_on_cudamalloc_oom()));
#endif
#if STRATALLOC_SINCE(13)
  auto mib = [&](const char* key, size_t bytes) {
    if (bytes != SIZE_MAX) {
      kept.emplace_back(key, std::to_string(bytes >> 20));
    }
  };
  mib("pinned_max_round_threshold_mb", Config::pinned_max_round_threshold());
  mib("pinned_max_cached_size_mb", Config::pinned_max_cached_size());
#endif
  return kept;
}

// Returns the function to which PyTorch passes a configuration string after it has parsed the general
// keys.
inline ConfigHook config_hook() {
#if STRATALLOC_SINCE(11)
  return Config::getConfigParserHook();
#else
  // This version has a hook but no getter for it. The hook does the same as this function.
  return [](const std::string& conf) { CudaConfig::instance().parseArgs(conf); };
#endif
}

inline void set_config_hook(ConfigHook hook) {
#if STRATALLOC_SINCE(11)
  Config::getConfigParserHook() = std::move(hook);
#else
  Config::registerDeviceConfigParserHook(std::move(hook), {});
#endif
}

constexpr bool kHasReserveClasses = STRATALLOC_SINCE(15);

// Returns the class of `expandable_segments_reserve_by_class` that the program has set for a stream.
// Empty if there is none.
inline std::string reserve_class_of(cudaStream_t stream) {
#if STRATALLOC_SINCE(15)
  return torch_cuda::getExpandableSegmentReserveClassForStream(stream);
#else
  return static_cast<void>(stream), std::string();
#endif
}

} // namespace stratalloc_torch
