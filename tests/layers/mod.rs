//! What each layer does, on a strategy of ours and on a user's allocator of two methods.
//!
//! `watched` is about the layers that look on, `front` about the cache of each thread, `moved` about
//! alignment and guards, `passed` about what goes through unchanged, `stacks` about all of them together
//! under random histories.

mod bed;
mod front;
mod moved;
mod passed;
mod stacks;
mod watched;
