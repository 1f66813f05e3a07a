// Stacks of requests. A stack consists of PyTorch's context and the Python frames.
#pragma once

#include "allocator.h"

namespace stratalloc_torch {

// Returns a source of stacks. A stack has the context that PyTorch's `recorder` returns, and the Python
// frames, which the library's reports show. Without a recorder, it has the Python frames only.
stratalloc_stack_source stack_source(CreateContextFn recorder);

// Returns PyTorch's context in a stack. Returns null for a stack of another source.
std::shared_ptr<c10::GatheredContext> context_of(void* stack);

} // namespace stratalloc_torch
