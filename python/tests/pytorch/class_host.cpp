// Calls every function of PyTorch's host allocator, implemented by the library.
#include "class_checks.h"

#include <ATen/core/CachingHostAllocator.h>
#include <dlfcn.h>

using c10::cuda::CUDAStream;
using Filter = std::function<bool(c10::Stream)>;
using Install = int (*)(const char*, char*, size_t);

static at::HostAllocator* host() { return at::getHostAllocator(c10::DeviceType::CUDA); }
static int64_t live() { return host()->get_stats().active_requests.current; }
template <class Value>
static Value& stub(const char* name) { return *static_cast<Value*>(dlsym(RTLD_DEFAULT, name)); }

// The functions that PyTorch has since 2.11.
#if STRATALLOC_SINCE(11)
static void begin(MempoolId_t id, Filter filter) { host()->begin_allocate_to_pool(id, std::move(filter)); }
static void end(MempoolId_t id) { host()->end_allocate_to_pool(id); }
static void release(MempoolId_t id) { host()->release_pool(id); }
#endif

static CUDAStream stream_of(c10::DeviceIndex device) { return c10::cuda::getStreamFromPool(false, device); }

static bool record(const c10::DataPtr& block, CUDAStream stream) {
  return host()->record_event(block.get(), block.get_context(), stream.unwrap());
}

static void it_is_installed(Install install) {
  char error[2048] = "";
  CHECK(install("no_such_key:1", error, sizeof error) == 1 && std::strstr(error, "no_such_key"));
  auto* built_in = host();
  CHECK(install("backend:pinned", error, sizeof error) == 0);
  CHECK(host() && host() != built_in);
}

static void blocks() {
  auto none = host()->allocate(0);
  CHECK(!none.get() && none.get_deleter() == host()->raw_deleter() && live() == 0);
  auto block = host()->allocate(MIB);
  CHECK(block.get() && block.get() == block.get_context() && block.device() == c10::Device("cpu"));
  CHECK(block.get_deleter() == host()->raw_deleter() && host()->is_simple_data_ptr(block));
  std::memset(block.get(), 7, MIB);
  auto copy = host()->clone(block.get(), MIB);
  CHECK(static_cast<char*>(copy.get())[MIB - 1] == 7 && live() == 2);
  auto* address = block.get();
  block.clear();
  CHECK(host()->allocate(MIB).get() == address);
  THROWS(c10::Error, "out of pinned host memory", host()->allocate(1ULL << 50));
}

static void statistics() {
  host()->empty_cache();
  host()->reset_peak_stats();
  host()->reset_accumulated_stats();
  auto stats = host()->get_stats();
  CHECK(stats.allocated_bytes.current == 0 && stats.allocations.allocated == 0);
  CHECK(stats.num_host_alloc == 0);
  {
    auto block = host()->allocate(MIB);
    stats = host()->get_stats();
    CHECK(stats.active_requests.current == 1 && stats.active_bytes.current == static_cast<int64_t>(MIB));
    CHECK(stats.allocations.current == 1 && stats.allocated_bytes.current >= static_cast<int64_t>(MIB));
    CHECK(stats.num_host_alloc == 1 && stats.host_alloc_time.count == 1 && stats.num_host_free == 0);
    CHECK(stats.host_alloc_time.min <= stats.host_alloc_time.max);
  }
  stats = host()->get_stats();
  CHECK(stats.active_requests.current == 0 && stats.active_requests.peak == 1);
  CHECK(stats.active_requests.freed == 1 && stats.allocations.current == 1);
  host()->empty_cache();
  stats = host()->get_stats();
  CHECK(stats.allocated_bytes.current == 0);
  CHECK(stats.num_host_free == 1 && stats.host_free_time.count == 1);
  host()->reset_peak_stats();
  host()->reset_accumulated_stats();
  stats = host()->get_stats();
  CHECK(stats.active_requests.peak == 0 && stats.active_requests.freed == 0);
  CHECK(stats.host_free_time.count == 0);
}

static void events_are_recorded_for_own_blocks_only() {
  auto block = host()->allocate(MIB);
  auto stream = stream_of(0);
  CHECK(record(block, stream) && record(block, stream));
  // PyTorch passes the address of a view and the context of its storage, and for memory that it did not
  // allocate, any context.
  auto* inside = static_cast<char*>(block.get()) + 64;
  CHECK(host()->record_event(inside, block.get_context(), stream.unwrap()));
  CHECK(host()->record_event(block.get(), &stream, stream.unwrap()));
  CHECK(!host()->record_event(inside, &stream, stream.unwrap()));
  CHECK(!host()->record_event(&stream, nullptr, stream.unwrap()));
  block.clear();
  CHECK(live() == 0);
}

