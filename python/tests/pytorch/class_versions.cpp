// Snapshots, settings, and the functions that PyTorch's class has since versions after 2.10.
#include "class_checks.h"

#include <algorithm>
#include <atomic>

namespace settings = c10::CachingAllocator;
using stratalloc_torch::Config;

static cca::SegmentInfo segment_of(const c10::DataPtr& block) {
  auto address = reinterpret_cast<size_t>(block.get());
  for (auto& segment : cca::snapshot().segments) {
    if (segment.address <= address && address < segment.address + segment.total_size) {
      return segment;
    }
  }
  return {};
}

#if STRATALLOC_SINCE(11)
// NCCL registers the segments of a pool in this order.
static void segments_are_numbered_as_they_come() {
  cca::emptyCache();
  std::vector<c10::DataPtr> blocks;
  for (int i = 0; i < 4; i++) blocks.push_back(ours()->allocate(20 * MIB));
  int last = -1;
  for (const auto& block : blocks) {
    auto counter = segment_of(block).registration_counter;
    CHECK(counter > last);
    last = counter;
  }
  // A segment that is allocated again gets a new number.
  blocks[0].clear();
  cca::emptyCache();
  blocks[0] = ours()->allocate(20 * MIB);
  CHECK(segment_of(blocks[0]).registration_counter > last);
  for (const char* conf : {"expandable_segments:True", "backend:cudaMallocAsync"}) {
    settings::setAllocatorSettings(conf);
    blocks.push_back(ours()->allocate(20 * MIB));
    for (const auto& segment : cca::snapshot().segments) CHECK(segment.registration_counter >= 0);
  }
  settings::setAllocatorSettings("backend:native,expandable_segments:False");
}
#else
static void segments_are_numbered_as_they_come() {}
#endif

static void a_segment_that_was_not_split_has_its_context() {
  cca::emptyCache();
  base()->recordHistory(true, gather, 1000, cca::RecordContext::ALL, true, {});
  auto whole = ours()->allocate(30 * MIB);
  auto split = ours()->allocate(3 * MIB);
  auto small = ours()->allocate(512);
  auto has_context = [](const c10::DataPtr& block) {
    return dynamic_cast<Context*>(segment_of(block).context_when_allocated.get()) != nullptr;
  };
  CHECK(has_context(whole) && !has_context(split) && !has_context(small));
  for (const auto* block : {&split, &small}) {
    auto address = reinterpret_cast<size_t>(block->get());
    CHECK(!segment_of(*block).context_when_allocated && address);
  }
  auto start = reinterpret_cast<size_t>(whole.get());
  auto split_start = reinterpret_cast<size_t>(split.get());
  whole.clear();
  split.clear();
  for (const auto& segment : cca::snapshot().segments) {
    if (segment.address == start) CHECK(segment.context_when_allocated);
    if (segment.address == split_start) CHECK(!segment.context_when_allocated);
  }
  small.clear();
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  cca::emptyCache();
}

void segments() {
  segments_are_numbered_as_they_come();
  a_segment_that_was_not_split_has_its_context();
}

// Metadata belongs to the calling thread.
static void metadata_is_per_thread() {
  CHECK(base()->supportsUserMetadata());
  base()->recordHistory(true, gather, 1000, cca::RecordContext::NEVER, true, {});
  cca::setUserMetadata("main");
  std::thread([] {
    CHECK(cca::getUserMetadata().empty());
    ours()->allocate(700);
    cca::setUserMetadata("other");
    ours()->allocate(800);
    CHECK(cca::getUserMetadata() == "other");
  }).join();
  CHECK(cca::getUserMetadata() == "main");
  ours()->allocate(900);
  {
    c10::cuda::CUDAGuard guard(1);
    ours()->allocate(901);
  }
  cca::setUserMetadata("");
  ours()->allocate(1000);
  std::vector<std::pair<size_t, std::string>> seen;
  for (const auto& trace : cca::snapshot().device_traces) {
    for (const auto& entry : trace) {
      if (entry.action_ == TraceEntry::ALLOC) seen.emplace_back(entry.size_, entry.user_metadata_);
    }
  }
  std::sort(seen.begin(), seen.end());
  std::vector<std::pair<size_t, std::string>> expected{
      {700, ""}, {800, "other"}, {900, "main"}, {901, "main"}, {1000, ""}};
  CHECK(seen == expected);
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
}

