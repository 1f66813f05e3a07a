// Calls every function of PyTorch's allocator class, implemented by the library, as PyTorch does: with
// PyTorch's own `c10`, on host memory. Arguments: the extension and the library; STRATALLOC_DEVICE is
// `host`.
#include "class_checks.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>
#include <torch/csrc/profiler/combined_traceback.h>

// Exported by PyTorch, but declared in no header.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(DeviceIndex));
}

struct Callback : c10::FreeMemoryCallback {
  static int calls;
  bool Execute() override { return calls++, false; }
};
int Callback::calls = 0;
namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("class_virtuals", Callback)
}

// A program's allocator for a pool.
struct Plain : stratalloc_torch::Base {
  int allocated = 0, deleted = 0;
  void* raw_alloc_with_stream(size_t size, cudaStream_t) override {
    return allocated++, std::aligned_alloc(512, size);
  }
  void* raw_alloc(size_t size) override { return raw_alloc_with_stream(size, nullptr); }
  void raw_delete(void* pointer) override { deleted++, std::free(pointer); }
  [[noreturn]] static void unused() { std::abort(); }
  c10::DataPtr allocate(size_t) override { unused(); }
  void copy_data(void*, const void*, size_t) const override { unused(); }
  bool initialized() override { unused(); }
  void emptyCache(MempoolId_t) override { unused(); }
  cca::DeviceStats getDeviceStats(c10::DeviceIndex) override { unused(); }
  void resetAccumulatedStats(c10::DeviceIndex) override { unused(); }
  void resetPeakStats(c10::DeviceIndex) override { unused(); }
  void init(int) override { unused(); }
  double getMemoryFraction(c10::DeviceIndex) override { unused(); }
  void setMemoryFraction(double, c10::DeviceIndex) override { unused(); }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { unused(); }
  void enable(bool) override { unused(); }
  bool isEnabled() const override { unused(); }
  void cacheInfo(c10::DeviceIndex, size_t*) override { unused(); }
  void* getBaseAllocation(void*, size_t*) override { unused(); }
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override { unused(); }
  cca::SnapshotInfo snapshot(MempoolId_t, bool) override { unused(); }
  void beginAllocateToPool(c10::DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) override {
    unused();
  }
  void endAllocateToPool(c10::DeviceIndex, MempoolId_t) override { unused(); }
  void releasePool(c10::DeviceIndex, MempoolId_t) override { unused(); }
  cca::ShareableHandle shareIpcHandle(void*) override { unused(); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { unused(); }
  void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext, bool,
                     const std::vector<std::string>&) override {
    unused();
  }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver) override { unused(); }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker) override { unused(); }
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override { unused(); }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override { unused(); }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex, MempoolId_t) override {
    unused();
  }
  cca::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex, std::shared_ptr<cca::AllocatorState>) override {
    unused();
  }
  std::string name() override { unused(); }
  void attachOomRejectionObserver(stratalloc_torch::OomRejectionObserver) override { unused(); }
  // Pure virtual in some versions of PyTorch, absent from others.
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void*) override { unused(); }
  c10::DataPtr allocateWithAddress(size_t, void*) override { unused(); }
  bool supportsUserMetadata() override { unused(); }
  void annotateMemory(const void*, const std::string&) override { unused(); }
  void createOrIncrefPool(c10::DeviceIndex, MempoolId_t, std::shared_ptr<cca::CUDAAllocator>) override {
    unused();
  }
  void setUseOnOOM(c10::DeviceIndex, MempoolId_t, bool) override { unused(); }
};

