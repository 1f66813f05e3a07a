//! Replays of the shipped recordings. Every address, every segment event, the final layout and every key of
//! the statistics must equal PyTorch's, whether or not the history records stacks.
//!
//! A key is not compared where the recording does not determine it. For example, a call of `empty_cache`
//! that released nothing raises `num_sync_all_streams` but leaves no event.

use stratalloc_recording::{
    Limits, ReplayError, Silent, Trace, TraceEvent, Until, Verification, reader, run, verify,
    verify_until,
};

use crate::common::prelude::*;
use crate::common::stacks::LEVELS;

const H200_BYTES: u64 = 150_109_880_320;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces")
}

fn read(name: &str) -> Trace {
    read_in(&folder(), name)
}

fn read_in(folder: &Path, name: &str) -> Trace {
    reader::read(&folder.join(format!("{name}.pickle.xz")), &Limits::default())
        .expect("shipped recordings are sound")
}

fn config_of(trace: &Trace) -> Config {
    config(&trace.conf).with_compat(Compat::PyTorch)
}

/// Verifies a recording of an H200 with each level of stacks in the history, and compares the statistics
/// with PyTorch's, except the `excused` keys.
fn exact(name: &str, fraction: Option<f64>, excused: &[&str]) -> Verification {
    exact_on(H200_BYTES, name, fraction, excused)
}

/// Like `exact`, for a recording of a device with `total_bytes`.
fn exact_on(total_bytes: u64, name: &str, fraction: Option<f64>, excused: &[&str]) -> Verification {
    let trace = read(name);
    let text = std::fs::read_to_string(folder().join(format!("{name}.stats.json")))
        .expect("shipped recordings are sound");
    let recorded: BTreeMap<String, i64> =
        serde_json::from_str(&text).expect("shipped recordings are sound");
    let found = LEVELS.map(|level| {
        let (provider, alive) = Counted::provider("step");
        let record = |history: &History| {
            history.set_stack_provider(Some(Arc::clone(&provider)));
            history.start(&RecordOptions::default().with_stacks(level));
        };
        let found = verify_until(
            &trace,
            &config_of(&trace),
            total_bytes,
            fraction,
            Until::End,
            &record,
            &Silent,
        )
        .expect("shipped recordings are sound");
        assert_eq!(found.first_mismatch, None, "{name} {level:?}");
        assert!(found.is_exact(), "{name} {level:?}");
        assert_eq!(alive.load(Ordering::Relaxed), 0, "{name} {level:?}: stacks are released");
        let ours: BTreeMap<String, i64> = found.run.statistics.pytorch_keys().into_iter().collect();
        // Only later versions of PyTorch report `num_oom_rejections`.
        let known = |key: &&String| *key != "num_oom_rejections";
        assert!(ours.keys().filter(known).eq(recorded.keys().filter(known)), "{name}");
        for (key, value) in recorded.iter().filter(|(key, _)| known(key)) {
            if !excused.contains(&key.as_str()) {
                assert_eq!(ours[key], *value, "{name} {level:?}: {key}");
            }
        }
        found
    });
    let [found, ..] = found;
    found
}

#[test]
fn training_on_one_stream_is_exact() {
    let found = exact("resnet50.default", None, &[]);
    assert_eq!((found.run.allocations, found.workload.empty_caches), (5086, 0));
}

#[test]
fn training_with_a_prefetch_stream_is_exact() {
    assert_eq!(exact("multistream.default", None, &[]).run.allocations, 3230);
}

#[test]
fn serving_on_eight_streams_is_exact() {
    assert_eq!(exact("serve.default", None, &[]).run.allocations, 5050);
}

#[test]
fn thirty_three_failures_at_the_limit_are_exact() {
    let found = exact("unet.frac045", Some(0.045), &[]);
    assert_eq!((found.run.ooms, found.run.statistics.num_alloc_retries), (33, 35));
}

