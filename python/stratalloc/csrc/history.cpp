// Statistics, history, snapshots, trackers and observers.
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>

#include "allocator.h"
#include "stacks.h"

namespace stratalloc_torch {

namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

// The actions of tags, which PyTorch does not have.
constexpr uint32_t kTagPause = 16, kTagResume = 17;

TraceEntry entry_of(DeviceIndex device, const stratalloc_entry& entry) {
  // The library and PyTorch use the same numbers for all other actions. Both store the device's free bytes
  // as the address of an OOM entry.
  auto action = static_cast<TraceEntry::Action>(entry.action);
  const char* metadata = entry.user_metadata ? entry.user_metadata : "";
  if (entry.action == kTagPause || entry.action == kTagResume) {
    // PyTorch throws for an action that it does not know. The metadata distinguishes the entry.
    action = entry.action == kTagPause ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_MAP;
    metadata = entry.action == kTagPause ? "tag_pause" : "tag_resume";
  }
  TraceEntry made(
      action,
      device,
      entry.address,
      entry.size_bytes,
      static_cast<cudaStream_t>(entry.stream),
      {entry.pool.capture, entry.pool.user},
      c10::getApproximateTime(),
      context_of(entry.stack),
      entry.compile_context ? entry.compile_context : "N/A",
      metadata);
  return made;
}

// A tracker that the program registered with PyTorch, and the device of the allocator that it is
// attached to.
struct Tracker {
  AllocatorTraceTracker function;
  DeviceIndex device;
};

// Calls a function of PyTorch or of the program. Prints an exception, because none may pass through the
// library.
template <class Call>
void call_or_warn(const char* what, Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stratalloc: %s failed: %s\n", what, error.what());
  }
}

void track(void* user, const stratalloc_entry* entry) {
  auto* tracker = static_cast<Tracker*>(user);
  call_or_warn("a trace tracker", [&] { tracker->function(entry_of(tracker->device, *entry)); });
}

void observe(void* user, int device, uint64_t requested, uint64_t total, uint64_t free) {
  auto& observer = *static_cast<OutOfMemoryObserver*>(user);
  call_or_warn("an out-of-memory observer", [&] { observer(device, requested, total, free); });
}

void observe_rejection(
    void* user,
    int device,
    uint64_t segment,
    uint64_t reserved,
    uint64_t total) {
  auto& observer = *static_cast<OomRejectionObserver*>(user);
  call_or_warn("a rejection observer", [&] { observer(device, segment, reserved, total); });
}

// The calling thread's metadata. This is a pointer, which has no destructor, so that it can be read
// until the very end of the thread.
thread_local const char* metadata_here = nullptr;
struct Metadata {
  std::string text;
  ~Metadata() {
    metadata_here = nullptr;
  }
};
thread_local Metadata metadata;

// A snapshot of one device in PyTorch's types.
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
  constexpr uint64_t most = std::numeric_limits<int32_t>::max();
  set_registration_counter(info, static_cast<int32_t>(std::min(segment->number, most)));
  if (!segment->is_expandable) {
    info.context_when_allocated = context_of(segment->stack);
  }
  collected->segments.push_back(std::move(info));
}

// Returns whether a segment was never split. (PyTorch drops a segment's context at the first split.) A
// free block keeps the size of its last request. If the block is more than 1 MiB larger than that, the
// request had split it.
bool is_whole(const SegmentInfo& segment) {
  if (segment.blocks.size() != 1) {
    return false;
  }
  const auto& block = segment.blocks.front();
  return block.active || block.size - block.requested_size <= (1 << 20);
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

// Takes a snapshot and passes its contents to the visitor.
void visit(
    uint64_t handle,
    const stratalloc_pool* pool,
    bool with_entries,
    const stratalloc_snapshot_visitor& visitor) {
  stratalloc_snapshot* taken = nullptr;
  check(library.snapshot_take(handle, pool, with_entries, &taken));
  auto status = library.snapshot_visit(taken, &visitor);
  library.snapshot_drop(taken);
  check(status);
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

// Returns the counter with a name such as `all.current`.
int64_t* field_in(StatArray& array, std::string_view name) {
  auto dot = name.find('.');
  if (dot == std::string_view::npos) return nullptr;
  auto pool = name.substr(0, dot);
  size_t type = pool == "all" ? 0 : pool == "small_pool" ? 1 : pool == "large_pool" ? 2 : 3;
  return type < array.size() ? metric_of(array[type], name.substr(dot + 1)) : nullptr;
}

// Parses the name of a pool: `0_7` is the pool {0, 7}.
MempoolId_t pool_named(std::string_view name) {
  std::string text(name);
  char* end = nullptr;
  auto capture = std::strtoull(text.c_str(), &end, 10);
  return {capture, *end == '_' ? std::strtoull(end + 1, nullptr, 10) : 0};
}

// Returns the counter for a key of `memory_stats()`. Returns null if PyTorch's struct has none.
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
    if (key == "num_oom_rejections") return oom_rejections_of(stats);
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
  if (family == "reserved_bytes_by_private_pools") {
    dot = rest.find('.');
    auto* reserved = reserved_of_pool(stats, pool_named(rest.substr(0, dot)));
    return reserved ? field_in(*reserved, rest.substr(dot + 1)) : nullptr;
  }
  for (const auto& [name, array] : families) {
    if (name == family) return field_in(*array, rest);
  }
  return nullptr;
}

} // namespace

