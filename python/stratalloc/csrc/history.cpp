// What happened and who asked: statistics, history, snapshots, and who is told.
#include <c10/cuda/CUDAFunctions.h>

#include <chrono>
#include <string_view>

#include "allocator.h"
#include "stacks.h"

namespace stratalloc_torch {

namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

TraceEntry entry_of(DeviceIndex device, const stratalloc_entry& entry) {
  // Both speak of actions by the same numbers, and of an address that is free bytes for one of them.
  TraceEntry made(
      static_cast<TraceEntry::Action>(entry.action),
      device,
      entry.address,
      entry.size_bytes,
      static_cast<cudaStream_t>(entry.stream),
      {entry.pool.capture, entry.pool.user},
      c10::getApproximateTime(),
      context_of(entry.stack),
      entry.compile_context ? entry.compile_context : "N/A",
      entry.user_metadata ? entry.user_metadata : "");
  return made;
}

// A tracker of PyTorch's, and the device that its allocator is of.
struct Tracker {
  AllocatorTraceTracker told;
  DeviceIndex device;
};

void track(void* user, const stratalloc_entry* entry) {
  try {
    auto* tracker = static_cast<Tracker*>(user);
    tracker->told(entry_of(tracker->device, *entry));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: a trace tracker failed: %s\n", error.what());
  }
}

void release_tracker(void* user) {
  delete static_cast<Tracker*>(user);
}

void observe(void* user, int device, uint64_t asked, uint64_t total, uint64_t free) {
  try {
    (*static_cast<OutOfMemoryObserver*>(user))(device, asked, total, free);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: an out-of-memory observer failed: %s\n", error.what());
  }
}

void release_observer(void* user) {
  delete static_cast<OutOfMemoryObserver*>(user);
}

// A snapshot of one device, translated.
struct Collected {
  DeviceIndex device;
  std::vector<SegmentInfo>& segments;
  std::vector<TraceEntry> entries;
};

void collect_segment(void* user, const stratalloc_segment* segment) {
  auto* collected = static_cast<Collected*>(user);
  SegmentInfo info;
  info.device = collected->device;
  info.address = segment->address;
  info.total_size = segment->total_bytes;
  info.requested_size = segment->requested_bytes;
  info.allocated_size = segment->allocated_bytes;
  info.active_size = segment->active_bytes;
  info.stream = static_cast<cudaStream_t>(segment->stream);
  info.is_large = segment->is_large;
  info.is_expandable = segment->is_expandable;
  info.owner_private_pool_id = {segment->pool.capture, segment->pool.user};
  // Without the context of who asked for it, which PyTorch drops as soon as a segment is split: its entry has it.
  collected->segments.push_back(std::move(info));
}

void collect_block(void* user, const stratalloc_block* block) {
  BlockInfo info;
  info.size = block->size_bytes;
  info.requested_size = block->requested_bytes;
  info.allocated = block->state == 0;
  info.active = block->state != 2;
  info.context_when_allocated = context_of(block->stack);
  static_cast<Collected*>(user)->segments.back().blocks.push_back(std::move(info));
}

void collect_entry(void* user, const stratalloc_entry* entry) {
  auto* collected = static_cast<Collected*>(user);
  collected->entries.push_back(entry_of(collected->device, *entry));
  collected->entries.back().time_.t_ = entry->time_us;
}

int64_t now_us() {
  auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

int64_t* metric_of(Stat& stat, std::string_view name) {
  if (name == "current") return &stat.current;
  if (name == "peak") return &stat.peak;
  if (name == "allocated") return &stat.allocated;
  if (name == "freed") return &stat.freed;
  return nullptr;
}

// Where the value of a key of `memory_stats()` stands; null for keys that PyTorch's struct has no field for.
int64_t* field_of(DeviceStats& stats, std::string_view key) {
  auto dot = key.find('.');
  auto family = key.substr(0, dot);
  if (dot == std::string_view::npos) {
    if (key == "num_alloc_retries") return &stats.num_alloc_retries;
    if (key == "num_ooms") return &stats.num_ooms;
    if (key == "num_sync_all_streams") return &stats.num_sync_all_streams;
    if (key == "num_device_alloc") return &stats.num_device_alloc;
    if (key == "num_device_free") return &stats.num_device_free;
    if (key == "max_split_size") return &stats.max_split_size;
    return nullptr;
  }
  auto rest = key.substr(dot + 1);
  if (family == "oversize_allocations") return metric_of(stats.oversize_allocations, rest);
  if (family == "oversize_segments") return metric_of(stats.oversize_segments, rest);
  const std::pair<std::string_view, StatArray*> families[] = {
      {"allocation", &stats.allocation},
      {"segment", &stats.segment},
      {"active", &stats.active},
      {"inactive_split", &stats.inactive_split},
      {"allocated_bytes", &stats.allocated_bytes},
      {"reserved_bytes", &stats.reserved_bytes},
      {"active_bytes", &stats.active_bytes},
      {"inactive_split_bytes", &stats.inactive_split_bytes},
      {"requested_bytes", &stats.requested_bytes},
  };
  dot = rest.find('.');
  if (dot == std::string_view::npos) return nullptr;
  auto pool = rest.substr(0, dot);
  size_t type = pool == "all" ? 0 : pool == "small_pool" ? 1 : pool == "large_pool" ? 2 : 3;
  for (const auto& [name, array] : families) {
    if (name == family && type < array->size()) return metric_of((*array)[type], rest.substr(dot + 1));
  }
  return nullptr;
}

} // namespace

DeviceStats Allocator::getDeviceStats(DeviceIndex device) {
  auto json = text_of([&](char* buffer, size_t size, size_t* needed) {
    return library.torch_statistics_json(device, buffer, size, needed);
  });
  DeviceStats stats;
  // One flat object of whole numbers, without spaces.
  std::string_view rest(json);
  for (auto start = rest.find('"'); start != rest.npos; start = rest.find('"')) {
    rest.remove_prefix(start + 1);
    auto end = rest.find('"');
    auto key = rest.substr(0, end);
    rest.remove_prefix(end + 2);
    if (auto* field = field_of(stats, key)) {
      *field = std::strtoll(rest.data(), nullptr, 10);
    }
  }
  return stats;
}

void Allocator::resetAccumulatedStats(DeviceIndex device) {
  if (auto handle = opened(device)) {
    check(library.reset_accumulated(handle));
  }
}

void Allocator::resetPeakStats(DeviceIndex device) {
  if (auto handle = opened(device)) {
    check(library.reset_peaks(handle));
  }
}

void Allocator::apply_recording(uint64_t handle, bool clear) {
  auto source = stack_source(settings_.recording ? settings_.recorder : nullptr);
  check(library.history_set_stack_source(handle, &source));
  if (!settings_.recording && settings_.trackers.empty()) {
    check(library.history_stop(handle));
    return;
  }
  // Trackers are told of everything, also while nobody records.
  auto when = settings_.recording ? settings_.when : RecordContext::NEVER;
  auto entries_max = settings_.recording ? std::max<size_t>(settings_.entries_max, 1) : 1;
  const char* skip = settings_.recording ? settings_.skip.c_str() : nullptr;
  check(library.history_start(
      handle, static_cast<uint32_t>(when), entries_max, skip, clear || !settings_.recording));
}

void Allocator::recordHistory(
    bool enabled,
    CreateContextFn recorder,
    size_t entries_max,
    RecordContext when,
    bool clear,
    const std::vector<std::string>& skip) {
  TORCH_CHECK(when == RecordContext::NEVER || recorder, "a level of contexts needs a recorder");
  std::string names;
  for (const auto& action : skip) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
    // Says what is wrong with a name as PyTorch does.
    c10::CachingDeviceAllocator::parseTraceEntryAction(action);
#endif
    names += (names.empty() ? "" : ",") + action;
  }
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.recording = enabled;
  settings_.recorder = enabled ? recorder : nullptr;
  settings_.entries_max = entries_max;
  settings_.when = enabled ? when : RecordContext::NEVER;
  settings_.skip = names;
  for_each_open([&](DeviceIndex, uint64_t handle) { apply_recording(handle, clear); });
  recording_ = enabled;
  if (!enabled || clear) {
    std::lock_guard<std::mutex> annotations(annotations_lock_);
    annotations_.clear();
  }
}

