// Stacks of requests. A stack consists of PyTorch's context and the Python frames.
#include "stacks.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <array>
#include <unordered_set>

namespace stratalloc_torch {

namespace {

using torch::CapturedTraceback;

struct Stack {
  // The context that PyTorch's recorder returned.
  std::shared_ptr<c10::GatheredContext> context;
  // The Python frames alone, for the library's reports. PyTorch's contexts often have C++ frames, and
  // looking up their names takes seconds.
  std::shared_ptr<CapturedTraceback> python;
};

// The pointers of this source's stacks. A program may set another source, so a pointer from the library
// is looked up here before it is dereferenced.
class Stacks {
 public:
  void* add(Stack stack) {
    auto held = std::make_unique<Stack>(std::move(stack));
    auto& shard = shard_of(held.get());
    std::lock_guard<std::mutex> guard(shard.lock);
    shard.all.insert(held.get());
    return held.release();
  }

  void remove(void* stack) {
    std::unique_ptr<Stack> held(static_cast<Stack*>(stack));
    auto& shard = shard_of(stack);
    std::lock_guard<std::mutex> guard(shard.lock);
    shard.all.erase(stack);
  }

  Stack find(void* stack) {
    auto& shard = shard_of(stack);
    std::lock_guard<std::mutex> guard(shard.lock);
    return shard.all.count(stack) ? *static_cast<Stack*>(stack) : Stack{};
  }

 private:
  struct Shard {
    std::mutex lock;
    std::unordered_set<void*> all;
  };
  Shard& shard_of(void* stack) {
    return shards_[reinterpret_cast<uintptr_t>(stack) / 64 % shards_.size()];
  }
  std::array<Shard, 31> shards_;
};

Stacks& stacks() {
  static auto* stacks = new Stacks;
  return *stacks;
}

void* gather(void* user) {
  try {
    auto recorder = reinterpret_cast<CreateContextFn>(user);
    auto python = CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
    auto context = recorder ? recorder() : python;
    return stacks().add({std::move(context), std::move(python)});
  } catch (const std::exception&) {
    return nullptr;
  }
}

void release(void*, void* stack) {
  stacks().remove(stack);
}

size_t frames(void*, void* stack, stratalloc_stack_frame* into, size_t room) {
  // The library may read the texts until this thread's next call (see `stratalloc_stack_source`), so
  // they are kept here.
  thread_local torch::SymbolizedTracebacks known;
  try {
    auto python = stacks().find(stack).python;
    if (!python) {
      return 0;
    }
    known = torch::symbolize({python.get()});
  } catch (const std::exception&) {
    return 0;
  }
  size_t count = 0;
  for (auto at : known.tracebacks.at(0)) {
    if (count == room) {
      break;
    }
    const auto& frame = known.all_frames[at];
    into[count++] = {
        frame.funcname.c_str(), frame.filename.c_str(), static_cast<uint32_t>(frame.lineno)};
  }
  return count;
}

} // namespace

stratalloc_stack_source stack_source(CreateContextFn recorder) {
  return {gather, release, frames, reinterpret_cast<void*>(recorder)};
}

std::shared_ptr<c10::GatheredContext> context_of(void* stack) {
  return stack ? stacks().find(stack).context : nullptr;
}

} // namespace stratalloc_torch