DeviceStats Allocator::getDeviceStats(DeviceIndex device) {
  auto json = text_of(device, STRATALLOC_TEXT_TORCH_STATISTICS);
  DeviceStats stats;
  // The text is one flat JSON object of integers, without spaces.
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
  // Trackers receive entries only while recording is on. So it is on as long as there is a tracker.
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
  bool skips_annotate = false;
  for (const auto& action : skip) {
    check_action(action);
    // Only `annotateMemory` adds entries with this action. The library does not know it.
    if (action == "annotate") {
      skips_annotate = true;
      continue;
    }
    names += (names.empty() ? "" : ",") + action;
  }
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.recording = enabled;
  settings_.recorder = enabled ? recorder : nullptr;
  settings_.entries_max = entries_max;
  settings_.when = enabled ? when : RecordContext::NEVER;
  settings_.skip = names;
  settings_.skips_annotate = skips_annotate;
  for_each_open([&](DeviceIndex, uint64_t handle) { apply_recording(handle, clear); });
  recording_ = enabled;
  if (!enabled || clear) {
    std::lock_guard<std::mutex> annotations(annotations_lock_);
    annotations_.clear();
    annotated_.clear();
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

const char* thread_metadata() {
  return metadata_here;
}

bool Allocator::supportsUserMetadata() {
  return true;
}

void Allocator::setUserMetadata(const std::string& text) {
  {
    std::lock_guard<std::mutex> guard(settings_lock_);
    if (!settings_.has_metadata) {
      for_each_open([&](DeviceIndex, uint64_t handle) {
        check(library.history_set_thread_metadata(handle, thread_metadata));
      });
      settings_.has_metadata = true;
    }
  }
  metadata.text = text;
  metadata_here = text.empty() ? nullptr : metadata.text.c_str();
}

std::string Allocator::getUserMetadata() {
  return metadata_here ? metadata_here : "";
}

void Allocator::annotateMemory(const void* pointer, const std::string& text) {
  if (!recording_) {
    return;
  }
  stratalloc_entry block{};
  std::optional<DeviceIndex> device;
  for_each_open([&](DeviceIndex other, uint64_t handle) {
    auto* address = const_cast<void*>(pointer);
    if (!device &&
        library.torch_describe_block(handle, address, &block) == STRATALLOC_STATUS_OK) {
      device = other;
    }
  });
  TORCH_CHECK(device, "annotateMemory: no live allocation found at pointer ", pointer);
  auto entry = entry_of(*device, block);
  entry.user_metadata_ = text;
  std::vector<AllocatorTraceTracker> trackers;
  size_t most = 1;
  bool skips = false;
  {
    std::lock_guard<std::mutex> guard(settings_lock_);
    trackers = settings_.trackers;
    most = std::max<size_t>(settings_.entries_max, 1);
    skips = settings_.skips_annotate;
  }
  for (const auto& tracker : trackers) {
    tracker(entry);
  }
  if (skips) {
    return;
  }
  entry.time_.t_ = block.time_us;
  std::lock_guard<std::mutex> guard(annotations_lock_);
  annotated_.push_back(std::move(entry));
  while (annotated_.size() > most) {
    annotated_.pop_front();
  }
}

std::shared_ptr<c10::GatheredContext> Allocator::getContextForPointer(const void* pointer) {
  std::shared_ptr<c10::GatheredContext> found;
  auto show = [](void* user, void* stack) {
    *static_cast<std::shared_ptr<c10::GatheredContext>*>(user) = context_of(stack);
  };
  for_each_open([&](DeviceIndex, uint64_t handle) {
    if (!found) {
      check(library.torch_visit_stack(handle, const_cast<void*>(pointer), show, &found));
    }
  });
  return found;
}

void Allocator::add_tracker(
    DeviceIndex device,
    uint64_t handle,
    const AllocatorTraceTracker& tracker) {
  lend(Tracker{tracker, device}, [&](stratalloc_release release, void* user) {
    uint64_t id = 0;
    return library.tracker_add(handle, track, release, user, &id);
  });
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
  lend(observer, [&](stratalloc_release release, void* user) {
    uint64_t id = 0;
    return library.oom_observer_add(handle, observe, release, user, &id);
  });
}

void Allocator::attachOutOfMemoryObserver(OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.observers.push_back(std::move(observer));
  for_each_open(
      [&](DeviceIndex, uint64_t handle) { add_observer(handle, settings_.observers.back()); });
}

void Allocator::add_rejection_observer(uint64_t handle, const OomRejectionObserver& observer) {
  lend(observer, [&](stratalloc_release release, void* user) {
    uint64_t id = 0;
    return library.oom_rejection_observer_add(handle, observe_rejection, release, user, &id);
  });
}

void Allocator::attachOomRejectionObserver(OomRejectionObserver observer) {
  std::lock_guard<std::mutex> guard(settings_lock_);
  settings_.rejection_observers.push_back(std::move(observer));
  for_each_open([&](DeviceIndex, uint64_t handle) {
    add_rejection_observer(handle, settings_.rejection_observers.back());
  });
}

void Allocator::add_annotated(DeviceIndex device, std::vector<TraceEntry>& trace) {
  std::lock_guard<std::mutex> guard(annotations_lock_);
  auto before = static_cast<ptrdiff_t>(trace.size());
  for (const auto& entry : annotated_) {
    if (entry.device_ == device) {
      trace.push_back(entry);
    }
  }
  auto by_time = [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; };
  std::inplace_merge(trace.begin(), trace.begin() + before, trace.end(), by_time);
}

void Allocator::add_settings(torch_cuda::AllocatorConfigInfo& info) {
  add_pinned_settings(info);
  info.last_allocator_settings = Config::last_allocator_settings();
  auto handle = first_opened();
  if (!handle) {
    // No device is open, so settings can only have changed through PyTorch's strings.
    info.garbage_collection_threshold = Config::garbage_collection_threshold();
    info.max_split_size = Config::max_split_size();
    info.expandable_segments = Config::use_expandable_segments();
    info.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
    info.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
    info.roundup_power2_divisions = Config::roundup_power2_divisions();
    return;
  }
  stratalloc_torch_settings_t settings{};
  check(library.torch_settings(handle, &settings));
  info.garbage_collection_threshold = settings.garbage_collection_threshold;
  info.max_split_size = settings.max_split_bytes;
  info.expandable_segments = settings.expandable_segments;
  info.release_lock_on_malloc = settings.release_lock_on_malloc;
  info.graph_capture_record_stream_reuse = settings.graph_capture_record_stream_reuse;
  info.roundup_power2_divisions.assign(
      std::begin(settings.roundup_power2_divisions), std::end(settings.roundup_power2_divisions));
  // The library's own functions may have changed the settings. Then no string of PyTorch describes
  // them, and the library's string is reported.
  auto conf = text_of(handle, STRATALLOC_TEXT_CONF);
  std::lock_guard<std::mutex> guard(settings_lock_);
  if (conf != settings_.conf) {
    info.last_allocator_settings = conf;
  }
}

SnapshotInfo Allocator::snapshot(MempoolId_t id, bool include_traces) {
  SnapshotInfo result{};
  result.device_traces.resize(include_traces ? device_count_.load() : 0);
  bool is_all = id.first == 0 && id.second == 0;
  auto pool = pool_of(id);
  for_each_open([&](DeviceIndex device, uint64_t handle) {
    auto first = result.segments.size();
    Collected collected{device, result.segments, {}};
    stratalloc_snapshot_visitor visitor{collect_segment, collect_block, collect_entry, &collected};
    visit(handle, is_all ? nullptr : &pool, include_traces && recording_, visitor);
    for (auto at = first; at < result.segments.size(); at++) {
      if (!is_whole(result.segments[at])) {
        result.segments[at].context_when_allocated = nullptr;
      }
    }
    if (include_traces) {
      add_annotated(device, collected.entries);
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
  add_settings(result.config_metadata);
  return result;
}

} // namespace stratalloc_torch
