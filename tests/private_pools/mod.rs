//! Private pools, captures and checkpoints, on fixed and on expandable segments.
//!
//! Each test checks a behaviour of PyTorch's pools and graphs that PyTorch's own tests check, or a
//! deliberate difference. All tests run on a simulated device that captures graphs.

mod captures;
mod captures_in_a_row;
mod checkpoints;
mod interference;
mod own_memory;
mod reserves;
mod scopes;
