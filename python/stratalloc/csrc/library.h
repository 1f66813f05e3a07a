// The functions of the shared library, found by name. Python has loaded the library already. So this
// object works with any build of the library, and does not depend on Python.
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

  // Finds all functions in the library at a path. Returns an error message, or an empty string.
  std::string load(const char* path);
};

// The functions that `load` found. Never unloaded.
extern Library library;

// Returns the message of the calling thread's last failed call.
std::string last_error();

// Throws PyTorch's exception for a failed call. The type depends on the status: out of memory, an
// invalid value, an unsupported call, or any other failure.
[[noreturn]] void fail(stratalloc_status status, const std::string& what = {});

inline void check(stratalloc_status status) {
  if (__builtin_expect(status != STRATALLOC_STATUS_OK, 0)) {
    fail(status);
  }
}

// Passes a copy of a value to the library as `user`. For this, calls `add` with a release function and
// the address of the copy. If `add` fails, the copy is deleted here.
template <class Value, class Add>
void lend(Value value, Add add) {
  auto lent = std::make_unique<Value>(std::move(value));
  check(add([](void* user) { delete static_cast<Value*>(user); }, lent.get()));
  static_cast<void>(lent.release());
}

// Returns a text of the library about a handle, a device's ordinal or 0.
std::string text_of(uint64_t of, stratalloc_text kind);

} // namespace stratalloc_torch
