//! What happens after a failed request: a snapshot is written, and settings are found with which it
//! would have succeeded.

use stratalloc_recording::{Limits, reader};

use super::{build_over, sim};
use crate::common::prelude::*;

/// Returns an allocator on a device of 64 MiB after a free of 40 MiB and an allocation of 12 MiB. The native
/// strategy has allocated the 12 MiB in the segment of 40, so it has no room for 50.
fn fragmented(conf: &str) -> impl DeviceAllocator {
    let allocator = build_over(conf, sim(64 * MIB));
    allocator.free(allocator.take(40 * MIB)).expect("it is live");
    let _ = allocator.take(12 * MIB);
    allocator
}

#[test]
fn a_snapshot_is_written_a_few_times_and_read_again() {
    let folder = tempfile("few");
    for backend in ["native", "cudaMallocAsync", "cpu", "pinned"] {
        let folder = folder.join(backend);
        fs::create_dir(&folder).expect("the folder can be written");
        let path = folder.join("oom %d %p.pickle");
        let conf = format!(
            "backend:{backend},record_history:100,layers:[limit:50MiB],snapshot_on_oom:\"{}\"",
            path.display()
        );
        let allocator = fragmented(&conf);
        let written: Vec<PathBuf> = (0..6)
            .filter_map(|_| allocator.fail(45 * MIB, HOME).snapshot)
            .map(|saved| saved.expect("the folder is there"))
            .collect();
        let process = std::process::id();
        let name = |middle: &str| folder.join(format!("oom 0 {process}{middle}.pickle"));
        assert_eq!(written, [name(""), name(".2"), name(".3"), name(".4")], "{backend}");
        for path in &written {
            let trace = reader::read(path, &Limits::default()).expect("it was just written");
            assert!(trace.events.iter().any(|e| e.size_bytes == 12 * MIB), "{backend}");
            assert!(!trace.conf.contains("snapshot_on_oom"), "{}", trace.conf);
        }
    }
    fs::remove_dir_all(folder).expect("it is ours");
}

#[test]
fn a_snapshot_of_an_earlier_run_stays() {
    let folder = tempfile("restarted");
    let path = folder.join("restarted %h.pickle");
    let conf = format!("snapshot_on_oom:\"{}\"", path.display());
    let snapshot = || fragmented(&conf).fail(50 * MIB, HOME).snapshot.expect("it is enabled");
    let first = snapshot().expect("the folder is there");
    let content = fs::read(&first).expect("it was just written");
    // The process was killed while it wrote, and runs again under the same id.
    let left = folder.join(format!(".restarted.pickle.{}.0", std::process::id()));
    fs::write(&left, "left").expect("the folder can be written");
    let second = snapshot().expect("the folder is there");
    assert!(first != second && second.to_string_lossy().ends_with(".2.pickle"), "{second:?}");
    assert_eq!(fs::read(&first).expect("it stays"), content);
    assert_eq!(fs::read(&left).expect("it stays"), b"left");
    fs::remove_dir_all(folder).expect("it is ours");
}

#[test]
fn a_snapshot_that_cannot_be_written_is_reported_and_the_request_fails_as_usual() {
    let allocator = fragmented("snapshot_on_oom:\"/nowhere/run.pickle\"");
    let report = allocator.fail(50 * MIB, HOME);
    let why = report.snapshot.clone().expect("it is enabled").expect_err("no such folder");
    assert!(why.starts_with("/nowhere/run.pickle: "), "{why}");
    assert!(report.to_string().contains("Snapshot: not written: /nowhere/run.pickle"), "{report}");
}

#[test]
fn settings_that_would_have_served_the_program_are_named() {
    stratalloc_analysis::advise_on_oom::<stratalloc_recording::Silent>();
    let allocator = fragmented("record_history:1000,advise_on_oom:True");
    let report = allocator.fail(50 * MIB, HOME);
    let hint = "max_split_size_mb:32 would have served the 1 request that failed (replayed)";
    assert!(report.hints.iter().any(|line| line == hint), "{:#?}", report.hints);
    let allocator = fragmented("advise_on_oom:True");
    let report = allocator.fail(50 * MIB, HOME);
    assert!(
        report.hints.iter().any(|line| line.contains("nothing is recorded")),
        "{:#?}",
        report.hints
    );
    let allocator = fragmented("record_history:1000,advise_on_oom:True,max_split_size_mb:32");
    let report = allocator.fail(60 * MIB, HOME);
    assert!(
        report.hints.iter().any(|line| line.contains("no setting that was tried")),
        "{:#?}",
        report.hints
    );
}

fn tempfile(name: &str) -> PathBuf {
    let name = format!("oom-{name}-{}", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("the folder of tests can be written");
    folder
}
