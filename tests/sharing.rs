//! Blocks in other processes and on other devices: nothing hostile does harm, nothing stays behind.
//!
//! Handles are taken apart byte by byte, imports are counted by the simulated device, each driver
//! call is made to fail once, and two real processes share real memory.

mod bytes;
mod fabric;
mod imports;
mod peers;
mod plain;
#[cfg(target_os = "linux")]
mod processes;
mod tools;
