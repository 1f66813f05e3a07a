//! The caching engine.
