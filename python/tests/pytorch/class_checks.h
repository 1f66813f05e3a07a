// Shared by the files of the test of PyTorch's allocator class.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../../stratalloc/csrc/versions.h"

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::MempoolId_t;
using cca::TraceEntry;

// c10 has a macro of this name.
#undef CHECK
#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);            \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

// Checks that a call throws an exception of a type, whose message contains a text.
#define THROWS(Kind, words, call)                                                     \
  do {                                                                                \
    std::string what;                                                                 \
    bool thrown = false;                                                              \
    try {                                                                             \
      call;                                                                           \
    } catch (const Kind& error) {                                                     \
      thrown = true;                                                                  \
      what = error.what_without_backtrace();                                          \
    } catch (const std::exception& error) {                                           \
      what = std::string("another kind: ") + error.what();                            \
    }                                                                                 \
    if (!thrown || what.find(words) == what.npos) {                                   \
      std::fprintf(stderr, "%s:%d: %s threw: %s\n", __FILE__, __LINE__, #call, what.c_str()); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

static const size_t MIB = 1 << 20;
inline int gathered = 0, contexts_alive = 0;

struct Context : c10::GatheredContext {
  Context() { contexts_alive++; }
  ~Context() override { contexts_alive--; }
};

inline std::shared_ptr<c10::GatheredContext> gather() {
  gathered++;
  return std::make_shared<Context>();
}

inline cca::CUDAAllocator* ours() { return cca::get(); }
// Returns the allocator with the functions of the latest version, also if PyTorch's class declares them
// differently or lacks them.
inline stratalloc_torch::Base* base() { return dynamic_cast<stratalloc_torch::Base*>(ours()); }
inline int64_t current(const c10::CachingAllocator::StatArray& stat) { return stat[0].current; }
inline cca::DeviceStats stats(int device = 0) { return cca::getDeviceStats(device); }

// Defined in class_versions.cpp.
void segments();
void rejections();
void metadata();
void settings_in_force();
void bytes_of_pools();
void addresses();
void reserve_classes();
// Defined in class_host.cpp. `extension` is that of `dlopen`.
void pinned_memory(void* extension);
