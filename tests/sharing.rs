//! Sharing blocks with other processes and devices. Hostile input must do no harm, and nothing may leak.
//!
//! Handles are modified byte by byte, the simulated device counts imports, each driver call fails once,
//! and two real processes share real memory.

mod bytes;
mod fabric;
mod imports;
mod peers;
mod plain;
#[cfg(target_os = "linux")]
mod processes;
mod tools;
