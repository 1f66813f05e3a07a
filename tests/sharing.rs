//! Blocks in other processes and on other devices: nothing hostile does harm, nothing stays behind.
//!
//! Handles are taken apart byte by byte, imports are counted by the simulated device, each driver
//! call is made to fail once, and two real processes share real memory.

#[path = "sharing/bytes.rs"]
mod bytes;
#[path = "sharing/fabric.rs"]
mod fabric;
#[path = "sharing/imports.rs"]
mod imports;
#[path = "sharing/peers.rs"]
mod peers;
#[path = "sharing/plain.rs"]
mod plain;
#[cfg(target_os = "linux")]
#[path = "sharing/processes.rs"]
mod processes;
#[path = "sharing/tools.rs"]
mod tools;
