//! The layers `limit`, `statistics`, `track`, `log`, `fault` and `oom_retry`.

use stratalloc::config::FaultSetting;
use stratalloc::history::LiveReport;
use stratalloc::layers::{fault, limit, log, oom_retry, statistics, track};

use super::fixture::{DEFAULT, Two, allocated, built, native, sim};
use crate::common::prelude::*;

fn is_oom<T>(result: Result<T, AllocError>) -> bool {
    matches!(result, Err(AllocError::OutOfMemory(_)))
}

#[test]
fn a_limit_refuses_with_its_numbers_and_lets_go_with_each_free() {
    let two = Two::new(u64::MAX);
    let limited = limit::limit(Arc::clone(&two), 1000);
    let first = limited.take(600);
    let report = limited.fail(401, DEFAULT);
    assert_eq!((report.limit_bytes, report.allocated_bytes), (Some(1000), 600));
    assert_eq!(two.state.lock().live.len(), 1, "the allocator below was not called");
    let second = limited.take(400);
    limited.give(first);
    assert_eq!(limited.held_bytes(), 400);
    assert!(limited.try_allocate(0, DEFAULT).is_err());
    assert!(is_oom(limited.try_allocate(u64::MAX, DEFAULT)));
    limited.give(second);
    assert_eq!(limited.held_bytes(), 0);
}

#[test]
fn what_the_allocator_below_refuses_is_not_counted() {
    let two = Two::new(100);
    let limited = limit::limit(Arc::clone(&two), 1000);
    assert!(is_oom(limited.try_allocate(101, DEFAULT)));
    assert_eq!(limited.held_bytes(), 0);
    let block = limited.take(50);
    two.state.lock().stubborn = true;
    let refused = limited.free(block).unwrap_err();
    assert_eq!(limited.held_bytes(), 50, "a block that stays is held");
    two.state.lock().stubborn = false;
    limited.free(refused.allocation).unwrap();
    assert_eq!(limited.held_bytes(), 0);
}

#[test]
fn a_request_that_panics_below_is_not_counted() {
    #[derive(Debug)]
    struct Panics;

    impl DeviceAllocator for Panics {
        fn allocate(&self, _: Request) -> Result<Allocation, AllocError> {
            panic!("on purpose")
        }

        fn free(&self, _: Allocation) -> Result<(), FreeError> {
            Ok(())
        }
    }

    let limited = limit::limit(Panics, 1000);
    let request = || limited.try_allocate(600, DEFAULT);
    for _ in 0..2 {
        assert!(catch_unwind(AssertUnwindSafe(request)).is_err(), "the limit did not refuse it");
        assert_eq!(limited.held_bytes(), 0);
    }
}

#[test]
fn a_handle_of_another_allocator_at_the_same_address_changes_no_count() {
    let (ours, theirs) = (Two::new(1000), Two::new(1000));
    let limited = limit::limit(Arc::clone(&ours), 1000);
    let counted = statistics::statistics(limited);
    let block = counted.take(10);
    let foreign = theirs.take(10);
    assert_eq!(block.address(), foreign.address());
    let refused = counted.free(foreign).unwrap_err();
    assert!(matches!(refused.reason, HandleError::Foreign { .. }));
    assert_eq!(refused.allocation.size_bytes(), 10);
    assert_eq!(allocated(&counted), 1);
    counted.give(block);
    assert_eq!(allocated(&counted), 0);
    theirs.free(refused.allocation).unwrap();
}