static void blocks() {
  auto block = ours()->allocate(MIB);
  CHECK(block.get() && block.get() == block.get_context() && block.device() == c10::Device("cuda:0"));
  CHECK(block.get_deleter() == ours()->raw_deleter() && ours()->is_simple_data_ptr(block));
  std::memset(block.get(), 7, MIB);
  auto none = ours()->allocate(0);
  CHECK(!none.get() && none.get_deleter() == ours()->raw_deleter());
  CHECK(!cca::raw_alloc(0) && !cca::raw_alloc_with_stream(0, nullptr));
  auto copy = ours()->clone(block.get(), MIB);
  CHECK(static_cast<char*>(copy.get())[MIB - 1] == 7);
  void* raw = cca::raw_alloc(4096);
  void* on = cca::raw_alloc_with_stream(4096, c10::cuda::getStreamFromPool().stream());
  CHECK(raw && on && raw != on);
  CHECK(current(stats().allocation) == 4);
  CHECK(stats().requested_bytes[0].current == static_cast<int64_t>(2 * MIB + 8192));
  CHECK(stats().allocated_bytes[1].peak == stats().allocated_bytes[0].peak && stats().num_device_alloc > 0);
  cca::raw_delete(raw);
  cca::raw_delete(on);
  cca::raw_delete(nullptr);
  THROWS(c10::Error, "invalid device pointer", cca::raw_delete(&raw));
  THROWS(c10::Error, "invalid device pointer", cca::raw_delete(raw));
  // A deleter must not throw: it prints the error.
  ours()->raw_deleter()(&raw);
  size_t size = 0;
  auto* inside = static_cast<char*>(block.get()) + 5;
  CHECK(cca::getBaseAllocation(inside, &size) <= block.get() && size == 2 * MIB);
  THROWS(c10::Error, "invalid device pointer", cca::getBaseAllocation(&raw, &size));
  cca::recordStream(block, c10::cuda::getStreamFromPool());
  static_cast<c10::DeviceAllocator*>(ours())->recordStream(
      block, c10::cuda::getStreamFromPool().unwrap());
  cca::recordStream(c10::DataPtr(&raw, c10::Device("cuda:0")), c10::cuda::getStreamFromPool());
  block.clear();
  copy.clear();
  {
    c10::cuda::CUDAGuard guard(1);
    auto far = ours()->allocate(1);
    CHECK(far.device().index() == 1 && current(stats(1).allocation) == 1);
    c10::cuda::CUDAGuard back(0);
    auto near = ours()->allocate(1);
    // Each block is freed on its own device, whatever the current device is.
    far.clear();
    CHECK(current(stats(1).allocation) == 0 && current(stats(0).allocation) == 1);
  }
  CHECK(current(stats().allocation) == 0 && stats().allocation[0].freed > 0);
  cca::resetPeakStats(0);
  cca::resetAccumulatedStats(0);
  CHECK(stats().allocation[0].peak == 0 && stats().allocation[0].allocated == 0);
  size_t largest = 0;
  cca::cacheInfo(0, &largest);
  CHECK(largest > 0);
  auto [free, total] = ours()->getMemoryInfo(0);
  CHECK(0 < free && free <= total);
  CHECK(current(stats().reserved_bytes) > 0);
  cca::emptyCache();
  CHECK(current(stats().reserved_bytes) == 0);
}

// A profiler like PyTorch's: it receives the blocks of the thread that carries it, and can be turned off.
struct Profiler : c10::MemoryReportingInfoBase {
  struct Report {
    void* pointer;
    int64_t size;
    size_t allocated, reserved;
    c10::Device device;
  };
  bool wants = true;
  std::vector<Report> reports;
  void reportMemoryUsage(void* pointer, int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    reports.push_back({pointer, size, allocated, reserved, device});
  }
  bool memoryProfilingEnabled() const override { return wants; }
};

static void profiler() {
  auto profiler = std::make_shared<Profiler>();
  auto& reports = profiler->reports;
  cca::raw_delete(cca::raw_alloc(700));
  {
    c10::DebugInfoGuard carried(c10::DebugInfoKind::PROFILER_STATE, profiler);
    c10::cuda::CUDAGuard guard(1);
    void* block = cca::raw_alloc(700);
    CHECK(reports.size() == 1 && reports[0].pointer == block && reports[0].size == 700);
    CHECK(reports[0].allocated == 1024 && reports[0].reserved == 2 * MIB && reports[0].device == c10::Device("cuda:1"));
    THROWS(c10::Error, "invalid device pointer", cca::raw_delete(&block));
    cca::raw_delete(nullptr);
    CHECK(reports.size() == 1);
    c10::cuda::CUDAGuard back(0);
    cca::raw_delete(block);
    CHECK(reports.size() == 2 && reports[1].pointer == block && reports[1].size == -700);
    CHECK(reports[1].allocated == 0 && reports[1].device == c10::Device("cuda:1"));
    profiler->wants = false;
    cca::raw_delete(cca::raw_alloc(700));
    profiler->wants = true;
  }
  cca::raw_delete(cca::raw_alloc(700));
  CHECK(reports.size() == 2);
}