bool Allocator::isHistoryEnabled() {
  return recording_;
}

void Allocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) {
  if (!recording_) {
    return;
  }
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  AnnotationEntry entry(device, c10::getApproximateTime());
  for (const auto& [name, value] : pairs) {
    entry.recordUserMetadata(name, value);
  }
  entry.time_.t_ = now_us();
  size_t most = 1;
  {
    std::lock_guard<std::mutex> guard(settings_lock_);
    most = std::max<size_t>(settings_.entries_max, 1);
  }
  std::lock_guard<std::mutex> guard(annotations_lock_);
  annotations_.push_back(std::move(entry));
  while (annotations_.size() > most) {
    annotations_.pop_front();
  }
}

void Allocator::pushCompileContext(std::string& name) {
  check(library.compile_context_push(name.c_str()));
}

void Allocator::popCompileContext() {
  check(library.compile_context_pop());
}

void Allocator::setUserMetadata(const std::string& metadata) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  for_each_open([&](DeviceIndex, uint64_t handle) {
    check(library.history_set_metadata(handle, metadata.empty() ? nullptr : metadata.c_str()));
  });
  settings_.metadata = metadata;
}

std::string Allocator::getUserMetadata() {
  std::lock_guard<std::mutex> guard(settings_lock_);
  return settings_.metadata;
}