#[test]
fn blocks_are_counted_by_whichever_call_they_come_and_go() {
    let counted = statistics::statistics(limit::limit(native(&sim(), true), 10_000));
    let raw = &counted;
    let first = counted.try_allocate(700, DEFAULT).map(|b| b.address()).unwrap();
    let typed = counted.take(600);
    assert_eq!((counted.statistics().memory_allocated(), allocated(&counted)), (1300, 2));
    raw.free_raw(typed.address()).unwrap();
    raw.free_raw(first).unwrap();
    assert!(raw.free_raw(first).is_err());
    assert!(counted.free(typed).is_err(), "it was freed by its address");
    assert_eq!(allocated(&counted), 0);

    let at = counted.allocate(Request::new(512, DEFAULT).at(first + 1024)).unwrap();
    let pool = counted.pool();
    let inside = counted.take_in(pool.id(), 100, DEFAULT);
    assert_eq!((counted.statistics().memory_allocated(), allocated(&counted)), (612, 2));
    let checkpoint = counted.checkpoints().checkpoint(pool.id()).unwrap();
    let later = counted.take_in(pool.id(), 200, StreamId(1));
    assert_eq!(allocated(&counted), 3);
    let mut restored = counted.checkpoints().restore(&checkpoint).unwrap();
    assert_eq!((counted.statistics().memory_allocated(), allocated(&counted)), (612, 2));
    assert!(counted.free(later).is_err() && counted.free(inside).is_err(), "both are stale");
    assert_eq!(allocated(&counted), 2);
    counted.free(restored.live.pop().unwrap()).unwrap();
    counted.give(at);
    let end = counted.statistics();
    assert_eq!((end.memory_allocated(), end.allocation.all.freed), (0, 6));
}

#[test]
fn an_allocator_of_two_methods_gets_counters() {
    let two = Two::new(3 << 20);
    assert!(two.control().counters.is_none());
    let counted = statistics::statistics(Arc::clone(&two));
    let (small, large) = (counted.take(5), counted.take(2 << 20));
    assert!(is_oom(counted.try_allocate(2 << 20, DEFAULT)));
    counted.give(large);
    let counters = counted.counters();
    let stats = counters.statistics();
    assert_eq!(
        (stats.allocation.all.current, stats.allocation.all.peak, stats.num_ooms),
        (1, 2, 1)
    );
    assert_eq!((stats.allocated_bytes.small.current, stats.allocated_bytes.large.current), (5, 0));
    assert_eq!(stats.max_memory_allocated(), 5 + (2 << 20));
    counters.reset_peaks();
    counters.reset_accumulated();
    let stats = counters.statistics();
    assert_eq!((stats.max_memory_allocated(), stats.num_ooms), (5, 0));
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (0, 0));
    counted.give(small);
}

#[inline(never)]
fn the_place_that_forgets(allocator: &dyn DeviceAllocator, bytes: u64) -> u64 {
    allocator.allocate(Request::new(bytes, StreamId(5))).expect("there is memory").address()
}

#[test]
fn a_leak_is_reported_at_the_end_with_the_requesting_code() {
    let stats: Arc<Mutex<Vec<LiveReport>>> = Arc::default();
    let sink = Arc::clone(&stats);
    let report = move |report: &LiveReport| sink.lock().push(report.clone());
    let tracked = track::track_to(Two::new(1000), Box::new(report));
    let kept = tracked.take(10);
    for _ in 0..2 {
        the_place_that_forgets(&tracked, 77);
    }
    let history = Arc::clone(tracked.recording().history());
    let live = history.live();
    assert_eq!((live.bytes, live.blocks, live.holders.len()), (164, 3, 2));
    assert_eq!(live.holders[0].blocks, 2, "one place is one line");
    tracked.give(kept);
    drop(tracked);
    assert!(stats.lock().is_empty(), "the history is still referenced");
    drop(history);
    let stats = stats.lock().pop().expect("there was a leak");
    assert_eq!((stats.bytes, stats.blocks, stats.holders.len()), (154, 2, 1));
    assert!(stats.holders[0].frames[0].contains("the_place_that_forgets"), "{stats}");
    assert!(stats.to_string().starts_with("154 bytes in 2 blocks\n  154 bytes in 2 blocks, up to"));

    let silent = track::track_to(Two::new(10), Box::new(|_| panic!("nothing is leaked")));
    silent.give(silent.take(1));
}

/// The environment variable that is set in the process that leaks.
const LEAKS: &str = "STRATALLOC_TEST_LEAKS";