static void an_annotation_is_an_entry() {
  static std::atomic<int> entries{0};
  cca::attachAllocatorTraceTracker(
      [](const TraceEntry& entry) { entries += entry.action_ == stratalloc_torch::kAnnotate; });
  auto block = ours()->allocate(4000);
  base()->annotateMemory(block.get(), "not recorded");
  base()->recordHistory(true, gather, 1000, cca::RecordContext::ALL, true, {});
  auto other = ours()->allocate(500);
  base()->annotateMemory(block.get(), "weights");
  other.clear();
  THROWS(c10::Error, "no live allocation", base()->annotateMemory(&block, "x"));
  auto trace = cca::snapshot().device_traces.at(0);
  CHECK(trace.size() == 4);
  CHECK(trace[0].action_ == TraceEntry::ALLOC && trace[2].action_ == TraceEntry::FREE_REQUESTED);
  const auto& entry = trace[1];
  CHECK(entry.action_ == stratalloc_torch::kAnnotate && entry.size_ == 4000);
  CHECK(entry.addr_ == reinterpret_cast<size_t>(block.get()) && entry.user_metadata_ == "weights");
  CHECK(entries == 1);
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  CHECK(cca::snapshot().device_traces.at(0).empty());
#if STRATALLOC_SINCE(14)
  base()->recordHistory(true, gather, 1000, cca::RecordContext::ALL, true, {"annotate"});
  base()->annotateMemory(block.get(), "weights");
  CHECK(cca::snapshot().device_traces.at(0).empty() && entries == 2);
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
#endif
}

static void a_pointer_has_the_context_of_its_block() {
  auto before = ours()->allocate(512);
  base()->recordHistory(true, gather, 1000, cca::RecordContext::STATE, true, {});
  auto block = ours()->allocate(6 * MIB);
  auto* start = static_cast<char*>(block.get());
  CHECK(dynamic_cast<Context*>(base()->getContextForPointer(start).get()));
  CHECK(!base()->getContextForPointer(start + 512) && !base()->getContextForPointer(before.get()));
  block.clear();
  CHECK(!base()->getContextForPointer(start));
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
}

void metadata() {
  metadata_is_per_thread();
  an_annotation_is_an_entry();
  a_pointer_has_the_context_of_its_block();
}

void rejections() {
  static std::vector<std::array<size_t, 4>> reports;
  static int failed = 0;
  base()->attachOomRejectionObserver([](int64_t device, size_t requested, size_t reserved, size_t total) {
    reports.push_back({static_cast<size_t>(device), requested, reserved, total});
  });
  cca::attachOutOfMemoryObserver([](int64_t, size_t, size_t, size_t) { failed++; });
  cca::emptyCache();
  settings::setAllocatorSettings("throw_on_cudamalloc_oom:True");
  auto total = ours()->getMemoryInfo(0).second;
  auto held = ours()->allocate(30 * MIB);
  auto ooms = stats().num_ooms;
  THROWS(c10::OutOfMemoryError, "CUDA out of memory", ours()->allocate(total));
  CHECK(reports.size() == 1 && failed == 0 && stats().num_ooms == ooms);
  CHECK(reports[0][0] == 0 && reports[0][1] >= total && reports[0][2] == 30 * MIB && reports[0][3] == total);
#if STRATALLOC_SINCE(12)
  CHECK(stats().num_oom_rejections == 1);
#endif
  settings::setAllocatorSettings("throw_on_cudamalloc_oom:False");
  THROWS(c10::OutOfMemoryError, "CUDA out of memory", ours()->allocate(total));
  CHECK(reports.size() == 1 && failed == 1);
}

// A snapshot lists the library's settings, and PyTorch's for keys that the library lacks.
static void a_snapshot_has_the_settings_in_force() {
  settings::setAllocatorSettings("max_split_size_mb:64,roundup_power2_divisions:8,pinned_num_register_threads:4");
  auto config = cca::snapshot().config_metadata;
  CHECK(config.max_split_size == 64 * MIB && config.pinned_num_register_threads == 4);
  CHECK(config.roundup_power2_divisions == std::vector<size_t>(16, 8));
  CHECK(!config.expandable_segments && config.garbage_collection_threshold == 0);
  CHECK(config.last_allocator_settings.find("max_split_size_mb:64") == 0);
  settings::setAllocatorSettings("garbage_collection_threshold:0.5,pinned_num_register_threads:1");
  config = cca::snapshot().config_metadata;
  CHECK(config.max_split_size == SIZE_MAX && config.garbage_collection_threshold == 0.5);
#if STRATALLOC_SINCE(13)
  CHECK(config.max_round_threshold == SIZE_MAX && config.max_cached_size == SIZE_MAX);
#endif
}

