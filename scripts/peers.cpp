// Times other allocators on the cases of `stratalloc bench`, one CSV row a case:
//   peer,case,threads,ns_per_op,mops
//
// One source, three programs:
//   -DPEER_TORCH   PyTorch's allocator (c10), whichever backend PYTORCH_CUDA_ALLOC_CONF names. Its rows begin
//                  with `torch`, or with the string that PEER_TORCH is defined as
//   -DPEER_RMM     RMM: pool, arena, async
//   neither        the raw driver: cudaMallocAsync, and cudaMalloc with fewer steps
// Cases of one thread are timed as by `stratalloc bench --turns`: for each line on standard input, such
// as `pair:512B torch native`, one case is timed briefly. The answer is a row, or an empty line if there
// is no such case. At the end of the input the cases of several threads follow, with up to PEER_THREADS
// threads, if that is set.
//
// The sizes have the same distributions as those of `stratalloc bench`, but come from another generator:
// the same kind of work, not the same bytes.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(PEER_TORCH)
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#elif defined(PEER_RMM)
#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#endif

namespace {

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;

double seconds() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Allocator {
  std::string name;
  std::function<void*(std::size_t, cudaStream_t)> take;
  std::function<void(void*, std::size_t, cudaStream_t)> give;
  // 1 for allocators with a cache; 0.001 for allocators that call the driver for each request.
  double effort = 1.0;
  // The largest number of holes in a case of this allocator.
  int most_holes = 65536;
  // Allocates 64 KiB, records a use by another stream, and frees the block. Unset if the allocator has
  // no such call.
  std::function<void()> share = nullptr;

  int steps(int of) const { return std::max(50, static_cast<int>(of * effort)); }
};

void row(const std::string& name, const char* what, int threads, double ns, double mops) {
  std::printf("%s,%s,%d,%.1f,%.3f\n", name.c_str(), what, threads, ns, mops);
  std::fflush(stdout);
}

// Returns nanoseconds per call. Makes as many calls as fit into 20 ms, from `most / 50` to `most`, as
// `stratalloc bench` does.
template <typename Step>
double timed(int most, Step&& step) {
  const int fewest = std::max(1, most / 50);
  const double first = seconds();
  for (int s = 0; s < fewest; s++) step(s);
  const double fit = 0.02 * fewest / (seconds() - first);
  const int steps = static_cast<int>(std::clamp(fit, 1.0 * fewest, 1.0 * most));
  const double start = seconds();
  for (int s = 0; s < steps; s++) step(s);
  return (seconds() - start) * 1e9 / steps;
}

double pair(const Allocator& a, std::size_t size) {
  auto step = [&](int) { a.give(a.take(size, nullptr), size, nullptr); };
  for (int s = 0; s < a.steps(1000); s++) step(s);
  return timed(a.steps(300000), step);
}

// Returns this many streams. Streams are never destroyed, because allocators keep data for them.
const std::vector<cudaStream_t>& streams(std::size_t count) {
  static std::vector<cudaStream_t> all;
  while (all.size() < count) {
    all.emplace_back();
    cudaStreamCreateWithFlags(&all.back(), cudaStreamNonBlocking);
  }
  return all;
}

double turns(const Allocator& a, int count) {
  const auto& on = streams(count);
  int turn = 0;
  auto step = [&](int) {
    a.give(a.take(512, on[turn]), 512, on[turn]);
    if (++turn == count) turn = 0;
  };
  for (int s = 0; s < a.steps(std::max(1000, 4 * count)); s++) step(s);
  return timed(a.steps(300000), step);
}

struct Mix {
  std::vector<std::size_t> sizes, picks;

