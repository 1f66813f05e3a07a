// Replaces glibc's header, which glibc 2.28 does not have. libstdc++'s headers read the variable to choose
// between plain and atomic counters. Atomic counters are always right.
#pragma once

static const bool __libc_single_threaded = false;
