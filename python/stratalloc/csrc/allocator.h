// PyTorch's `CUDAAllocator`, implemented with the library. This class only translates types. The
// library makes all decisions.
#pragma once

#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "library.h"
#include "versions.h"

namespace stratalloc_torch {

using AnnotationEntry = decltype(torch_cuda::SnapshotInfo::external_annotations)::value_type;
using torch_cuda::AllocatorState;
using torch_cuda::AllocatorTraceTracker;
using torch_cuda::BlockInfo;
using torch_cuda::CheckpointDelta;
using torch_cuda::CreateContextFn;
using torch_cuda::DeviceStats;
using torch_cuda::OutOfMemoryObserver;
using torch_cuda::RecordContext;
using torch_cuda::SegmentInfo;
using torch_cuda::ShareableHandle;
using torch_cuda::SnapshotInfo;
using torch_cuda::StreamSegmentSize;
using torch_cuda::TraceEntry;

inline stratalloc_pool pool_of(MempoolId_t id) {
  return {id.first, id.second};
}

// Returns the calling thread's metadata, or null.
const char* thread_metadata();

class Allocator final : public Base {
 public:
  // Returns the process's only instance, because PyTorch's deleters are plain functions without an
  // object. It is never destroyed, because tensors may be freed very late.
  static Allocator& get();

  // c10::Allocator
  c10::DataPtr allocate(size_t size) override;
  c10::DataPtr allocateWithAddress(size_t size, void* address) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t size) const override;

  // c10::DeviceAllocator
  bool initialized() override;
  void emptyCache(MempoolId_t id) override;
  DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override;