// If PyTorch sees one device, the current device is not read.
static void one_device() {
  c10::cuda::CUDAGuard guard(1);
  ours()->init(1);
  CHECK(ours()->allocate(1).device() == c10::Device("cuda:0"));
  ours()->init(2);
  CHECK(ours()->allocate(1).device() == c10::Device("cuda:1"));
}

static void no_memory() {
  static int failures = 0;
  cca::attachOutOfMemoryObserver([](int64_t device, size_t requested, size_t total, size_t free) {
    CHECK(device == 0 && requested >= 64 * MIB && total >= free);
    failures++;
  });
  auto before = Callback::calls;
  THROWS(c10::OutOfMemoryError, "CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of",
         cca::raw_alloc(1ULL << 50));
  CHECK(failures == 1 && Callback::calls > before && stats().num_ooms == 1);
  THROWS(c10::OutOfMemoryError, "1EB", ours()->allocate(1ULL << 62));
  CHECK(cca::getMemoryFraction(0) == 1);
  cca::setMemoryFraction(0.0, 0);
  CHECK(cca::getMemoryFraction(0) == 0);
  cca::emptyCache();
  THROWS(c10::OutOfMemoryError, "out of memory", ours()->allocate(64 * MIB));
  cca::setMemoryFraction(1.0, 0);
  THROWS(c10::Error, "invalid fraction", cca::setMemoryFraction(2.0, 0));
  CHECK(ours()->allocate(64 * MIB).get());
}

static void pools() {
  MempoolId_t id{0, 77}, own{0, 78}, third{9, 0};
  auto all = [](cudaStream_t) { return true; };
  cca::createOrIncrefPool(0, id);
  CHECK(cca::getPoolUseCount(0, id) == 1 && cca::getPoolUseCount(0, {0, 99}) == 0);
  cca::beginAllocateToPool(0, id, all);
  CHECK(cca::getPoolUseCount(0, id) == 2);
  THROWS(c10::Error, "", cca::beginAllocateToPool(0, id, all));
  auto inside = ours()->allocate(MIB);
  cca::endAllocateToPool(0, id);
  THROWS(c10::Error, "", cca::endAllocateToPool(0, id));
  auto outside = ours()->allocate(MIB);
  CHECK(cca::checkPoolLiveAllocations(0, id, {inside.get()}));
  CHECK(!cca::checkPoolLiveAllocations(0, id, {inside.get(), outside.get()}));
  CHECK(!cca::checkPoolLiveAllocations(0, id, {outside.get()}));
  THROWS(c10::Error, "", cca::checkPoolLiveAllocations(0, {0, 99}, {}));
  auto seen = cca::snapshot(id);
  CHECK(seen.segments.size() == 1 && seen.segments[0].owner_private_pool_id == id);
  inside.clear();
  cca::releasePool(0, id);
  cca::releasePool(0, id);
  THROWS(c10::Error, "", cca::releasePool(0, id));
  cca::emptyCache(id);
  CHECK(cca::snapshot(id).segments.empty());

  // A filter that throws accepts nothing, like one for a stream that the driver does not know.
  cca::beginAllocateToPool(0, third, [](cudaStream_t) -> bool { throw std::runtime_error("no stream"); });
  auto none = ours()->allocate(512);
  CHECK(cca::checkPoolLiveAllocations(0, third, {}));
  cca::endAllocateToPool(0, third);
  cca::releasePool(0, third);

  auto plain = std::make_shared<Plain>();
  base()->createOrIncrefPool(0, own, plain);
  CHECK(plain.use_count() == 2);
  cca::beginAllocateToPool(0, own, all);
  auto lent = ours()->allocate(3 * MIB);
  cca::endAllocateToPool(0, own);
  cca::releasePool(0, own);
  CHECK(plain->allocated == 1 && plain->deleted == 0);
  lent.clear();
  cca::releasePool(0, own);
  cca::emptyCache(own);
  CHECK(plain->deleted == 1);

  MempoolId_t helper{0, 80};
  cca::createOrIncrefPool(0, helper);
  base()->setUseOnOOM(0, helper, true);
  cca::setNoSplit(0, helper);
  cca::beginAllocateToPool(0, helper, all);
  auto a = ours()->allocate(2 * MIB);
  auto b = ours()->allocate(2 * MIB);
  cca::endAllocateToPool(0, helper);
  auto segments = cca::snapshot(helper).segments;
  CHECK(segments.size() == 2 && segments[0].blocks.size() == 1);
  base()->setUseOnOOM(0, helper, false);
  THROWS(c10::Error, "", base()->setUseOnOOM(0, {0, 99}, true));
  a.clear();
  b.clear();
  cca::releasePool(0, helper);
  cca::releasePool(0, helper);
  cca::emptyCache(helper);
}

