//! Why a switch did not happen.

use thiserror::Error;

use crate::config::ConfigError;
use crate::error::DriverError;
use crate::ids::PoolId;
use crate::registry::BuildError;

/// A switch that did not happen. Everything is as it was.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum SwitchError {
    /// The configuration string cannot be used.
    #[error("configuration {text:?}: {error}")]
    Configuration {
        /// The string.
        text: String,
        /// What is wrong with it, and where.
        error: ConfigError,
    },
    /// The present allocator cannot take a further string.
    #[error(transparent)]
    Apply(DriverError),
    /// The new allocator was not built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A scope routes requests to a pool of the present allocator (a capture's, say): they would go astray.
    #[error("a scope of pool {pool} is open; switch when it is closed")]
    ScopeOpen {
        /// The pool.
        pool: PoolId,
    },
    /// A pool of the present allocator has users: a graph may use its addresses.
    #[error("pool {pool} has users; switch when they have released it")]
    PoolInUse {
        /// The pool.
        pool: PoolId,
    },
    /// The new allocator cannot do what callers of this one count on.
    #[error("backend:{name} has no {what}, which callers of this allocator count on")]
    Lacks {
        /// The new allocator.
        name: String,
        /// What it has not.
        what: &'static str,
    },
    /// The new allocator cannot be reached by a device that was let in before.
    #[error("a peer cannot be let in: {0}")]
    Peer(#[source] DriverError),
    /// A stack provider of this thread's history asked for it: releasing the old allocator's memory would
    /// call the provider again.
    #[error("a stack provider is running on this thread; switch when it has returned")]
    InStackProvider,
    /// Too many allocators wait for their last blocks.
    #[error("{limit} allocators still have live blocks, and no more may")]
    TooMany {
        /// How many there are, which is the most there may be.
        limit: usize,
    },
}
