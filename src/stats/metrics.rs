//! The counters in the OpenMetrics text format, which Prometheus and other tools read.
//!
//! The result is a string, not a server: the program returns it from its own endpoint.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter as Count;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::report::Statistics;
use crate::ids::DeviceId;

/// The counters of one allocator, and labels that identify it.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The label `device`.
    pub device: DeviceId,
    /// The label `backend`: the allocator's name.
    pub backend: String,
    /// The label `allocator`: a number that is unique in the process.
    pub number: u64,
    /// The counters.
    pub statistics: Statistics,
    /// The fragmentation of free memory: see
    /// [`CacheInfo::fragmentation`](crate::allocator::CacheInfo::fragmentation). `None` for an allocator
    /// without a cache.
    pub fragmentation: Option<f64>,
}

type Labels = Vec<(&'static str, String)>;

/// The metrics of one name.
enum Metric {
    /// A gauge of a current or peak value.
    Now(Unit, Family<Labels, Gauge>),
    /// A gauge from 0 to 1.
    Part(Family<Labels, Gauge<f64, AtomicU64>>),
    /// A counter, which only increases.
    Sum(Family<Labels, Count>),
}

/// Metrics by name, each with its help text.
#[derive(Default)]
struct Metrics(BTreeMap<String, (&'static str, Metric)>);

/// Returns the counters of several allocators in the OpenMetrics format. For each kind of pool (label
/// `pool`: `all`, `large`, `small`) it has the current values and the peaks; and sums of events. Names
/// begin with `stratalloc_`. Each metric is listed once, with a line for each allocator, so one call must
/// include all allocators of a process.
///
/// Sums restart at zero after a reset, which Prometheus allows for counters. Never waits.
#[must_use]
pub fn metrics(measured: &[Measured]) -> String {
    let mut all = Metrics::default();
    measured.iter().for_each(|measured| all.add(measured));
    let mut registry = Registry::with_prefix("stratalloc");
    for (name, (help, metric)) in all.0 {
        match metric {
            Metric::Now(unit, family) => registry.register_with_unit(name, help, unit, family),
            Metric::Part(family) => registry.register(name, help, family),
            Metric::Sum(family) => registry.register(name, help, family),
        }
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

/// Escapes the value of a label; the encoder does not.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

impl Metrics {
    /// Returns the metric of a name, or adds it. If a strategy's own counter has the name of another
    /// metric, the first one is kept.
    fn of(&mut self, name: &str, help: &'static str, new: impl FnOnce() -> Metric) -> &Metric {
        &self.0.entry(name.replace('.', "_")).or_insert_with(|| (help, new())).1
    }

    fn add(&mut self, measured: &Measured) {
        let Measured { device, backend, number, statistics, fragmentation } = measured;
        let labels = vec![
            ("device", device.to_string()),
            ("backend", escaped(backend)),
            ("allocator", number.to_string()),
        ];
        for (key, family) in statistics.families() {
            let (name, unit) = match key.strip_suffix("_bytes") {
                Some(name) => (name, Unit::Bytes),
                None => (key, Unit::Other("blocks".to_owned())),
            };
            for (pool, counter) in
                [("all", family.all), ("large", family.large), ("small", family.small)]
            {
                let labels = [&labels[..], &[("pool", pool.to_owned())]].concat();
                for (name, now) in
                    [(name.to_owned(), counter.current), (format!("{name}_peak"), counter.peak)]
                {
                    let new = || Metric::Now(unit.clone(), Family::default());
                    if let Metric::Now(_, family) = self.of(&name, help_of(key), new) {
                        family.get_or_create(&labels).set(now);
                    }
                }
            }
        }
        let help = "Bytes of tags whose memory a pause released";
        let new = || Metric::Now(Unit::Bytes, Family::default());
        if let Metric::Now(_, family) = self.of("paused", help, new) {
            let bytes = i64::try_from(statistics.paused_bytes).unwrap_or(i64::MAX);
            family.get_or_create(&labels).set(bytes);
        }
        for (name, help, sum) in sums(statistics) {
            let new = || Metric::Sum(Family::default());
            if let Metric::Sum(family) = self.of(name, help, new) {
                family.get_or_create(&labels).inc_by(u64::try_from(sum).unwrap_or(0));
            }
        }
        if let Some(part) = fragmentation {
            let help = "1 - largest free block / sum of all free blocks";
            let new = || Metric::Part(Family::default());
            if let Metric::Part(family) = self.of("fragmentation", help, new) {
                family.get_or_create(&labels).set(*part);
            }
        }
    }
}

/// Returns the counts of events, each with its name and help text.
fn sums(statistics: &Statistics) -> Vec<(&'static str, &'static str, i64)> {
    let mut sums = vec![
        ("requests", "Requests that got a block", statistics.allocation.all.allocated),
        ("frees", "Blocks that were freed", statistics.allocation.all.freed),
        ("hits", "Requests that a cached block served", statistics.hits.cast_signed()),
        ("misses", "Requests that needed more than the cache", statistics.misses.cast_signed()),
        ("ooms", "Requests that failed for lack of memory", statistics.num_ooms),
        (
            "oom_rejections",
            "Requests that were refused before the driver was called",
            statistics.num_oom_rejections,
        ),
        ("alloc_retries", "Requests that emptied the cache", statistics.num_alloc_retries),
        ("sync_all_streams", "Waits for all streams' events", statistics.num_sync_all_streams),
        (
            "device_allocs",
            "Segments allocated from the driver, or ranges mapped",
            statistics.num_device_alloc,
        ),
        (
            "device_frees",
            "Segments released to the driver, or ranges unmapped",
            statistics.num_device_free,
        ),
    ];
    let own = statistics.own.iter();
    sums.extend(own.map(|own| (own.name, "A counter of this strategy alone", own.count)));
    sums
}

fn help_of(key: &str) -> &'static str {
    match key {
        "active" => "Blocks allocated or waiting for other streams",
        "active_bytes" => "Blocks allocated or waiting for other streams, in bytes",
        "allocated_bytes" => "Allocated blocks, in bytes",
        "allocation" => "Allocated blocks",
        "inactive_split" => "Free blocks that are not whole segments",
        "inactive_split_bytes" => "Free blocks that are not whole segments, in bytes",
        "requested_bytes" => "Requested bytes of active blocks",
        "reserved_bytes" => "Bytes reserved from the driver",
        _ => "Segments reserved from the driver",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::OwnCounter;

    #[test]
    fn each_metric_stands_once_with_a_line_for_each_allocator() {
        let mut statistics = Statistics::default();
        statistics.allocated_bytes.all.increase(4096);
        statistics.allocated_bytes.small.increase(4096);
        statistics.num_ooms = 2;
        statistics.paused_bytes = 512;
        statistics.own.push(OwnCounter { name: "mine.rare", count: 3 });
        let of = |device, statistics: &Statistics| Measured {
            device: DeviceId(device),
            backend: "na\"tive\n".to_owned(),
            number: 7,
            statistics: statistics.clone(),
            fragmentation: (device == 0).then_some(0.25),
        };
        let text = metrics(&[of(0, &statistics), of(1, &Statistics::default())]);
        let has = |line: &str| text.lines().filter(|found| *found == line).count();
        let labels = r#"backend="na\"tive\n",allocator="7""#;
        let wanted = [
            "# TYPE stratalloc_allocated_bytes gauge".to_owned(),
            "# UNIT stratalloc_allocated_bytes bytes".to_owned(),
            format!(r#"stratalloc_allocated_bytes{{device="0",{labels},pool="all"}} 4096"#),
            format!(r#"stratalloc_allocated_bytes{{device="1",{labels},pool="all"}} 0"#),
            format!(r#"stratalloc_allocated_peak_bytes{{device="0",{labels},pool="small"}} 4096"#),
            format!(r#"stratalloc_paused_bytes{{device="0",{labels}}} 512"#),
            format!(r#"stratalloc_ooms_total{{device="0",{labels}}} 2"#),
            format!(r#"stratalloc_fragmentation{{device="0",{labels}}} 0.25"#),
            format!(r#"stratalloc_mine_rare_total{{device="0",{labels}}} 3"#),
            "# EOF".to_owned(),
        ];
        for line in wanted {
            assert_eq!(has(&line), 1, "{line} in\n{text}");
        }
    }

    #[test]
    fn a_counter_that_has_another_metrics_name_does_not_displace_it() {
        let own = vec![OwnCounter { name: "allocated", count: 7 }];
        let statistics = Statistics { own, ..Statistics::default() };
        let text = metrics(&[Measured {
            device: DeviceId(0),
            backend: "mine".to_owned(),
            number: 1,
            statistics,
            fragmentation: None,
        }]);
        assert!(text.contains("stratalloc_allocated_bytes{") && !text.contains("} 7"), "{text}");
    }
}