  Mix(std::size_t live, std::size_t largest) : sizes(65536), picks(65536) {
    std::mt19937_64 dice(1);
    std::lognormal_distribution<double> log(11.0, 2.5);
    for (auto& size : sizes) {
      size = static_cast<std::size_t>(std::clamp(log(dice), 1.0, static_cast<double>(largest)));
    }
    for (auto& pick : picks) pick = dice() % live;
  }
};

struct Block {
  void* address = nullptr;
  std::size_t bytes = 0;
};

double mix(const Allocator& a) {
  const Mix mix(4096, 64 * MiB);
  std::vector<Block> live(4096);
  // The timed steps continue where the warm-up ended, as in `stratalloc bench`, so that a slow
  // allocator, which makes few steps, does not only repeat the same ones.
  std::size_t s = 0;
  auto step = [&](int) {
    Block& block = live[mix.picks[s & 65535]];
    if (block.address) a.give(block.address, block.bytes, nullptr);
    block.bytes = mix.sizes[(s * 7) & 65535];
    block.address = a.take(block.bytes, nullptr);
    s++;
  };
  for (int n = 0; n < a.steps(200000); n++) step(n);
  const double ns = timed(a.steps(300000), step);
  for (const Block& block : live) {
    if (block.address) a.give(block.address, block.bytes, nullptr);
  }
  return ns;
}

// Times the case `serve` and returns nanoseconds per block.
double serve(const Allocator& a, int count) {
  constexpr int blocks = 20;
  const Mix mix(1, 4 * MiB);
  const auto& on = streams(count);
  void* taken[blocks];
  int turn = 0;
  auto step = [&](int) {
    for (int n = 0; n < blocks; n++) taken[n] = a.take(mix.sizes[n], on[turn]);
    for (int n = 0; n < blocks; n++) a.give(taken[n], mix.sizes[n], on[turn]);
    if (++turn == count) turn = 0;
  };
  for (int s = 0; s < std::max(100, 4 * count); s++) step(s);
  return timed(a.steps(300000 / blocks), step) / blocks;
}

double holes(const Allocator& a, int count) {
  std::vector<void*> live(2 * static_cast<std::size_t>(count));
  for (auto& address : live) address = a.take(KiB, nullptr);
  std::vector<int> order(count);
  for (int i = 0; i < count; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  for (int i : order) {
    a.give(live[2 * static_cast<std::size_t>(i)], KiB, nullptr);
    live[2 * static_cast<std::size_t>(i)] = nullptr;
  }
  auto step = [&](int) { a.give(a.take(KiB, nullptr), KiB, nullptr); };
  for (int s = 0; s < 200; s++) step(s);
  // Allocators that search linearly make fewer steps.
  const double ns = timed(a.most_holes > 4096 ? 200000 : 300, step);
  for (void* address : live) {
    if (address) a.give(address, KiB, nullptr);
  }
  return ns;
}

double share(const Allocator& a) {
  auto step = [&](int) { a.share(); };
  for (int s = 0; s < 1000; s++) step(s);
  return timed(20000, step);
}

// Times a case of one thread. Returns nothing if the allocator has no such case.
std::optional<double> single(const Allocator& a, const std::string& what) {
  const std::pair<const char*, std::function<double()>> cases[] = {
      {"pair:512B", [&] { return pair(a, 512); }},
      {"pair:64KiB", [&] { return pair(a, 64 * KiB); }},
      {"pair:2MiB", [&] { return pair(a, 2 * MiB); }},
      {"pair:64MiB", [&] { return pair(a, 64 * MiB); }},
      {"streams:2", [&] { return turns(a, 2); }},
      {"streams:8", [&] { return turns(a, 8); }},
      {"streams:128", [&] { return turns(a, 128); }},
      {"serve:1", [&] { return serve(a, 1); }},
      {"serve:8", [&] { return serve(a, 8); }},
      {"serve:128", [&] { return serve(a, 128); }},
      {"mix:4096live", [&] { return mix(a); }},
      {"holes:4096", [&] { return holes(a, 4096); }},
      {"holes:65536", [&] { return holes(a, 65536); }},
      {"record_stream:64KiB", [&] { return share(a); }},
  };
  const auto wanted = std::find_if(std::begin(cases), std::end(cases), [&](const auto& one) { return what == one.first; });
  const bool too_many = what.rfind("holes:", 0) == 0 && std::atoi(what.c_str() + 6) > a.most_holes;
  // An allocator that calls the driver each time makes few steps. In the case `mix` these would only
  // fill the list of blocks, and in `serve` the warm-up alone would take too long.
  const bool too_few = (what.rfind("mix:", 0) == 0 || what.rfind("serve:", 0) == 0) && a.effort < 1.0;
  const bool announces = what.rfind("record", 0) != 0 || a.share;
  if (wanted == std::end(cases) || too_many || too_few || !announces) return std::nullopt;
  return wanted->second();
}

void threads(const Allocator& a, int count, bool own, const char* what) {
  std::vector<cudaStream_t> streams(count);
  for (auto& stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  // As many steps as fit into a tenth of a second, as in `stratalloc bench`.
  int steps = a.steps(2000);
  std::vector<double> slowest;
  for (int repetition = -1; repetition < 7; repetition++) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<double> took(count);
    std::vector<std::thread> crew;
    for (int t = 0; t < count; t++) {
      crew.emplace_back([&, t] {
        cudaSetDevice(0);
        const cudaStream_t stream = streams[own ? t : 0];
        std::mt19937_64 dice(t);
        std::size_t sizes[64];
        for (auto& size : sizes) size = 512 * (1 + dice() % 512);
        Block held[8];
        auto run = [&](int n) {
          for (int s = 0; s < n; s++) {
            Block& block = held[s & 7];
            if (block.address) a.give(block.address, block.bytes, stream);
            block.bytes = sizes[s & 63];
            block.address = a.take(block.bytes, stream);
          }
        };
        run(steps / 4);
        ready++;
        while (!go) std::this_thread::yield();
        const double start = seconds();
        run(steps);
        took[t] = seconds() - start;
        for (const Block& block : held) {
          if (block.address) a.give(block.address, block.bytes, stream);
        }
      });
    }
    while (ready < count) std::this_thread::yield();
    go = true;
    for (auto& member : crew) member.join();
    const double time = *std::max_element(took.begin(), took.end());
    if (repetition < 0) {
      steps = a.steps(static_cast<int>(std::clamp(0.1 / time * steps, 2000.0, 200000.0)));
    } else {
      slowest.push_back(time);
    }
  }
  const double time = median(slowest);
  row(a.name, what, count, time * 1e9 / steps, count * static_cast<double>(steps) / time / 1e6);
  for (auto stream : streams) cudaStreamDestroy(stream);
}

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

// Creates an allocator for each case, and calls a function with it.
using Use = std::function<void(const Allocator&)>;
struct Maker {
  const char* name;
  std::function<void(const Use&)> with;
};

void all(const std::vector<Maker>& makers) {
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto space = line.find(' ');
    const std::string what = line.substr(0, space), who = space == line.npos ? "" : line.substr(space + 1);
    const auto maker = std::find_if(makers.begin(), makers.end(), [&](const Maker& one) { return who == one.name; });
    std::optional<double> ns;
    if (maker != makers.end()) maker->with([&](const Allocator& a) { ns = single(a, what); });
    // Prints the row after the allocator was destroyed, so that its destruction does not disturb the
    // next timing.
    if (ns) {
      row(who, what.c_str(), 1, *ns, 1000.0 / *ns);
    } else {
      std::puts("");
      std::fflush(stdout);
    }
  }
  const int most = number("PEER_THREADS", 0);
  if (most < 1) return;
  for (const Maker& maker : makers) {
    maker.with([&](const Allocator& a) {
      for (int count = 1; count <= most; count *= 4) threads(a, count, true, "threads:own_stream");
    });
  }
}

}  // namespace