// A refused string changes nothing, neither in the library nor in PyTorch's own settings.
static void a_refused_string_changes_nothing() {
  settings::setAllocatorSettings("max_split_size_mb:64");
  MempoolId_t pool{0, 91};
  // On the second device only, a pool with a user prevents a switch of the backend.
  cca::createOrIncrefPool(1, pool);
  auto wrong = "max_split_size_mb:200,expandable_segments:True,pinned_num_register_threads:8,"
               "release_lock_on_cudamalloc:True,backend:cudaMallocAsync";
  THROWS(c10::Error, "has users", settings::setAllocatorSettings(wrong));
  CHECK(cca::name() == "native");
  auto config = cca::snapshot().config_metadata;
  CHECK(config.max_split_size == 64 * MIB && !config.expandable_segments);
  CHECK(config.pinned_num_register_threads == 1 && !config.release_lock_on_malloc);
  CHECK(Config::max_split_size() == 64 * MIB && !Config::use_expandable_segments());
  CHECK(settings::getAllocatorSettings() == "max_split_size_mb:64");
  cca::emptyCache();
  // 100 MiB exceed the largest block that is split, on the second device as well.
  c10::cuda::CUDAGuard guard(1);
  ours()->allocate(100 * MIB).clear();
  ours()->allocate(30 * MIB).clear();
  CHECK(current(stats(1).reserved_bytes) == static_cast<int64_t>(130 * MIB));
  cca::releasePool(1, pool);
  settings::setAllocatorSettings("");
}

void settings_in_force() {
  a_snapshot_has_the_settings_in_force();
  a_refused_string_changes_nothing();
}

// Bytes of each private pool, which PyTorch lists since 2.13.
void bytes_of_pools() {
#if STRATALLOC_SINCE(13)
  MempoolId_t pool{0, 95};
  auto now = [&] {
    auto all = stats().reserved_bytes_by_private_pools;
    auto found = all.find(pool);
    return found == all.end() ? -1 : found->second[0].current;
  };
  CHECK(now() == -1);
  cca::createOrIncrefPool(0, pool);
  cca::beginAllocateToPool(0, pool, [](cudaStream_t) { return true; });
  auto block = ours()->allocate(30 * MIB);
  auto small = ours()->allocate(30);
  cca::endAllocateToPool(0, pool);
  cca::releasePool(0, pool);
  CHECK(now() == static_cast<int64_t>(32 * MIB));
  CHECK(stats().reserved_bytes_by_private_pools[pool][1].current == static_cast<int64_t>(2 * MIB));
  block.clear();
  small.clear();
  cca::releasePool(0, pool);
  cca::emptyCache(pool);
  CHECK(now() == 0 && stats().reserved_bytes_by_private_pools[pool][0].peak == static_cast<int64_t>(32 * MIB));
  cca::resetPeakStats(0);
  cca::resetAccumulatedStats(0);
  CHECK(now() == -1);
#endif
}

void addresses() {
  cca::emptyCache();
  auto block = ours()->allocate(8 * MIB);
  auto* start = static_cast<char*>(block.get());
  THROWS(c10::Error, "", base()->allocateWithAddress(MIB, start));
  block.clear();
  auto exact = base()->allocateWithAddress(2 * MIB, start + 3 * MIB);
  CHECK(exact.get() == start + 3 * MIB && exact.get_deleter() == ours()->raw_deleter());
  CHECK(exact.device() == c10::Device("cuda:0") && current(stats().allocation) == 1);
  auto front = ours()->allocate(3 * MIB);
  CHECK(front.get() == start);
  THROWS(c10::Error, "", base()->allocateWithAddress(MIB, start + 4 * MIB));
  exact.clear();
  front.clear();
  CHECK(current(stats().allocation) == 0);
}

// A stream's reserve class, which programs can set in PyTorch since 2.15, decides how much address space
// is reserved.
void reserve_classes() {
#if STRATALLOC_SINCE(15)
  cca::emptyCache();
  settings::setAllocatorSettings(
      "expandable_segments:True,expandable_segments_reserve_by_class:[tiny:0.001]");
  auto stream = c10::cuda::getStreamFromPool(false, 0);
  c10::cuda::CUDAStreamGuard guard(stream);
  auto much = ours()->getMemoryInfo(0).second / 100;
  cca::setExpandableSegmentReserveClassForStream(stream.stream(), "tiny");
  THROWS(c10::OutOfMemoryError, "expandable_segments_reserve_by_class", ours()->allocate(much));
  cca::setExpandableSegmentReserveClassForStream(stream.stream(), "");
  CHECK(ours()->allocate(much).get());
  cca::emptyCache();
  settings::setAllocatorSettings("expandable_segments:False");
#endif
}
