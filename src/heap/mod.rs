//! Bookkeeping of one heap.
