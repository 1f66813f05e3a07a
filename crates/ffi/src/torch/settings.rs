//! Settings of PyTorch's allocators: applied to all devices or to none, and read back.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_int};

use super::devices::set_conf;
use crate::guard::{Status, status};
use crate::pointers::{read, store};
use crate::table;

/// The current settings that PyTorch's snapshots list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TorchSettings {
    /// In (0, 1); 0 for none.
    pub garbage_collection_threshold: f64,
    /// Blocks of this size or more are never split; `UINT64_MAX` for no limit.
    pub max_split_bytes: u64,
    /// Divisions of each power of two, from 1 MiB up; 0 for none.
    pub roundup_power2_divisions: [u64; 16],
    /// `expandable_segments`.
    pub expandable_segments: c_int,
    /// `release_lock_on_cudamalloc`.
    pub release_lock_on_malloc: c_int,
    /// `graph_capture_record_stream_reuse`.
    pub graph_capture_record_stream_reuse: c_int,
}

/// Applies a configuration string to all devices that PyTorch has used, and to those that it uses later.
/// If one device refuses the string, all keep their settings. May wait for the driver and for running
/// work.
///
/// # Safety
///
/// `conf` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_set_conf(conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| set_conf(unsafe { read(conf, "conf") }?))
}

/// Stores the current settings.
///
/// # Safety
///
/// `settings` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_settings(
    handle: u64,
    settings: *mut TorchSettings,
) -> Status {
    let work = || {
        let config = table::find(handle)?.in_force().config;
        let now = config.settings();
        Ok(TorchSettings {
            garbage_collection_threshold: now.garbage_collection_threshold.unwrap_or(0.0),
            max_split_bytes: now.max_split_bytes.unwrap_or(u64::MAX),
            roundup_power2_divisions: *now.roundup.divisions(),
            expandable_segments: c_int::from(now.expandable_segments),
            release_lock_on_malloc: c_int::from(now.release_lock_on_device_allocate),
            graph_capture_record_stream_reuse: c_int::from(now.graph_capture_record_stream_reuse),
        })
    };
    // SAFETY: our caller's promise.
    unsafe { store(settings, "settings", work) }
}