int main() {
  cudaSetDevice(0);
  cudaFree(nullptr);
#if defined(PEER_TORCH)
  namespace cached = c10::cuda::CUDACachingAllocator;
  cached::init(1);
  const char* conf = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  const std::string text = conf ? conf : "";
  const std::string name = std::string(PEER_TORCH) + (text.find("Async") != text.npos        ? " cudaMallocAsync"
                                                      : text.find("expandable") != text.npos ? " expandable"
                                                                                             : " native");
  cudaStream_t other;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  const auto stream = c10::cuda::getStreamFromExternal(other, 0);
  all({{name.c_str(), [&](const Use& use) {
          // Each case starts with an empty cache, as in `stratalloc bench`.
          cached::emptyCache();
          Allocator torch{name,
                          [](std::size_t n, cudaStream_t s) { return cached::raw_alloc_with_stream(n, s); },
                          [](void* p, std::size_t, cudaStream_t) { cached::raw_delete(p); }};
          if (text.find("Async") == text.npos) {
            torch.share = [&] {
              auto block = cached::get()->allocate(64 * KiB);
              cached::recordStream(block, stream);
            };
          }
          use(torch);
        }}});
#elif defined(PEER_RMM)
  auto over = [](const char* name, auto& resource, int most_holes) {
    return Allocator{name,
                     [&resource](std::size_t n, cudaStream_t s) {
                       return resource.allocate(rmm::cuda_stream_view{s}, n, 256);
                     },
                     [&resource](void* p, std::size_t n, cudaStream_t s) {
                       resource.deallocate(rmm::cuda_stream_view{s}, p, n, 256);
                     },
                     1.0, most_holes};
  };
  all({{"rmm pool",
        [&](const Use& use) {
          rmm::mr::pool_memory_resource pool{rmm::mr::cuda_memory_resource{}, std::size_t{1} << 30};
          use(over("rmm pool", pool, 4096));
        }},
       {"rmm arena",
        [&](const Use& use) {
          rmm::mr::arena_memory_resource arena{rmm::mr::cuda_memory_resource{}, std::size_t{64} << 30};
          use(over("rmm arena", arena, 65536));
        }},
       {"rmm async", [&](const Use& use) {
          rmm::mr::cuda_async_memory_resource async{};
          use(over("rmm async", async, 65536));
        }}});
#else
  cudaMemPool_t pool;
  cudaDeviceGetDefaultMemPool(&pool, 0);
  std::uint64_t keep = ~std::uint64_t{0};
  cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
  const Allocator async{"raw cudaMallocAsync",
                        [](std::size_t n, cudaStream_t s) {
                          void* p = nullptr;
                          cudaMallocAsync(&p, n, s);
                          return p;
                        },
                        [](void* p, std::size_t, cudaStream_t s) { cudaFreeAsync(p, s); }};
  const Allocator plain{"raw cudaMalloc",
                        [](std::size_t n, cudaStream_t) {
                          void* p = nullptr;
                          cudaMalloc(&p, n);
                          return p;
                        },
                        [](void* p, std::size_t, cudaStream_t) { cudaFree(p); },
                        0.001, 0};
  all({{"raw cudaMallocAsync",
        [&](const Use& use) {
          // Empties the pool, as `stratalloc bench` does after a case.
          cudaStreamSynchronize(nullptr);
          cudaMemPoolTrimTo(pool, 0);
          use(async);
        }},
       {"raw cudaMalloc", [&](const Use& use) { use(plain); }}});
#endif
}