#[inline(never)]
fn the_place_that_forgets_a_buffer(handle: &Handle) {
    std::mem::forget(handle.zeroed::<u8>(12_345, DEFAULT).expect("there is memory"));
}

/// A leaked buffer keeps its allocator alive, so the allocator is not dropped before the process ends.
#[test]
fn a_leaked_buffer_is_reported_when_the_process_ends() {
    if std::env::var_os(LEAKS).is_some() {
        let config = config("layers:[track]");
        let handle = Handle::build(&config, sim()).unwrap();
        the_place_that_forgets_a_buffer(&handle);
        drop(handle.zeroed::<u8>(54_321, DEFAULT).unwrap());
        return;
    }
    let own_name = std::thread::current().name().expect("tests have names").to_owned();
    let output = Command::new(std::env::current_exe().expect("tests are programs"))
        .args(["--exact", &own_name, "--nocapture"])
        .env(LEAKS, "1")
        .output()
        .expect("this program can be started again");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr.matches("never freed: 12.06 KiB in 1 block\n").count(), 1, "{stderr}");
    // If there are only line tables, the name of an inlined function has no module path.
    let stderr = stderr.replace("main::layers::watched::", "");
    assert!(stderr.contains("old: the_place_that_forgets_a_buffer"), "{stderr}");
    assert!(!stderr.contains("stratalloc::"), "frames of the library are cut off: {stderr}");
}

#[test]
fn a_log_has_a_row_for_every_attempt_and_every_free() {
    let folder = Folder::new("rows");
    let path = folder.0.join("rows.csv");
    let logged = log::log(Two::new(100), &path).unwrap();
    let block = logged.take_on(60, StreamId(255));
    assert!(is_oom(logged.try_allocate(61, StreamId(2))));
    let address = block.address();
    logged.give(block);
    logged.flush().unwrap();
    assert_eq!(logged.error(), None);
    let text = std::fs::read_to_string(&path).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows[0], ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]);
    let pointer = format!("{address:#x}");
    assert_eq!(rows[1][2..], ["allocate", &pointer, "60", "0xff"]);
    assert_eq!(rows[2][2..], ["allocate failure", "0x0", "61", "0x2"]);
    assert_eq!(rows[3][2..], ["free", &pointer, "60", "0xff"]);
    assert_eq!(rows.len(), 4);
    assert!(rows[1..].iter().all(|row| row[1].len() == 15 && row[0] == rows[1][0]), "{text}");
}

#[test]
fn a_log_of_many_threads_is_read_back_as_what_they_did() {
    use stratalloc_recording::{self as replay, Limits, Workload, reader};

    const THREADS: u64 = 4;
    const STEPS: u64 = 500;
    let folder = Folder::new("threads");
    let path = folder.0.join("threads.csv");
    let logged = log::log(native(&sim(), false), &path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let logged = &logged;
            scope.spawn(move || {
                for step in 1..=STEPS {
                    logged.give(logged.take_on(step * 7, StreamId(thread % 2)));
                }
            });
        }
    });
    let left = logged.take(9);
    drop(logged);
    let trace = reader::read(&path, &Limits::default()).unwrap();
    let workload = Workload::of(&trace, 1 << 40);
    assert_eq!(u64::from(workload.blocks), THREADS * STEPS + 1);
    assert_eq!(workload.seeded, 0);
    let again = Strategy::Native(Box::new(native(&sim(), false)));
    let run = replay::run(&workload, &again, None, 1, &stratalloc_recording::Silent).unwrap();
    assert_eq!((run.allocations, run.frees), (THREADS * STEPS + 1, THREADS * STEPS));
    assert!(left.size_bytes() == 9);
}

#[test]
fn a_log_that_cannot_be_written_is_refused_when_it_is_built() {
    use stratalloc::registry::BuildError;

    let text = "layers:[log:\"/nowhere at all/x.csv\"]";
    let config = config(text);
    let refused = registry::build(&config, sim(), BuildOptions::default()).unwrap_err();
    assert!(matches!(refused, BuildError::Layer(_)));
    assert!(refused.to_string().contains("/nowhere at all/x.csv"), "{refused}");
}

