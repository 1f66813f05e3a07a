//! Settings of PyTorch's allocators. They are applied to all devices or to none, and can be read.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_int};

use crate::devices::set_conf;
use crate::guard::{Status, status};
use crate::pointers::{read, store};
use crate::table;

/// The current settings, as far as PyTorch's snapshots list them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TorchSettings {
    /// The setting `garbage_collection_threshold`, a fraction in (0, 1). 0 if it is not set.
    pub garbage_collection_threshold: f64,
    /// Blocks of this size or more are never split. `UINT64_MAX` means no limit.
    pub max_split_bytes: u64,
    /// The divisions of each power-of-two interval, starting at 1 MiB. 0 means none.
    pub roundup_power2_divisions: [u64; 16],
    /// 1 if the setting `expandable_segments` is on, else 0.
    pub expandable_segments: c_int,
    /// 1 if the setting `release_lock_on_cudamalloc` is on, else 0.
    pub release_lock_on_malloc: c_int,
    /// 1 if the setting `graph_capture_record_stream_reuse` is on, else 0.
    pub graph_capture_record_stream_reuse: c_int,
}

/// Applies a configuration string to all devices that PyTorch has used, and to those that it uses
/// later. If one device refuses the string, all devices keep their settings. May wait for the driver
/// and for running work.
///
/// # Safety
///
/// `conf` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_set_conf(conf: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
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
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(settings, "settings", work) }
}
