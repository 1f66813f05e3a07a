// Stacks of requests: PyTorch's contexts, passed to the library as stacks.
#pragma once

#include "allocator.h"

namespace stratalloc_torch {

// Returns a source that gathers the context of PyTorch's recorder, and the Python frames, which the
// library's reports name. Without a recorder it gathers the Python frames only.
stratalloc_stack_source stack_source(CreateContextFn recorder);

// Returns PyTorch's context of a stack; null for a stack of another source.
std::shared_ptr<c10::GatheredContext> context_of(void* stack);

} // namespace stratalloc_torch