static void checkpoints() {
  MempoolId_t id{5, 0};
  cca::beginAllocateToPool(0, id, [](cudaStream_t) { return true; });
  auto first = ours()->allocate(MIB);
  auto* address = first.get();
  auto state = cca::getCheckpointState(0, id);
  CHECK(state);
  auto second = ours()->allocate(MIB);
  auto* later = second.get();
  // As cudagraph trees do: the tensors' deleters are removed, and set again for the blocks that are live
  // again.
  CHECK(first.compare_exchange_deleter(ours()->raw_deleter(), [](void*) {}));
  CHECK(second.compare_exchange_deleter(ours()->raw_deleter(), [](void*) {}));
  auto delta = cca::setCheckpointPoolState(0, state);
  CHECK(delta.ptrs_freed.size() == 2 && delta.dataptrs_allocd.size() == 1);
  CHECK(delta.dataptrs_allocd[0].get() == address && later != address);
  CHECK(delta.dataptrs_allocd[0].get_deleter() == ours()->raw_deleter());
  CHECK(cca::checkPoolLiveAllocations(0, id, {address}));
  delta.dataptrs_allocd.clear();
  CHECK(cca::checkPoolLiveAllocations(0, id, {}));
  cca::endAllocateToPool(0, id);
  cca::releasePool(0, id);
  THROWS(c10::Error, "", cca::getCheckpointState(0, {0, 99}));
  struct Other : cca::AllocatorState {};
  THROWS(c10::Error, "another allocator", cca::setCheckpointPoolState(0, std::make_shared<Other>()));
}

static void history() {
  CHECK(!cca::isHistoryEnabled());
  static int tracked = 0;
  cca::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    tracked += entry.action_ == TraceEntry::ALLOC && entry.size_ == 12345;
  });
  ours()->allocate(12345);
  CHECK(tracked == 1 && !cca::isHistoryEnabled());
  CHECK(cca::snapshot().device_traces.at(0).empty());
  THROWS(c10::Error, "needs a recorder",
         base()->recordHistory(true, nullptr, 10, cca::RecordContext::ALL, false, {}));
#if STRATALLOC_SINCE(11)
  THROWS(c10::Error, "Unknown TraceEntry action",
         base()->recordHistory(true, gather, 10, cca::RecordContext::ALL, false, {"nothing"}));
#endif
  base()->recordHistory(true, gather, 1000, cca::RecordContext::ALL, true, {"segment_free"});
  CHECK(cca::isHistoryEnabled());
  cca::setUserMetadata("step 3");
  CHECK(cca::getUserMetadata() == "step 3");
  std::string region = "1/0";
  cca::pushCompileContext(region);
  cca::recordAnnotation({{"name", "forward"}, {"stage", "START"}});
  auto block = ours()->allocate(6 * MIB);
  cca::popCompileContext();
  CHECK(gathered > 0 && tracked == 1);
  auto seen = cca::snapshot();
  CHECK(seen.device_traces.size() == 2 && seen.segments.size() > 0);
  bool is_there = false;
  for (const auto& segment : seen.segments) {
    size_t at = segment.address, sum = 0;
    for (const auto& part : segment.blocks) {
      if (at == reinterpret_cast<size_t>(block.get())) {
        is_there = part.allocated && part.active && part.requested_size == 6 * MIB &&
            dynamic_cast<Context*>(part.context_when_allocated.get()) && segment.is_large;
      }
      at += part.size;
      sum += part.size;
    }
    CHECK(sum == segment.total_size);
  }
  CHECK(is_there);
  const auto& trace = seen.device_traces[0];
  const auto& alloc = trace.back();
  CHECK(alloc.action_ == TraceEntry::ALLOC && alloc.size_ == 6 * MIB && alloc.context_);
  CHECK(alloc.addr_ == reinterpret_cast<size_t>(block.get()) && alloc.device_ == 0);
  CHECK(alloc.user_metadata_ == "step 3" && alloc.compile_context_ == "1/0");
  CHECK(std::abs(alloc.time_.t_ - c10::getTimeSinceEpoch() / 1000) < 60'000'000);
  CHECK(seen.external_annotations.size() == 1);
  CHECK(seen.external_annotations[0].metadata_.at("name") == "forward");
  auto active = 0;
  for (const auto& segment : seen.segments) active += segment.active_size;
  // A snapshot records an entry of itself, which the next snapshot has.
  const auto noted = cca::snapshot().device_traces.at(0).back();
  CHECK(noted.action_ == TraceEntry::SNAPSHOT && noted.addr_ == 0 && !noted.context_);
  CHECK(noted.size_ == static_cast<size_t>(active));
  CHECK(base()->snapshot({0, 0}, false).device_traces.empty());
  block.clear();
  // Recording is also on for a device that is opened later.
  cca::setUserMetadata("");
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  seen = {};
  CHECK(!cca::isHistoryEnabled() && cca::snapshot().device_traces.at(0).empty());
  cca::emptyCache();
  CHECK(contexts_alive == 0);
}

