//! The scripts of the views under node: ranges, comparisons, and the files to keep.

use super::*;

/// Runs the unit tests of the scripts on a recording. Returns the number of rows that stand for several
/// blocks, and of ranges that were examined; `None` without node.
fn examined(name: &str, trace: &Trace, most: usize) -> Option<(u64, u64)> {
    let (script, scripts) = (include_str!("views.js"), page::scripts_but_last());
    let found = under_node(&format!("views_{name}"), script, scripts, trace, most)?;
    Some((found["runs"].as_u64().unwrap(), found["ranges"].as_u64().unwrap()))
}

#[test]
fn ranges_and_comparisons_add_up_for_recordings_of_every_size() {
    let traces = [
        ("serve", shipped("serve.default"), 4_000_000, false),
        ("gcfrac", shipped("2.15.0.gcfrac"), 4_000_000, false),
        ("many", many(3000), 4_000_000, false),
        ("many_short", many(30_000), 60_000, true),
    ];
    for (name, trace, most, has_runs) in traces {
        let Some((runs, ranges)) = examined(name, &trace, most) else { return };
        assert_eq!(runs > 0, has_runs, "{name}: {runs}");
        assert!(ranges > 10, "{name}: {ranges}");
    }
}
