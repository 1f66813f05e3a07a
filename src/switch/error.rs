//! Errors of a switch.

use thiserror::Error;

use crate::config::ConfigError;
use crate::error::DriverError;
use crate::ids::PoolId;
use crate::registry::BuildError;

/// A switch that did not happen. Nothing was changed.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum SwitchError {
    /// The configuration string is invalid.
    #[error("configuration {text:?}: {error}")]
    Configuration {
        /// The string.
        text: String,
        /// The error and its place in the string.
        error: ConfigError,
    },
    /// A later configuration string needed no switch, but applying it to the current allocator failed.
    #[error(transparent)]
    Apply(DriverError),
    /// The new allocator could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A scope routes requests to a pool of the current allocator, for a stream capture for example.
    /// After a switch these requests would not reach the pool.
    #[error("a scope of pool {pool} is open; switch when it is closed")]
    ScopeOpen {
        /// The pool.
        pool: PoolId,
    },
    /// A private pool of the current allocator has users: a CUDA graph may use its addresses.
    #[error("pool {pool} has users; switch when they have released it")]
    PoolInUse {
        /// The pool.
        pool: PoolId,
    },
    /// The new allocator lacks a capability that callers of the current one rely on.
    #[error("backend:{name} has no {what}, which this allocator must have")]
    Lacks {
        /// The name of the new allocator.
        name: String,
        /// The missing capability.
        what: &'static str,
    },
    /// The new allocator cannot give access to a peer device that has access to the current one.
    #[error("enabling peer access failed: {0}")]
    Peer(#[source] DriverError),
    /// A stack provider of the history called for a switch on its own thread. Releasing the old
    /// allocator's memory would call the provider again.
    #[error("a stack provider is running on this thread; switch when it has returned")]
    InStackProvider,
    /// Too many allocators wait for their last blocks.
    #[error("{limit} replaced allocators still have live blocks; free some of them first")]
    TooMany {
        /// The number of waiting allocators, which is also the largest number allowed.
        limit: usize,
    },
}