// Replaces the Python interpreter, which this test does not run.
struct Interpreter : torch::CapturedTraceback::Python {
  using Frames = std::vector<torch::CapturedTraceback::PyFrame>;
  // Not in PyTorch 2.10.
  bool canGather() { return true; }
  Frames gather() override { return {{this, 7}}; }
  void release(Frames& frames) override { frames.clear(); }
  void appendSymbolized(const Frames& frames, torch::SymbolizedTracebacks& known) override {
    for (const auto& frame : frames) {
      CHECK(frame.code == this);
      known.tracebacks.push_back({known.all_frames.size()});
      known.all_frames.push_back({"train.py", "forward", static_cast<uint64_t>(frame.lasti)});
    }
  }
  int traverse(Frames&, torch::CapturedTraceback::visitproc, void*) override { return 0; }
  int clear(Frames&) override { return 0; }
};

// The error names the Python code that holds the memory, whatever PyTorch's recorder gathers.
static void holders() {
  torch::CapturedTraceback::addPythonUnwinder(new Interpreter);
  for (auto recorder : {gather, cca::CreateContextFn([] { return std::shared_ptr<c10::GatheredContext>(); })}) {
    base()->recordHistory(true, recorder, 1, cca::RecordContext::STATE, true, {});
    auto block = ours()->allocate(6 * MIB);
    cca::setMemoryFraction(1e-6, 0);
    THROWS(c10::OutOfMemoryError, "forward (train.py:7)", ours()->allocate(64 * MIB));
    cca::setMemoryFraction(1, 0);
  }
  base()->recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
}

static void others() {
  cca::emptyCache();
  // Host memory can be shared only with expandable segments.
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  auto block = ours()->allocate(4 * MIB);
  auto shared = cca::shareIpcHandle(block.get());
  CHECK(!shared.handle.empty() && shared.offset == 0);
  CHECK(cca::shareIpcHandle(block.get()).handle == shared.handle);
  THROWS(c10::Error, "invalid device pointer", cca::shareIpcHandle(&block));
  static_cast<char*>(block.get())[3] = 42;
  auto opened = cca::getIpcDevPtr(shared.handle);
  CHECK(static_cast<char*>(opened.get())[shared.offset + 3] == 42);
  CHECK(cca::getIpcDevPtr(shared.handle) == opened);
  opened.reset();
  CHECK(cca::getIpcDevPtr(shared.handle).get());
  THROWS(c10::Error, "", cca::getIpcDevPtr("nonsense"));
  cca::enablePeerAccess(0, 1);
  cca::enablePeerAccess(0, 1);
  THROWS(c10::Error, "invalid device", cca::enablePeerAccess(0, 127));
  auto* copies = static_cast<int*>(dlsym(RTLD_DEFAULT, "stub_peer_copies"));
  char from[8] = "copied", to[8] = "";
  CHECK(cca::memcpyAsync(to, 0, from, 1, 8, nullptr, true) == cudaSuccess && *copies == 0);
  CHECK(cca::memcpyAsync(to, 1, from, 1, 8, nullptr, false) == cudaSuccess && *copies == 0);
  CHECK(cca::memcpyAsync(to, 0, from, 1, 8, nullptr, false) == cudaSuccess && *copies == 1);
  CHECK(!std::strcmp(to, "copied"));
}

