// The functions of the shared library, found by name in the one that Python has loaded already.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "calls.h"
#include "stratalloc.h"

namespace stratalloc_torch {

struct Library {
#define STRATALLOC_POINTER(name) decltype(&stratalloc_##name) name = nullptr;
  STRATALLOC_FUNCTIONS(STRATALLOC_POINTER)
#undef STRATALLOC_POINTER

  // Finds all functions in the library at a path. Says what is missing, or nothing.
  std::string load(const char* path);
};

// The one that `load` filled; it is never unloaded.
extern Library library;

// What the calling thread's last failed call said.
std::string last_error();

// Throws PyTorch's exception for a call that failed: about memory, a value, what is not supported, or any.
[[noreturn]] void fail(stratalloc_status status, const std::string& what = {});

inline void check(stratalloc_status status) {
  if (__builtin_expect(status != STRATALLOC_STATUS_OK, 0)) {
    fail(status);
  }
}

// Lends the library a value: `add` gets its release function and its address. It stays ours if that fails.
template <class Value, class Add>
void lend(Value value, Add add) {
  auto lent = std::make_unique<Value>(std::move(value));
  check(add([](void* user) { delete static_cast<Value*>(user); }, lent.get()));
  static_cast<void>(lent.release());
}

// A text of the library about a handle, a device's number or 0.
std::string text_of(uint64_t of, stratalloc_text kind);

} // namespace stratalloc_torch