void Allocator::add_tracker(
    DeviceIndex device,
    uint64_t handle,
    const AllocatorTraceTracker& tracker) {
  auto lent = std::make_unique<Tracker>(Tracker{tracker, device});
  uint64_t id = 0;
  check(library.tracker_add(handle, track, release_tracker, lent.get(), &id));
  static_cast<void>(lent.release());
}

void Allocator::attachAllocatorTraceTracker(AllocatorTraceTracker tracker) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.trackers.push_back(std::move(tracker));
  for_each_open([&](DeviceIndex device, uint64_t handle) {
    add_tracker(device, handle, settings_.trackers.back());
    if (!settings_.recording) {
      apply_recording(handle, false);
    }
  });
}

void Allocator::add_observer(uint64_t handle, const OutOfMemoryObserver& observer) {
  auto lent = std::make_unique<OutOfMemoryObserver>(observer);
  uint64_t id = 0;
  check(library.oom_observer_add(handle, observe, release_observer, lent.get(), &id));
  static_cast<void>(lent.release());
}

void Allocator::attachOutOfMemoryObserver(OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.observers.push_back(std::move(observer));
  for_each_open(
      [&](DeviceIndex, uint64_t handle) { add_observer(handle, settings_.observers.back()); });
}

SnapshotInfo Allocator::snapshot(MempoolId_t id, bool include_traces) {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  using CudaConfig = torch_cuda::CUDAAllocatorConfig;
  SnapshotInfo result;
  result.device_traces.resize(include_traces ? device_count_.load() : 0);
  bool is_all = id.first == 0 && id.second == 0;
  auto pool = pool_of(id);
  for_each_open([&](DeviceIndex device, uint64_t handle) {
    Collected collected{device, result.segments, {}};
    stratalloc_snapshot* taken = nullptr;
    bool with_entries = include_traces && recording_;
    check(library.snapshot_take(handle, is_all ? nullptr : &pool, with_entries, &taken));
    stratalloc_snapshot_visitor visitor{
        collect_segment, collect_block, collect_entry, &collected};
    auto status = library.snapshot_visit(taken, &visitor);
    library.snapshot_drop(taken);
    check(status);
    if (include_traces) {
      if (result.device_traces.size() <= static_cast<size_t>(device)) {
        result.device_traces.resize(device + 1);
      }
      result.device_traces[device] = std::move(collected.entries);
    }
  });
  {
    std::lock_guard<std::mutex> guard(annotations_lock_);
    result.external_annotations.assign(annotations_.begin(), annotations_.end());
  }
  auto& config = result.config_metadata;
  config.garbage_collection_threshold = Config::garbage_collection_threshold();
  config.max_split_size = Config::max_split_size();
  config.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  config.expandable_segments = Config::use_expandable_segments();
  config.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  config.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  config.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
  config.last_allocator_settings = Config::last_allocator_settings();
  config.roundup_power2_divisions = Config::roundup_power2_divisions();
  return result;
}

} // namespace stratalloc_torch