  // CUDAAllocator
  void* raw_alloc(size_t size) override;
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void init(int device_count) override;
  double getMemoryFraction(DeviceIndex device) override;
  void setMemoryFraction(double fraction, DeviceIndex device) override;
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override;
  void enable(bool on) override;
  bool isEnabled() const override;
  void cacheInfo(DeviceIndex device, size_t* largest) override;
  void* getBaseAllocation(void* pointer, size_t* size) override;
  using torch_cuda::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override;
  SnapshotInfo snapshot(MempoolId_t id, bool include_traces) override;
  void beginAllocateToPool(
      DeviceIndex device,
      MempoolId_t id,
      std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(DeviceIndex device, MempoolId_t id) override;
  void releasePool(DeviceIndex device, MempoolId_t id) override;
  int getPoolUseCount(DeviceIndex device, MempoolId_t id) override;
  void createOrIncrefPool(
      DeviceIndex device,
      MempoolId_t id,
      std::shared_ptr<torch_cuda::CUDAAllocator> source) override;
  void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) override;
  void setNoSplit(DeviceIndex device, MempoolId_t id) override;
  bool checkPoolLiveAllocations(
      DeviceIndex device,
      MempoolId_t id,
      const std::unordered_set<void*>& expected) override;
  ShareableHandle shareIpcHandle(void* pointer) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  void recordHistory(
      bool enabled,
      CreateContextFn recorder,
      size_t entries_max,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skip) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override;
  void pushCompileContext(std::string& name) override;
  void popCompileContext() override;
  bool supportsUserMetadata() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void annotateMemory(const void* pointer, const std::string& metadata) override;
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override;
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override;
  void attachOomRejectionObserver(OomRejectionObserver observer) override;
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override;
  void enablePeerAccess(DeviceIndex device, DeviceIndex to) override;
  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t size,
      cudaStream_t stream,
      bool is_peer_enabled) override;
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t id) override;
  CheckpointDelta setCheckpointPoolState(
      DeviceIndex device,
      std::shared_ptr<AllocatorState> state) override;
  std::string name() override;

  // Applies a configuration string on top of the current settings, to all devices (including those that
  // are opened later) or to none.
  void configure(const std::string& conf);
  // Passes the reserve class that the program has set in PyTorch for the device's current stream to the
  // library.
  void follow_reserve_class(DeviceIndex device);

 private:
  Allocator();

  // Returns the handle of a device's allocator. If there is none yet, creates it and applies all
  // settings to it.
  uint64_t open(DeviceIndex device) {
    auto is_open = has_place(device) && is_open_[device].load(std::memory_order_acquire);
    return C10_LIKELY(is_open) ? STRATALLOC_TORCH_HANDLE + device : open_new(device);
  }
  // Returns the handle of a device's allocator, or 0 if there is none yet. Creates none.
  uint64_t opened(DeviceIndex device) const {
    check_place(device);
    return is_open_[device].load(std::memory_order_acquire) ? STRATALLOC_TORCH_HANDLE + device : 0;
  }
  // Returns the handle of the device that was opened first, or 0.
  uint64_t first_opened() const {
    return open_count_ == 0 ? 0 : opened(static_cast<DeviceIndex>(first_open_));
  }
  static bool has_place(DeviceIndex device) {
    return 0 <= device && device < C10_COMPILE_TIME_MAX_GPUS;
  }
  static void check_place(DeviceIndex device) {
    TORCH_CHECK(has_place(device), "invalid device ", static_cast<int>(device));
  }
  uint64_t open_new(DeviceIndex device);
  // Applies `settings_` to a new device. Requires `settings_lock_`.
  void prepare(DeviceIndex device, uint64_t handle);
  void apply_recording(uint64_t handle, bool clear);
  void add_tracker(DeviceIndex device, uint64_t handle, const AllocatorTraceTracker& tracker);
  void add_observer(uint64_t handle, const OutOfMemoryObserver& observer);
  void add_rejection_observer(uint64_t handle, const OomRejectionObserver& observer);

  // Inserts the entries that `annotateMemory` created into a device's trace, by time.
  void add_annotated(DeviceIndex device, std::vector<TraceEntry>& trace);
  // Stores the current settings in `info`.
  void add_settings(torch_cuda::AllocatorConfigInfo& info);

  // Calls `call` with each open device and its handle.
  template <class Call>
  void for_each_open(Call call) {
    for (int device = 0; device < C10_COMPILE_TIME_MAX_GPUS; device++) {
      auto index = static_cast<DeviceIndex>(device);
      if (auto handle = opened(index)) {
        call(index, handle);
      }
    }
  }

  // Returns the calling thread's current device. Makes no call if PyTorch sees only one device.
  DeviceIndex current_device() const {
    return C10_LIKELY(device_count_.load(std::memory_order_relaxed) == 1)
        ? 0
        : c10::cuda::current_device();
  }
  // Returns the device on which a pointer is most likely.
  int likely_device() const;
  void* take(size_t size, DeviceIndex device, cudaStream_t stream);
  void delete_watched(void* pointer);
  // Reports a block to the profiler and the trace. `size` is negative for a free.
  void report_to_profiler(void* pointer, int64_t size, DeviceIndex device);
  [[noreturn]] void fail_to_take(
      stratalloc_status status,
      size_t size,
      DeviceIndex device);
  void set_pool_options(DeviceIndex device, MempoolId_t id, uint32_t set, uint32_t clear);

  // The settings of all devices, including those that are opened later. Callbacks from the library
  // never acquire `settings_lock_`, because it is held during calls of the library.
  struct Settings {
    bool recording = false;
    CreateContextFn recorder = nullptr;
    size_t entries_max = 1;
    RecordContext when = RecordContext::NEVER;
    std::string skip;
    bool skips_annotate = false;
    bool has_metadata = false;
    std::vector<AllocatorTraceTracker> trackers;
    std::vector<OutOfMemoryObserver> observers;
    std::vector<OomRejectionObserver> rejection_observers;
    // The library's configuration after the last string that was applied through PyTorch.
    std::string conf;
  };

  std::array<std::atomic<bool>, C10_COMPILE_TIME_MAX_GPUS> is_open_{};
  std::atomic<int> open_count_{0};
  std::atomic<int> first_open_{0};
  std::atomic<int> device_count_{0};
  // The initial value of `caching_`, from the environment variable that the library reads as well.
  const bool caches_by_default_;
  std::atomic<bool> caching_;
  std::atomic<bool> recording_{false};
  std::mutex settings_lock_;
  Settings settings_;

  // The options of pools, if PyTorch has set any.
  std::mutex pools_lock_;
  std::map<std::pair<DeviceIndex, MempoolId_t>, uint32_t> pool_options_;

  // The reserve classes that were passed to the library.
  std::mutex classes_lock_;
  std::map<std::pair<DeviceIndex, cudaStream_t>, std::string> reserve_classes_;

  // Open blocks of other processes.
  std::mutex shared_lock_;
  std::unordered_map<std::string, std::weak_ptr<void>> shared_;

  // The entries that the program added with `annotateMemory`, oldest first.
  std::mutex annotations_lock_;
  std::deque<AnnotationEntry> annotations_;
  std::deque<TraceEntry> annotated_;
};

} // namespace stratalloc_torch
