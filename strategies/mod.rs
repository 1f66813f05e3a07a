//! Strategies: constructors over the engine.