static void settings() {
  namespace settings = c10::CachingAllocator;
  CHECK(cca::name() == "native");
  settings::setAllocatorSettings("expandable_segments:False");
  cca::emptyCache();
  CHECK(cca::getExpandableSegmentSizes(0).empty());
  // PyTorch's keys reach both; PyTorch ignores the library's; unknown keys are refused.
  settings::setAllocatorSettings("max_split_size_mb:64,peers:none");
  CHECK(settings::AcceleratorAllocatorConfig::max_split_size() == 64 * MIB);
  ours()->allocate(100 * MIB).clear();
  ours()->allocate(30 * MIB).clear();
  CHECK(current(stats().reserved_bytes) == static_cast<int64_t>(130 * MIB));
  THROWS(c10::Error, "no_such_key", settings::setAllocatorSettings("no_such_key:1"));
  THROWS(c10::Error, "", settings::setAllocatorSettings("backend:no_such"));
  cca::emptyCache();
  settings::setAllocatorSettings("expandable_segments:True");
  auto block = ours()->allocate(30 * MIB);
  auto sizes = cca::getExpandableSegmentSizes(0);
  CHECK(sizes.size() == 1 && sizes[0].total_size >= 30 * MIB && !sizes[0].is_small_pool);
  CHECK(cca::snapshot().segments.at(0).is_expandable);
  settings::setAllocatorSettings("backend:cudaMallocAsync");
  CHECK(cca::name() == "cudaMallocAsync");
  CHECK(ours()->allocate(MIB).get());
  block.clear();
  settings::setAllocatorSettings("backend:native,expandable_segments:False");
  CHECK(cca::name() == "native" && cca::isEnabled());
  cca::enable(false);
  CHECK(!cca::isEnabled());
  auto before = current(stats().allocation);
  auto plain = ours()->allocate(MIB);
  CHECK(plain.get() && current(stats().allocation) == before);
  cca::enable(true);
  plain.clear();
}

static void threads() {
  std::vector<std::thread> all;
  for (int i = 0; i < 4; i++) {
    all.emplace_back([i] {
      c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(i % 2));
      std::vector<c10::DataPtr> held;
      for (int round = 0; round < 2000; round++) {
        held.push_back(ours()->allocate(512 + 64 * (round % 100)));
        if (held.size() > 20) held.erase(held.begin() + round % 20);
      }
    });
  }
  for (auto& thread : all) thread.join();
  CHECK(current(stats(0).allocation) == 0 && current(stats(1).allocation) == 0);
}

int main(int count, char** arguments) {
  CHECK(count == 3);
  auto* extension = dlopen(arguments[1], RTLD_NOW);
  if (!extension) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(extension);
  auto* install = reinterpret_cast<int (*)(const char*, char*, size_t)>(
      dlsym(extension, "stratalloc_torch_install"));
  CHECK(install);
  char error[2048] = "";
  CHECK(install("/nowhere/libstratalloc.so", error, sizeof error) == 1 && std::strstr(error, "nowhere"));
  auto* built_in = cca::get();
  if (install(arguments[2], error, sizeof error)) std::fprintf(stderr, "%s\n", error);
  CHECK(cca::get() != built_in && c10::GetAllocator(c10::DeviceType::CUDA) == cca::get());
  CHECK(c10::getDeviceAllocator(c10::DeviceType::CUDA) == cca::get());
  CHECK(!ours()->initialized());
  cca::init(2);
  CHECK(ours()->initialized());
  CHECK(install(arguments[2], error, sizeof error) == 1 && std::strstr(error, "in use already"));
  // Set here because the part of PyTorch that reports a primary context is not loaded.
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  blocks();
  profiler();
  one_device();
  no_memory();
  pools();
  checkpoints();
  history();
  holders();
  others();
  settings();
  segments();
  rejections();
  metadata();
  settings_in_force();
  bytes_of_pools();
  addresses();
  reserve_classes();
  threads();
  pinned_memory(extension);
  std::puts("every function worked");
}