// An event of a stream of another device is waited for on a stream of the block's device.
static void devices() {
  auto& waits = stub<int>("stub_waits");
  auto near = host()->allocate(MIB);
  CHECK(record(near, stream_of(0)));
  near.clear();
  CHECK(waits == 0);
  auto far = host()->allocate(MIB);
  CHECK(record(far, stream_of(1)) && record(far, stream_of(1)) && record(far, stream_of(0)));
  // Work may be submitted until the block is freed.
  CHECK(waits == 0);
  far.clear();
  CHECK(waits == 2 && live() == 0);
  {
    c10::cuda::CUDAGuard guard(1);
    far = host()->allocate(MIB);
    CHECK(record(far, stream_of(1)));
    c10::cuda::CUDAGuard back(0);
    CHECK(live() == 1);
    far.clear();
  }
  CHECK(waits == 2 && live() == 0);
}

// A block that a captured graph uses is reused when the graph's pool has no users any more, and the cache
// is emptied. A block that the graph does not use is reused at once.
static void a_graph_keeps_its_blocks() {
  auto& capturing = stub<void*>("stub_capturing");
  auto& synchronized = stub<int>("stub_synchronized");
  auto stream = stream_of(0);
  MempoolId_t first{7, 0}, second{0, 7};
  auto before = synchronized;
#if STRATALLOC_SINCE(11)
  THROWS(c10::Error, "not currently recording", end(first));
  THROWS(c10::Error, "has users", release(first));
  auto accepts = [&](c10::Stream other) { return other == stream.unwrap(); };
  begin(second, [](c10::Stream) { return false; });
  begin(first, accepts);
  THROWS(c10::Error, "already recording", begin(first, accepts));
#endif
  capturing = stream.stream();
  auto unused = host()->allocate(3 * MIB);
  auto* address = unused.get();
  unused.clear();
  auto used = host()->allocate(3 * MIB);
  CHECK(used.get() == address && record(used, stream));
  used.clear();
  used = host()->allocate(3 * MIB);
  CHECK(used.get() != address && record(used, stream));
  host()->empty_cache();
  capturing = nullptr;
#if STRATALLOC_SINCE(11)
  end(first);
  end(second);
  host()->empty_cache();
  CHECK(live() == 2 && synchronized == before);
  release(first);
  used.clear();
  CHECK(live() == 2 && synchronized == before);
  // Another capture runs, so the device cannot be waited for.
  begin(first, accepts);
  host()->empty_cache();
  CHECK(live() == 2 && synchronized == before);
  end(first);
  release(first);
  host()->empty_cache();
  CHECK(live() == 0 && synchronized == before + 1);
  release(second);
  THROWS(c10::Error, "has users", release(second));
#else
  used.clear();
  host()->empty_cache();
  CHECK(live() == 2 && synchronized == before);
#endif
}

static void settings() {
  namespace settings = c10::CachingAllocator;
  settings::setAllocatorSettings("pinned_num_register_threads:2,max_split_size_mb:64");
  CHECK(host()->allocate(MIB).get());
  auto wrong = "pinned_num_register_threads:3";
  THROWS(c10::Error, "pinned_num_register_threads", settings::setAllocatorSettings(wrong));
  settings::setAllocatorSettings("");
}

static void threads() {
  auto before = live();
  std::vector<std::thread> all;
  for (int i = 0; i < 4; i++) {
    all.emplace_back([i] {
      auto device = static_cast<c10::DeviceIndex>(i % 2);
      c10::cuda::CUDAGuard guard(device);
      std::vector<c10::DataPtr> held;
      for (int round = 0; round < 500; round++) {
        held.push_back(host()->allocate(4096 + 64 * (round % 50)));
        record(held.back(), stream_of(round % 7 ? device : 1 - device));
        if (held.size() > 10) held.erase(held.begin() + round % 10);
      }
    });
  }
  for (auto& thread : all) thread.join();
  CHECK(live() == before);
}

void pinned_memory(void* extension) {
  auto* install = reinterpret_cast<Install>(dlsym(extension, "stratalloc_torch_install_pinned"));
  CHECK(install);
  it_is_installed(install);
  blocks();
  statistics();
  events_are_recorded_for_own_blocks_only();
  devices();
  threads();
  settings();
  a_graph_keeps_its_blocks();
}
