//! Private pools, captures and checkpoints, on fixed and on expandable segments.
//!
//! Each test names a behaviour of PyTorch's pools and graphs, as its own tests state it, or says where
//! we differ on purpose. All run on a simulated device that captures graphs.

mod captures;
mod checkpoints;
mod interference;
mod own_memory;
mod reserves;
mod scopes;