#[test]
fn oversize_rules_and_the_collector_are_exact() {
    let excused = ["num_sync_all_streams", "num_alloc_retries"];
    let found = exact("fuzz.splitgc.1.frac02", Some(0.02), &excused);
    assert_eq!(found.workload.empty_caches, 6, "explicit calls, not pressure");
}

#[test]
fn expandable_segments_are_exact() {
    assert_eq!(exact("multistream.expandable", None, &[]).run.allocations, 3230);
    let unet = exact("unet.expandable", None, &[]);
    assert_eq!(unet.run.statistics.memory_reserved() >> 20, 6274);
}

#[test]
fn expandable_segments_with_oversize_rules_and_collector_are_exact() {
    let excused = ["num_sync_all_streams", "num_alloc_retries"];
    exact("fuzz.expsplitgc.1.frac02", Some(0.02), &excused);
}

/// Because the device is full, some requests reserve address space and then map no memory there. No
/// entry of the recording shows these reservations.
#[test]
fn expandable_segments_on_a_full_device_are_exact() {
    let found = exact_on(2 << 30, "fuzz.expandable.full", None, &["num_sync_all_streams"]);
    assert_eq!((found.run.ooms, found.run.statistics.num_alloc_retries), (9, 24));
}

/// The pool of each request is derived from the final layout. `num_sync_all_streams` is not compared,
/// because calls of `empty_cache` that released nothing leave no event.
#[test]
fn private_pools_are_exact() {
    let graphs = exact("cudagraph.default", None, &["num_sync_all_streams"]);
    assert_eq!(graphs.run.allocations, 673);
    let pools = exact("fuzz.pools.1", None, &["num_sync_all_streams"]);
    assert!(pools.workload.pools.len() > 1, "{:?}", pools.workload.pools);
    exact("fuzz.exppools.1", None, &["num_sync_all_streams"]);
}

/// Programs with sequences of varying lengths, and with several streams under a limit.
#[test]
fn changing_lengths_and_streams_at_a_limit_are_exact() {
    assert_eq!(exact("llama_var.default", None, &[]).run.allocations, 23_591);
    assert_eq!(exact("llama_var.expandable", None, &[]).run.allocations, 23_591);
    let excused = ["num_sync_all_streams", "num_alloc_retries"];
    assert!(exact("fuzz.streams.1.frac025", Some(0.025), &excused).run.ooms > 0);
}

/// Versions of PyTorch differ in which of several free blocks of one size they choose. The version is
/// derived from the recording.
#[test]
fn recordings_of_later_versions_of_pytorch_are_exact() {
    let excused = &["num_sync_all_streams"];
    let of_2_12 = exact_on(81_920 * MIB, "2.12.1.default", None, excused);
    assert_eq!(of_2_12.run.allocations, 2_028);
    exact_on(8_192 * MIB, "2.12.1.expstreams", Some(0.4), excused);
    exact_on(81_920 * MIB, "2.13.0.streams", None, &[]);
    exact_on(8_192 * MIB, "2.15.0.gcfrac", Some(0.3), excused);
}

