#include "library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace stratalloc_torch {

Library library;

std::string Library::load(const char* path) {
  void* found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!found) {
    const char* why = dlerror();
    return why ? why : std::string(path) + " cannot be loaded";
  }
#define STRATALLOC_FIND(name)                                                        \
  name = reinterpret_cast<decltype(name)>(dlsym(found, "stratalloc_" #name));        \
  if (!name) {                                                                       \
    return std::string(path) + " is another version: it has no stratalloc_" #name;   \
  }
  STRATALLOC_FUNCTIONS(STRATALLOC_FIND)
#undef STRATALLOC_FIND
  return {};
}

std::string last_error() {
  std::string text(library.last_error(nullptr, 0), '\0');
  // The length is still correct, because the message changes only in calls of this thread. The last
  // byte is the terminating zero.
  library.last_error(text.data(), text.size());
  if (!text.empty()) {
    text.pop_back();
  }
  return text;
}

std::string text_of(uint64_t of, stratalloc_text kind) {
  std::string text(256, '\0');
  for (;;) {
    size_t needed = 0;
    auto status = library.text_write(of, kind, text.data(), text.size(), &needed);
    if (status == STRATALLOC_STATUS_OK) {
      text.resize(needed - 1);
      return text;
    }
    if (status != STRATALLOC_STATUS_BUFFER_TOO_SMALL) {
      fail(status);
    }
    text.resize(needed + 64);
  }
}

void fail(stratalloc_status status, const std::string& what) {
  auto message = what.empty() ? last_error() : what + ": " + last_error();
  switch (status) {
    case STRATALLOC_STATUS_OUT_OF_MEMORY:
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. ", message);
    case STRATALLOC_STATUS_INVALID_ARGUMENT:
    case STRATALLOC_STATUS_BAD_CONFIGURATION:
      TORCH_CHECK_VALUE(false, message);
    case STRATALLOC_STATUS_NOT_SUPPORTED:
      TORCH_CHECK_NOT_IMPLEMENTED(false, message);
    default:
      TORCH_CHECK(false, message);
  }
  __builtin_unreachable();
}

} // namespace stratalloc_torch
