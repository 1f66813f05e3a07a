//! Runs every stored input of the fuzz targets through the functions that the targets call.
//!
//! `fuzz/README.md` describes how inputs are found. An input that once caused a failure is stored
//! permanently.

#[path = "fuzz_checks/mod.rs"]
mod checks;

use checks::CHECKS;

use crate::common::prelude::*;

/// The maximum processor time for one input, long enough for a build without optimization.
const CPU_TIME_MAX: Duration = Duration::from_secs(10);
const FILE_MAX_BYTES: u64 = 4096;
const FILES_MAX: usize = 200;
const ALL_MAX_BYTES: u64 = 300 * 1024;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz_corpus")
}

fn inputs(target: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder().join(target)).expect("every target has a folder");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    paths.sort();
    paths
}

/// Returns the processor time of the calling thread, or zero if the system does not count it. Unlike
/// wall time, it does not grow while other processes run.
fn cpu_time() -> Duration {
    let counted = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let first = |text: String| text.split(' ').next()?.parse().ok();
    Duration::from_nanos(counted.and_then(first).unwrap_or(0))
}

fn replay(target: &str) {
    let (_, check) = CHECKS.iter().find(|(name, _)| *name == target).expect("a target");
    let paths = inputs(target);
    assert!(!paths.is_empty(), "no inputs for {target}");
    let mut broken = Vec::new();
    for path in paths {
        let bytes = fs::read(&path).expect("it can be read");
        let begin = cpu_time();
        if std::panic::catch_unwind(|| check(&bytes)).is_err() {
            broken.push(format!("{} breaks a promise", path.display()));
        }
        let took = cpu_time().saturating_sub(begin);
        if took > CPU_TIME_MAX {
            broken.push(format!("{} takes {took:?}", path.display()));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Declares one test for each target, so that targets run in parallel and a failure shows its target.
macro_rules! replayed {
    ($($name:ident: $target:literal;)*) => {
        $(#[test]
        fn $name() {
            replay($target);
        })*

        const REPLAYED: &[&str] = &[$($target),*];
    };
}

replayed! {
    kept_configuration_strings_keep_every_promise: "config";
    kept_handles_keep_every_promise: "ipc_handle";
    kept_heads_of_libraries_keep_every_promise: "library";
    kept_logs_of_requests_keep_every_promise: "rmm_csv";
    kept_snapshots_keep_every_promise: "snapshot";
    kept_requests_for_pages_keep_every_promise: "socket_request";
}

#[test]
fn every_folder_of_inputs_has_a_check_that_is_replayed() {
    let folders: BTreeSet<String> = fs::read_dir(folder())
        .expect("the inputs are there")
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let checks: Vec<&str> = CHECKS.iter().map(|(name, _)| *name).collect();
    let (checks, replayed): (BTreeSet<String>, BTreeSet<String>) =
        (names(&checks), names(REPLAYED));
    assert_eq!(folders, checks);
    assert_eq!(replayed, checks);
}

#[test]
fn the_kept_inputs_are_few_and_small() {
    let all: Vec<PathBuf> = CHECKS.iter().flat_map(|(name, _)| inputs(name)).collect();
    assert!(all.len() <= FILES_MAX, "{} files", all.len());
    let sizes = all.iter().map(|path| fs::metadata(path).unwrap().len());
    let (mut sum, mut largest) = (0, 0);
    for size in sizes {
        sum += size;
        largest = largest.max(size);
    }
    assert!(largest <= FILE_MAX_BYTES, "{largest} bytes in one file");
    assert!(sum <= ALL_MAX_BYTES, "{sum} bytes in all");
}
