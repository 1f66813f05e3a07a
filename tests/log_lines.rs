//! Lines sent to the `log` crate. The test has its own program, because a process has one logger.

use std::sync::{Arc, OnceLock};

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use stratalloc::allocator::{DeviceAllocator, Request};
use stratalloc::config::{Config, KeyTable};
use stratalloc::ids::StreamId;
use stratalloc::registry::BuildOptions;
use stratalloc::switch::Switchable;
use stratalloc_sim::{Sim, SimOptions};

const MIB: u64 = 1 << 20;

/// A logger that stores lines. It also allocates and frees with the allocator that logs, which takes the
/// allocator's locks.
struct Logger {
    lines: Mutex<Vec<(Level, String)>>,
    allocator: OnceLock<Arc<Switchable>>,
}

static LOGGER: Logger = Logger { lines: Mutex::new(Vec::new()), allocator: OnceLock::new() };

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        assert_eq!(record.target(), "stratalloc");
        self.lines.lock().push((record.level(), record.args().to_string()));
        if let Some(allocator) = self.allocator.get() {
            // Causes a miss and a release of all free segments. Both take the allocator's growth lock.
            if let Ok(block) = allocator.allocate(Request::new(3 * MIB, StreamId(77))) {
                allocator.free(block).expect("it is live");
            }
            allocator
                .control()
                .caching
                .expect("it caches")
                .empty_cache()
                .expect("the device frees");
        }
    }

    fn flush(&self) {}
}

fn lines() -> Vec<(Level, String)> {
    std::mem::take(&mut LOGGER.lines.lock())
}

fn build(conf: &str, total_bytes: u64) -> Arc<Switchable> {
    let config = Config::parse(conf, &KeyTable::default()).expect("a good string");
    let device = Arc::new(Sim::new(SimOptions { total_bytes, ..SimOptions::default() }));
    Arc::new(Switchable::build(&config, device, BuildOptions::default()).expect("it is built"))
}

/// Returns each line with its level and without its address.
fn texts(lines: Vec<(Level, String)>) -> Vec<String> {
    let without_address = |text: String| match text.split_once(" at 0x") {
        Some((before, after)) => {
            let rest = after.trim_start_matches(|c: char| c.is_ascii_hexdigit());
            format!("{before}{rest}")
        }
        None => text,
    };
    let shown = |(level, text): (Level, String)| format!("{level} {}", without_address(text));
    lines.into_iter().map(shown).collect()
}

/// All cases are one test, because a process has one logger.
#[test]
fn a_miss_a_step_a_release_a_failure_and_a_switch_are_logged_when_no_lock_is_held() {
    log::set_logger(&LOGGER).expect("the only logger");
    let take = |allocator: &Switchable, bytes| allocator.allocate(Request::new(bytes, StreamId(5)));
    let place = "(device 0, stream 5, pool (0, 0))";

    let allocator = build("backend:native", 64 * MIB);
    let block = take(&allocator, 30 * MIB).expect("there is room");
    assert_eq!(lines(), [], "no level is wanted");

    log::set_max_level(LevelFilter::Debug);
    allocator.free(block).expect("it is live");
    let block = take(&allocator, 30 * MIB).expect("it is cached");
    assert_eq!(lines(), [], "a hit and a free are no lines");

    let other = take(&allocator, MIB).expect("there is room");

    let first = texts(lines());
    assert_eq!(first.len(), 1, "{first:?}");
    assert!(first[0].starts_with("DEBUG allocated a segment of "), "{first:?}");
    assert!(first[0].ends_with(place), "{first:?}");

    allocator.free(block).expect("it is live");
    let failed = take(&allocator, 63 * MIB).expect_err("more than the device has");
    let seen = texts(lines());
    let has = |part: &str| seen.iter().any(|line| line.contains(part));
    assert!(has("DEBUG no segment of 67108864 bytes for 66060288 bytes"), "{seen:#?}");
    assert!(has("DEBUG waited for the events of freed blocks"), "{seen:#?}");
    assert!(has("DEBUG freed a segment of 31457280 bytes"), "{seen:#?}");
    assert!(
        has("DEBUG release all free segments: released 31457280 bytes (device 0)"),
        "{seen:#?}"
    );
    let report = failed.to_string();
    let warning = format!("WARN {}", report.lines().next().expect("it has a line"));
    let warned = seen.iter().filter(|line| line.starts_with("WARN")).collect::<Vec<_>>();
    assert_eq!(warned, [&warning], "once, also below a switchable allocator");

    allocator
        .switch_to(Config::parse("backend:cudaMallocAsync", &KeyTable::default()).unwrap())
        .expect("the device can do it");
    let seen = texts(lines());
    let switched = "INFO switched from backend:native to backend:cudaMallocAsync (device 0)";
    assert_eq!(seen.iter().filter(|line| *line == switched).count(), 1, "{seen:#?}");
    allocator.free(other).expect("it is live");

    // The logger now uses the allocator. This would deadlock if a line were logged while a lock is held. It
    // would recurse without end if the logger's own requests logged lines.
    lines();
    let allocator = build("backend:native,expandable_segments:True", 64 * MIB);
    assert!(LOGGER.allocator.set(Arc::clone(&allocator)).is_ok());
    let block = take(&allocator, 30 * MIB).expect("there is room");
    allocator.free(block).expect("it is live");
    allocator.control().caching.expect("it caches").empty_cache().expect("the device frees");
    take(&allocator, 100 * MIB).expect_err("more than the device has");
    let seen = texts(lines());
    let has = |part: &str| seen.iter().any(|line| line.contains(part));
    assert!(
        has("DEBUG mapped ") && has("DEBUG unmapped ") && has("WARN out of memory"),
        "{seen:#?}"
    );
    assert!(!has("stream 77"), "lines of the logger's own requests: {seen:#?}");
}
