//! Blocks shared with other processes and devices: hostile input does no harm, and nothing leaks.
//!
//! Handles are modified byte by byte, the simulated device counts imports, each driver call is made to
//! fail once, and two real processes share real memory.

mod bytes;
mod fabric;
mod imports;
mod peers;
mod plain;
#[cfg(target_os = "linux")]
mod processes;
mod tools;