/// Recordings of 5 to 54 events that depend on calls and moments that no entry contains: calls of
/// `empty_cache`, the ends of pools, captures, waits for events, and where a reservation ends. The limits
/// are those of the programs.
#[test]
fn calls_and_moments_that_no_entry_contains_are_inferred() {
    for (name, total_mib, limit_mib, (retries, ooms, empty_caches)) in [
        // `max_split_size_mb`: the first segment of an explicit release is also the one that the request
        // would release.
        ("2.15.0.empty_before_oversize", 8192, Some(256.0), (0, 0, 1)),
        // The pool of a graph is released some time after the graph was dropped.
        ("2.15.0.dropped_graph", 8192, None, (0, 0, 0)),
        // The pages of a reservation were mapped to its end, where the next one begins.
        ("2.15.0.full_reservation", 128, None, (1, 0, 1)),
        // After the wait a free block fits, but PyTorch does not search again.
        ("2.15.0.oom_after_wait", 8192, Some(100.0), (1, 1, 0)),
        ("2.15.0.retry_after_wait", 8192, Some(150.0), (1, 0, 0)),
        ("2.15.0.retries_only", 8192, Some(200.0), (4, 0, 0)),
        // In a capture a request releases nothing. Up to 2.12 each request of a private pool counts as
        // captured, and later those of a graph's own pool.
        ("2.12.1.empty_before_pool", 8192, Some(100.0), (0, 0, 1)),
        ("2.15.0.oom_in_capture", 8192, Some(100.0), (0, 1, 0)),
        ("2.15.0.oom_in_capture_with_handle", 8192, Some(100.0), (0, 1, 0)),
        // The end of a `MemPool` releases the pool's memory alone.
        ("2.15.0.ended_pool", 8192, None, (0, 0, 0)),
        ("2.15.0.ended_pool_at_limit", 8192, Some(120.0), (0, 0, 0)),
        // Another pool without users keeps free memory, which a retry would release too.
        ("2.15.0.ended_pool_beside_another", 8192, Some(100.0), (0, 0, 0)),
        // A retry would wait for all events, which complete later.
        ("2.15.0.ended_pool_while_events_wait", 8192, Some(100.0), (0, 0, 0)),
        // After it, the next request finds an event of another pool passed.
        ("2.15.0.ended_pool_before_completion", 8192, None, (0, 0, 0)),
        // PyTorch releases several pools in the order of a hash table.
        ("2.12.1.graphs_dropped_together", 8192, None, (0, 0, 0)),
        ("2.15.0.graphs_dropped_together", 8192, None, (0, 0, 0)),
        // A graph's handle is used again after its pool was released.
        ("2.15.0.handle_again", 8192, None, (0, 0, 0)),
    ] {
        let trace = read_in(&folder().with_file_name("cases"), name);
        let fraction = limit_mib.map(|mib| mib / total_mib as f64);
        let found = verify(&trace, &config_of(&trace), total_mib * MIB, fraction).expect(name);
        assert_eq!(found.first_mismatch, None, "{name}");
        assert!(found.is_exact(), "{name}");
        let counts = (found.run.statistics.num_alloc_retries, found.run.ooms);
        let counts = (counts.0, counts.1, found.workload.empty_caches);
        assert_eq!(counts, (retries, ooms, empty_caches), "{name}");
    }
}

#[test]
fn a_recording_shows_which_version_of_pytorch_made_it() {
    for (name, version) in [
        ("resnet50.default", "pytorch-2.11"),
        ("2.12.1.default", "pytorch-2.12"),
        ("2.13.0.streams", "pytorch-2.13"),
        ("2.15.0.gcfrac", "pytorch-2.14"),
    ] {
        assert_eq!(read(name).torch_version().name(), version, "{name}");
    }
}

#[test]
fn the_decisions_of_another_version_are_found_out() {
    for (name, own, other) in [
        ("2.12.1.default", "compat:pytorch-2.12", "compat:pytorch-2.11"),
        ("2.12.1.default", "compat:pytorch-2.12", "compat:pytorch-2.13"),
        ("2.13.0.streams", "compat:pytorch-2.14", "compat:pytorch-2.11"),
        ("2.13.0.streams", "compat:pytorch-2.15", "compat:pytorch-2.12"),
    ] {
        let trace = read(name);
        let is_exact = |conf: &str| {
            let config = config(conf);
            assert_eq!(trace.as_recorded(config.clone()), config, "{conf} is kept");
            let found = verify(&trace, &config, 81_920 * MIB, None).expect("it can be repeated");
            found.is_exact()
        };
        assert!(is_exact(own), "{name} {own}");
        assert!(!is_exact(other), "{name} {other}");
    }
}

