// Who asked: PyTorch's contexts as stacks of the library.
#pragma once

#include "allocator.h"

namespace stratalloc_torch {

// Gathers what PyTorch's recorder gathers, and the frames of Python beside it, which are what reports name.
// Without a recorder the frames of Python are all.
stratalloc_stack_source stack_source(CreateContextFn recorder);

// PyTorch's context of a stack; null for one that came from elsewhere.
std::shared_ptr<c10::GatheredContext> context_of(void* stack);

} // namespace stratalloc_torch
