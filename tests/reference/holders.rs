//! Processes that hold the device's memory. The report names the largest, and reads the list of
//! processes only if the device itself is full.

use stratalloc::driver::ProcessUsage;
use stratalloc::registry::build;

use crate::common::crowded::crowded;
use crate::common::prelude::*;

fn usage(process: u32, mib: u64) -> ProcessUsage {
    ProcessUsage { process, used_bytes: mib * MIB }
}

/// Makes a request of 40 MiB fail on a device of 100 MiB, of which other processes hold 70. Returns the
/// reports, each with the number of times that the process list was read.
fn reports_with(
    list: &DriverResult<Vec<ProcessUsage>>,
    limit_bytes: Option<u64>,
) -> [(OutOfMemory, usize); 2] {
    ["backend:native", "backend:cudaMallocAsync"].map(|conf| {
        let sim = Sim::with_bytes(100 * MIB);
        sim.allocate(70 * MIB).expect("it fits");
        let crowded = crowded(sim, list.clone());
        let strategy = build(&config(conf), crowded.clone(), BuildOptions::default());
        let strategy = strategy.expect("a legal string");
        strategy.caching().set_limit_bytes(limit_bytes);
        (strategy.fail(40 * MIB, HOME), crowded.interceptor().queries())
    })
}

#[test]
fn the_report_names_the_largest_holders_and_blames_the_largest_other() {
    let own = std::process::id();
    let list = vec![usage(7, 3), usage(own, 60), usage(9, 70), usage(8, 0), usage(6, 3)];
    for (report, queries) in reports_with(&Ok(list), None) {
        let rows: Vec<_> = report.holders.iter().map(|h| (h.process, h.used_bytes / MIB)).collect();
        assert_eq!(
            rows,
            [(9, 70), (own, 60), (6, 3), (7, 3)],
            "the largest first, none without bytes"
        );
        assert_eq!(queries, 1);
        let text = report.to_string();
        for words in [
            "Process 9 holds 70.00 MiB of the device.".to_owned(),
            format!("Process {own} (this one) holds 60.00 MiB of the device."),
            "held by others: process 9 has the largest share, 70.00 MiB.".to_owned(),
        ] {
            assert!(text.contains(&words), "no {words:?} in:\n{text}");
        }
    }
}

#[test]
fn a_crowd_does_not_make_the_report_long() {
    let list = (1..=1000).map(|n| usage(u32::MAX - n, u64::from(n))).collect();
    for (report, _) in reports_with(&Ok(list), None) {
        assert_eq!(report.holders.len(), 5);
        assert_eq!(report.holders[0].used_bytes, 1000 * MIB);
    }
}

// In a container the list may contain this process under the host's process id. So the largest process in
// the list may be this one, and the report blames none.
#[test]
fn no_process_is_named_when_this_one_is_not_on_the_list() {
    for (report, _) in reports_with(&Ok(vec![usage(u32::MAX, 70)]), None) {
        assert_eq!(report.holders.len(), 1);
        assert!(report.to_string().contains("held by others: look for other processes on it."));
    }
}

#[test]
fn process_ids_of_another_namespace_are_not_taken_for_local_ones() {
    for (process, is_foreign) in [(u32::MAX, true), (std::process::id(), false)] {
        let crowded = crowded(Sim::with_bytes(100 * MIB), Ok(vec![usage(process, 70)]));
        let strategy = build(&config("backend:native"), crowded, BuildOptions::default());
        let strategy = strategy.expect("a legal string");
        let report = strategy.fail(140 * MIB, HOME).to_string();
        assert!(!report.contains("pid namespace"), "this process holds no memory: {report}");
        let _held = strategy.take(70 * MIB);
        let report = strategy.fail(40 * MIB, HOME).to_string();
        assert_eq!(report.contains("they may be of another pid namespace"), is_foreign, "{report}");
    }
}

#[test]
fn a_list_that_fails_costs_nothing_but_its_lines() {
    let error = DriverError::new(DriverErrorKind::Other, "list", 999, "made to fail");
    for (report, queries) in reports_with(&Err(error), None) {
        assert_eq!((report.holders.len(), queries), (0, 1));
        assert!(report.driver.is_some());
        assert!(report.to_string().contains("look for other processes on it."));
    }
}

#[test]
fn processes_are_not_listed_when_only_the_limit_refused() {
    for (report, queries) in reports_with(&Ok(vec![usage(9, 70)]), Some(20 * MIB)) {
        assert_eq!((report.holders.len(), queries), (0, 0));
        let text = report.to_string();
        assert!(!text.contains("Process") && !text.contains("held by others"), "{text}");
    }
}