/// Under this library's default rules, replays must have at most as many failures and at most as high a
/// peak as under PyTorch's.
#[test]
fn our_own_rules_never_do_worse_at_a_limit() {
    for (name, fraction) in [
        ("fuzz.expsplitgc.1.frac02", 0.02),
        ("fuzz.streams.1.frac025", 0.025),
        ("unet.frac045", 0.045),
    ] {
        let trace = read(name);
        let recorded = verify(&trace, &config_of(&trace), H200_BYTES, Some(fraction))
            .expect("shipped recordings are sound");
        let config = config(&trace.conf);
        let sim = std::sync::Arc::new(Sim::new(SimOptions {
            total_bytes: H200_BYTES,
            event_mode: EventMode::Manual,
            ..SimOptions::default()
        }));
        let driver = std::sync::Arc::clone(&sim) as std::sync::Arc<dyn Driver>;
        let ours = registry::build(&config, driver, BuildOptions::default()).unwrap();
        ours.engine().unwrap().set_memory_fraction(fraction).unwrap();
        let run = run(&recorded.workload, &ours, Some(sim), 1, &Silent).unwrap();
        assert!(
            run.ooms <= recorded.run.ooms,
            "{name}: {} failures, {}",
            run.ooms,
            recorded.run.ooms
        );
        let peak = |s: &Statistics| s.reserved_bytes.all.peak;
        let (ours, theirs) = (peak(&run.statistics), peak(&recorded.run.statistics));
        assert!(ours <= theirs, "{name}: {ours} bytes, {theirs}");
    }
}

#[test]
fn a_wrong_limit_is_found_out() {
    let trace = read("unet.frac045");
    let found = verify(&trace, &config_of(&trace), H200_BYTES, Some(0.046)).unwrap();
    assert!(!found.is_exact());
    assert!(found.first_mismatch.is_some());
}

#[test]
fn a_wrong_address_is_found_out() {
    let mut trace = read("resnet50.default");
    // Changes the address in the events of one block.
    let is_freed = |e: &TraceEvent| e.action == Action::FreeRequested;
    let freed = trace.events.iter().rposition(is_freed).unwrap();
    let address = trace.events[freed].address;
    let born = |e: &TraceEvent| e.action == Action::Alloc && e.address == address;
    let born = trace.events[..freed].iter().rposition(born).unwrap();
    for event in [born, freed, freed + 1] {
        trace.events[event].address += 256;
    }
    let found = verify(&trace, &config_of(&trace), H200_BYTES, None).unwrap();
    assert_eq!(found.address_mismatches, 1);
    assert!(found.first_mismatch.is_some());
}

#[test]
fn a_recording_that_began_late_is_verified_from_what_was_there() {
    let mut trace = read("resnet50.default");
    let half = trace.events.len() / 2;
    trace.events.drain(..half);
    let found = verify(&trace, &config_of(&trace), H200_BYTES, None).unwrap();
    assert_eq!(found.first_mismatch, None);
    assert_eq!(found.run.statistics.reserved_bytes.all.peak >> 20, 3622);
    assert_eq!(
        found.run.statistics.num_device_alloc, 0,
        "counted from the first event that is left"
    );
    // Without the segments, the addresses of the blocks that were live at the start are unknown.
    let mut apart = trace.clone();
    apart.segments.clear();
    match verify(&apart, &config_of(&apart), H200_BYTES, None) {
        Err(ReplayError::LiveBefore { blocks }) => assert!(blocks > 0),
        other => panic!("{other:?}"),
    }
    let workload = stratalloc_recording::Workload::of(&trace, H200_BYTES);
    assert!(workload.seeded > 0);
    let sim = std::sync::Arc::new(stratalloc_sim::Sim::new(Default::default()));
    let strategy = stratalloc::registry::build(
        &Config::default(),
        std::sync::Arc::clone(&sim) as _,
        Default::default(),
    )
    .unwrap();
    let run = stratalloc_recording::run(&workload, &strategy, Some(sim), 2, &Silent).unwrap();
    assert_eq!(run.ooms, 0);
    assert!(run.allocations > 2000);
}
