//! Texts about allocators: counters, layouts, names and configurations.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_int};

use super::devices;
use super::guard::{Failure, Status};
use super::pointers::write;
use super::table::{self, Named};
use stratalloc::allocator::{Counters, DeviceAllocator};
use stratalloc::history::SegmentLayout;
use stratalloc::registry::key_table;
use stratalloc::stats::{Measured, Statistics, metrics};

/// A kind of text for `stratalloc_text_write`, which also determines the meaning of the argument `of`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    /// `of` is a handle: the counters as one flat JSON object of integers. The keys are those of
    /// `torch.cuda.memory_stats()`, then `free_blocks`, `hits`, `misses`, `num_oom_rejections` and
    /// `paused_bytes`, then those of counters that only this strategy, or one before a switch, has.
    /// `backend:cudaMallocAsync` has these: `malloc_async.deferred_frees` (frees that wait for the end of
    /// a capture), `malloc_async.frees_after_capture` (blocks of a graph that were freed after its capture
    /// had ended), `malloc_async.own_stream_recorded` (`record_stream` calls with the block's own stream,
    /// which have no effect) and `malloc_async.trims_that_helped` (requests that succeeded only after the
    /// pool was trimmed).
    Statistics = 0,
    /// `of` is a handle: the counters as a table.
    Summary = 1,
    /// `of` is a handle: every segment and block as JSON, in address order. The text can become longer
    /// between two calls, because other threads allocate.
    Layout = 2,
    /// `of` is a handle: the name of the current strategy.
    Name = 3,
    /// `of` is a handle: the metadata that `stratalloc_history_set_metadata` set, or an empty text.
    Metadata = 4,
    /// `of` is a handle: a configuration string for the current settings. It is empty if all settings
    /// have the default values of PyTorch's allocators.
    Conf = 5,
    /// `of` is a device ordinal: the counters of PyTorch's allocator on the device, as JSON. Opens no
    /// device. The counters of an unused device are zeros.
    TorchStatistics = 6,
    /// `of` is a device ordinal: the counters of PyTorch's allocator on the device, as a table.
    TorchSummary = 7,
    /// `of` is a device ordinal: the strategy of PyTorch's allocator on the device. Opens no device. For
    /// an unused device, the configured strategy.
    TorchName = 8,
    /// `of` is 0: the counters of all allocators of this process in the OpenMetrics format, which
    /// Prometheus reads. Names begin with `stratalloc_`. Labels are `device`, `backend`, `allocator` (a
    /// small number) and, for metrics per kind of pool, `pool`. Walks over the free blocks, because of
    /// the metric `stratalloc_fragmentation`.
    Metrics = 9,
    /// `of` is 0: the names of all keys that a configuration string can have now, separated by commas.
    ConfKeys = 10,
    /// `of` is a device ordinal: the line with which PyTorch's own out-of-memory errors begin with the
    /// strategy of PyTorch's allocator on the device, before "CUDA out of memory". Usually empty. Opens no
    /// device.
    TorchOomLine = 11,
}

/// Writes a text about `of`. `kind` is a value of `stratalloc_text`. `needed`, unless null, is set to
/// the number of bytes that the text needs, including the terminating zero. If `size` is 0, only
/// `needed` is stored.
///
/// # Safety
///
/// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_text_write(
    of: u64,
    kind: u32,
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { write(buffer, size, needed, || text(of, kind)) }
}

/// A function that returns the text of one kind.
type Maker = fn(of: u64) -> Result<String, Failure>;

const MAKERS: [(Text, Maker); 12] = [
    (Text::Statistics, |handle| Ok(json(&table::find(handle)?.allocator.statistics()))),
    (Text::Summary, |handle| Ok(table::find(handle)?.allocator.statistics().summary())),
    (Text::Layout, |handle| Ok(layout_json(&table::find(handle)?.caching()?.layout()))),
    (Text::Name, |handle| Ok(table::find(handle)?.allocator.name().to_owned())),
    (Text::Metadata, |handle| {
        let metadata = table::find(handle)?.history().metadata();
        Ok(metadata.map(|text| text.to_string()).unwrap_or_default())
    }),
    (Text::Conf, |handle| {
        let config = table::find(handle)?.in_force().config;
        Ok(config.to_text_over(devices::default_config()?.settings()))
    }),
    (Text::TorchStatistics, |device| Ok(json(&devices::statistics(ordinal(device))?))),
    (Text::TorchSummary, |device| Ok(devices::statistics(ordinal(device))?.summary())),
    (Text::TorchName, |device| devices::name_in_force(ordinal(device))),
    (Text::Metrics, |_| Ok(metrics(&table::all().iter().map(measured).collect::<Vec<_>>()))),
    (Text::TorchOomLine, |device| devices::oom_line(ordinal(device))),
    (Text::ConfKeys, |_| Ok(key_table().names().collect::<Vec<_>>().join(","))),
];

fn text(of: u64, kind: u32) -> Result<String, Failure> {
    let maker = MAKERS.iter().find(|(known, _)| *known as u32 == kind);
    let unknown = || Failure::invalid(format_args!("no text has kind {kind}"));
    let (_, make) = maker.ok_or_else(unknown)?;
    make(of)
}

/// Returns a device's ordinal. Returns -1, which no device has, for a number that is too large.
fn ordinal(device: u64) -> c_int {
    c_int::try_from(device).unwrap_or(-1)
}

fn measured((number, instance): &(u64, Named)) -> Measured {
    let cache = instance.caching().and_then(|caching| Ok(caching.cache_info()?));
    Measured {
        device: instance.driver.info().device,
        backend: instance.allocator.name().to_owned(),
        number: *number,
        statistics: instance.allocator.statistics(),
        fragmentation: cache.ok().map(|info| info.fragmentation()),
    }
}

/// Returns the counters as one flat JSON object, with PyTorch's keys and those of counters that only
/// some strategies have.
fn json(statistics: &Statistics) -> String {
    let keys = statistics.keys();
    // `OwnCounter` limits names to letters, digits, dots and underscores, so nothing needs escaping.
    let pairs: Vec<String> = keys.iter().map(|(key, value)| format!("{key:?}:{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

fn layout_json(layout: &[SegmentLayout]) -> String {
    let segments = layout.iter().map(|segment| {
        let blocks = segment.blocks.iter().map(|block| {
            format!(
                r#"{{"address":{},"size":{},"requested_size":{},"state":"{}"}}"#,
                block.address,
                block.size_bytes,
                block.requested_bytes,
                block.state.name()
            )
        });
        let blocks = blocks.collect::<Vec<_>>().join(",");
        let SegmentLayout { address, size_bytes, stream, pool, expandable, .. } = segment;
        let place = format!(r#""address":{address},"total_size":{size_bytes},"stream":{stream}"#);
        let kind = segment.kind.name();
        let pool = format!(r#""segment_pool_id":[{},{}]"#, pool.capture, pool.user);
        let asleep = if segment.asleep { r#""is_asleep":true,"# } else { "" };
        let rest = format!(r#""is_expandable":{expandable},{asleep}"blocks":[{blocks}]"#);
        format!(r#"{{{place},"segment_type":"{kind}",{pool},{rest}}}"#)
    });
    format!("[{}]", segments.collect::<Vec<_>>().join(","))
}
