//! Recordings of programs that ran out of memory: the limit that is found, and the settings that would
//! have helped.

use super::made::{MIB, Made};
use super::*;

/// Returns a recording with 40 segments of 20 MiB, in each of which a quarter is live, and a final
/// request of 300 MiB that fails.
fn fragmented(device_free_bytes: u64) -> String {
    let mut made = Made::default();
    let segment = |at: u64| 0x7f00_0000_0000 + at * 32 * MIB;
    for at in 0..40 {
        made.segment(segment(at), 20 * MIB);
        (0..4).for_each(|piece| made.alloc(segment(at) + piece * 5 * MIB, 5 * MIB));
    }
    for at in 0..40 {
        (1..4).for_each(|piece| made.free(segment(at) + piece * 5 * MIB, 5 * MIB));
    }
    made.out_of_memory(300 * MIB, device_free_bytes);
    made.json()
}

/// Returns a recording with one live block of 100 MiB, and a final request of 500 MiB that fails.
fn one_block(device_free_bytes: u64) -> String {
    let mut made = Made::default();
    made.segment(0x7f00_0000_0000, 100 * MIB);
    made.alloc(0x7f00_0000_0000, 100 * MIB);
    made.out_of_memory(500 * MIB, device_free_bytes);
    made.json()
}

/// Returns the JSON object that a command prints. It must print exactly one.
fn printed(args: &[&str]) -> Value {
    ok(&[args, &["--json"]].concat()).json()
}

#[test]
fn a_full_device_limits_to_what_was_reserved_and_free() {
    let folder = Folder::new("full");
    for (name, content, limit_mib) in [
        ("fragmented.json", fragmented(200 * MIB), 1000),
        ("nearly.json", fragmented(290 * MIB), 1090),
        ("none.json", fragmented(MIB), 801),
        ("one.json", one_block(450 * MIB), 550),
    ] {
        let file = folder.file(name, &content);
        let limit = limit_mib * MIB;
        let json = printed(&["advise", "--quick", &file]);
        assert_eq!((&json["limit_bytes"], &json["limit_inferred"]), (&limit.into(), &true.into()));
        let from = "the device was full, from what was reserved and free at 1 request that failed";
        assert_eq!(json["limit_from"], from);
        for row in
            [printed(&["replay", &file]), printed(&["compare", &file, "--conf", "backend:native"])]
        {
            assert_eq!((&row["limit_bytes"], &row["limit_from"]), (&limit.into(), &from.into()));
            assert_eq!((&row["ooms"], &row["retries"]), (&1.into(), &1.into()), "{row}");
        }
    }
    let row = printed(&["replay", "--verify", &folder.path("one.json")]);
    assert_eq!((&row["limit_bytes"], &row["ooms"]), (&(550 * MIB).into(), &1.into()), "{row}");
    // `advise` recommends a setting with which the program would have run on the device that was full.
    let file = folder.path("fragmented.json");
    let stdout = run(&["advise", &file]).stdout;
    let runs = "Under the limit of 1,000 MiB, where 1 request failed when it was recorded, it runs";
    assert!(stdout.contains(runs), "{stdout}");
    assert!(stdout.contains("The limit is 1000.0 MiB: the device was full, "), "{stdout}");
}

#[test]
fn a_request_that_fails_with_enough_free_memory_shows_a_fraction() {
    let folder = Folder::new("fraction");
    let file = folder.file("fraction.json", &one_block(70_000 * MIB));
    let json = printed(&["advise", "--quick", &file]);
    assert_eq!(json["limit_bytes"], 100 * MIB);
    let from = "inferred from 1 request that failed; it was at least that and below 600.00 MiB";
    assert_eq!(json["limit_from"], from);
}

#[test]
fn the_memory_that_is_set_holds_over_what_a_recording_shows() {
    let folder = Folder::new("set");
    let by_device = folder.file("device.json", &fragmented(200 * MIB));
    let by_fraction = folder.file("fraction.json", &fragmented(70_000 * MIB));
    let total = ["--total-memory", "1200MiB"];
    let half = ["--total-memory", "2400MiB", "--memory-fraction", "0.5"];
    for (file, set, from) in [
        (&by_device, &total[..], "set as the memory of the device"),
        (&by_device, &half, "set as a fraction of the device"),
        (&by_fraction, &total, "set as the memory of the device"),
        (&by_fraction, &half, "set as a fraction of the device"),
    ] {
        for command in
            [&["advise", "--quick"][..], &["compare", "--conf", "backend:native"], &["replay"]]
        {
            let json = printed(&[command, &[file], set].concat());
            assert_eq!(json["limit_bytes"], 1200 * MIB, "{command:?} {set:?}");
            assert_eq!(
                (&json["limit_from"], &json["limit_inferred"]),
                (&from.into(), &false.into())
            );
        }
        let stdout = run(&[&["advise", "--quick"][..], &[file], set].concat()).stdout;
        assert!(stdout.contains(&format!("The limit is 1200.0 MiB: {from}.")), "{stdout}");
    }
    let page = folder.path("page.html");
    let args = ["report", "--quick", &by_device, "-o", &page, "--total-memory", "1200MiB"];
    ok(&args);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("The limit is 1200.0 MiB: set as the memory of the device."));
}
