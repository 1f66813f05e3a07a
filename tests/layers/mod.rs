//! Tests of each layer, on a built-in strategy and on a user's allocator with only the two required
//! methods.
//!
//! `watched` tests layers that observe, `front` the per-thread cache, `moved` alignment and guards,
//! `passed` calls that pass through unchanged, and `stacks` all layers together under random operations.

mod fixture;
mod front;
mod moved;
mod passed;
mod stacks;
mod watched;