#[test]
fn a_full_disk_refuses_the_log_when_it_is_made() {
    let full = std::path::Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: no /dev/full");
        return;
    }
    let refused = log::log(Two::new(10), full).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
}

#[test]
fn chosen_requests_fail_and_never_reach_the_allocator_below() {
    let two = Two::new(u64::MAX);
    let when = FaultSetting { call: Some(2), above_bytes: Some(100), ..FaultSetting::default() };
    let faulty = fault::fault(Arc::clone(&two), when);
    let outcomes: Vec<bool> =
        [10, 10, 10, 101].map(|bytes| is_oom(faulty.try_allocate(bytes, DEFAULT))).into();
    assert_eq!(outcomes, [false, true, false, true]);
    assert_eq!((faulty.injected(), two.live_bytes()), (2, 20));

    let chances = |seed| {
        let when = FaultSetting { probability: 0.3, seed, ..FaultSetting::default() };
        let faulty = fault::fault(Two::new(u64::MAX), when);
        (0..200).map(|_| is_oom(faulty.try_allocate(1, DEFAULT))).collect::<Vec<_>>()
    };
    let failed = chances(1).iter().filter(|failed| **failed).count();
    assert!((40..80).contains(&failed), "{failed}");
    assert_eq!(chances(1), chances(1));
    assert_ne!(chances(1), chances(2));
}

#[test]
fn a_callback_frees_something_and_the_request_is_made_again() {
    let two = Two::new(100);
    let spare = Arc::new(Mutex::new(Some(two.take(80))));
    let calls = Arc::new(AtomicU64::new(0));
    let callback = {
        let (two, spare, calls) = (Arc::clone(&two), Arc::clone(&spare), Arc::clone(&calls));
        move |request: Request, _: &_, attempt: u32| {
            assert!(request.bytes == 50 && attempt >= 1);
            calls.fetch_add(1, Ordering::Relaxed);
            spare.lock().take().is_some_and(|block| two.free(block).is_ok())
        }
    };
    let retrying = oom_retry::retry_with(Arc::clone(&two), 5, Arc::new(callback));
    let block = retrying.take(50);
    // When the callback is called again, it has nothing to free and returns false.
    let second = retrying.take(50);
    assert!(is_oom(retrying.try_allocate(50, DEFAULT)));
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    retrying.give(block);
    retrying.give(second);
}

#[test]
fn a_request_is_repeated_no_more_often_than_allowed_and_never_inside_a_callback() {
    let two = Two::new(10);
    let calls = Arc::new(AtomicU64::new(0));
    let (inner, counted) = (Arc::clone(&two), Arc::clone(&calls));
    let callback = move |_: Request, _: &_, _: u32| {
        counted.fetch_add(1, Ordering::Relaxed);
        // A request inside a callback must not be retried, even by an allocator that retries.
        let nested = oom_retry::retry(Arc::clone(&inner), 1000);
        assert!(is_oom(nested.try_allocate(11, DEFAULT)));
        true
    };
    let retrying = oom_retry::retry_with(Arc::clone(&two), 3, Arc::new(callback));
    assert!(is_oom(retrying.try_allocate(11, DEFAULT)));
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    assert!(matches!(retrying.try_allocate(0, DEFAULT), Err(AllocError::ZeroBytes)));
    assert_eq!(calls.load(Ordering::Relaxed), 3, "only memory is worth a retry");
}

#[test]
fn the_first_layer_of_the_list_is_asked_first() {
    // With the limit as the first layer, the request is refused before the fault layer counts it.
    let outer_limit = built("layers:[limit:100B,fault:[call:1]]", sim(), false);
    let report = outer_limit.fail(101, DEFAULT);
    assert_eq!(report.limit_bytes, Some(100));
    let outer_fault = built("layers:[fault:[call:1],limit:100B]", sim(), false);
    let report = outer_fault.fail(101, DEFAULT);
    assert_eq!(report.limit_bytes, None);
    assert!(outer_fault.try_allocate(100, DEFAULT).is_ok());
}
