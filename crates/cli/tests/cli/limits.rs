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
        let numbers = ["failures", "retries", "collections"].map(|of| &json[format!("limit_{of}")]);
        assert_eq!(numbers, [&Value::from(1), &0.into(), &0.into()]);
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
    assert!(stdout.contains("The limit is 1,000 MiB: the device was full, "), "{stdout}");
}

const EITHER: &str = "either a memory fraction is set, or the driver refused for another reason";

/// Returns the page of a report.
fn page_of(file: &str, folder: &Folder) -> String {
    let page = folder.path("page.html");
    ok(&["report", "--quick", file, "-o", &page]);
    std::fs::read_to_string(&page).expect("the page was written")
}

#[test]
fn a_request_that_fails_with_enough_free_memory_decides_on_no_limit() {
    let folder = Folder::new("undecided");
    let made = folder.file("made.json", &one_block(70_000 * MIB));
    for (file, low_mib, high_mib, refused) in [
        (case("oom_with_free_memory"), 824, 844, "2,406 MiB free when 20 MiB were refused"),
        (made, 100, 600, "70,000 MiB free when 500 MiB were refused"),
    ] {
        let json = printed(&["advise", "--quick", &file]);
        let bounds = (&json["limit_bytes"], &json["limit_below_bytes"]);
        assert_eq!(bounds, (&(low_mib * MIB).into(), &(high_mib * MIB).into()));
        assert_eq!(json["limit_certainty"], "possible");
        let reported = format!("the device reported {refused}");
        for command in ["advise --quick", "replay", "compare --conf backend:native --json"] {
            let args: Vec<&str> = command.split(' ').chain([file.as_str()]).collect();
            let printed = ok(&args).stdout;
            assert!(printed.contains(&reported) && printed.contains(EITHER), "{printed}");
            for wrong in ["exceed the limit", "the limit is ", "The limit is ", "Largest holder"] {
                assert!(!printed.contains(wrong), "{command} has {wrong:?}: {printed}");
            }
        }
        let page = page_of(&file, &folder);
        assert!(page.contains(&reported) && page.contains(EITHER));
        assert!(page.contains(r#""limit":null"#) && !page.contains("exceed the limit"));
    }
}

#[test]
fn a_request_that_needed_less_than_was_reserved_later_was_refused_by_the_driver() {
    let folder = Folder::new("contradiction");
    let mut made = Made::default();
    made.segment(0x7f00_0000_0000, 100 * MIB);
    made.alloc(0x7f00_0000_0000, 100 * MIB);
    made.out_of_memory(20 * MIB, 2000 * MIB);
    made.segment(0x7f10_0000_0000, 300 * MIB);
    made.alloc(0x7f10_0000_0000, 300 * MIB);
    let file = folder.file("refused.json", &made.json());
    let json = printed(&["advise", "--quick", &file]);
    assert_eq!((&json["limit_bytes"], &json["limit_from"]), (&Value::Null, &Value::Null));
    let stdout = run(&["advise", "--quick", &file]).stdout;
    let why = "No memory fraction explains that the device reported 2,000 MiB free when 20 MiB were refused";
    assert!(stdout.contains(why), "{stdout}");
}

/// Returns a recording of a program under a limit of 1100 MiB: a live block of 1000 MiB, and requests that
/// each replace a segment of another size, as many as `more_mib` has entries. `finish` adds to it.
fn replaced(more_mib: &[u64], lines: bool, finish: impl Fn(&mut Made)) -> String {
    let mut made = Made::default();
    made.segment(0x7f00_0000_0000, 1000 * MIB);
    made.alloc(0x7f00_0000_0000, 1000 * MIB);
    let mut before = (0x7f10_0000_0000, 60);
    made.segment(before.0, 60 * MIB);
    made.alloc(before.0, 60 * MIB);
    for (line, mib) in (1..).zip(more_mib) {
        let mark = |made: &mut Made| {
            if lines {
                made.at_line(line)
            }
        };
        let next = before.0 + 0x10_0000_0000;
        made.free(before.0, before.1 * MIB);
        made.release(before.0);
        mark(&mut made);
        made.segment(next, mib * MIB);
        mark(&mut made);
        made.alloc(next, mib * MIB);
        mark(&mut made);
        before = (next, *mib);
    }
    finish(&mut made);
    made.json()
}

#[test]
fn retries_without_a_failure_show_a_probable_limit() {
    let folder = Folder::new("retries");
    let found = |content: &str| {
        let file = folder.file("retried.json", content);
        let json = printed(&["replay", &file]);
        assert_eq!(json["first_mismatch"], Value::Null, "{json}");
        let mib = |field: &str| json[field].as_u64().map(|bytes| bytes / MIB);
        let (calls, retries) = (&json["empty_caches_inferred"], &json["retries"]);
        let counts = (calls.as_u64().unwrap(), retries.as_u64().unwrap());
        let certainty = json["limit_certainty"].as_str().map(str::to_owned);
        (mib("limit_bytes"), mib("limit_below_bytes"), counts, certainty)
    };
    let nothing = |_: &mut Made| {};
    let probable = Some("probable".to_owned());
    let twice = found(&replaced(&[80, 90], false, nothing));
    assert_eq!(twice, (Some(1090), Some(1140), (0, 2), probable.clone()));
    // One may be a call of `empty_cache`, unless the stacks prove that the request released the memory.
    assert_eq!(found(&replaced(&[80], false, nothing)), (None, None, (1, 0), None));
    let proved = found(&replaced(&[80], true, nothing));
    assert_eq!(proved, (Some(1080), Some(1140), (0, 1), probable));
    // Requests that the released memory could have served were not refused.
    let served = found(&replaced(&[60, 60], false, nothing));
    assert_eq!((served.0, served.1, served.3), (None, None, None));
    // A failure later decides, although the device had enough free memory.
    let failed = found(&replaced(&[80, 90], false, |made| {
        made.out_of_memory(120 * MIB, 9000 * MIB);
    }));
    assert_eq!((failed.0, failed.3.as_deref()), (Some(1090), Some("inferred")));
    let file = folder.file("advised.json", &replaced(&[80, 90], false, nothing));
    let stdout = run(&["advise", "--quick", &file]).stdout;
    let sentence = "The limit is probably between 1,090 and 1,140 MiB, inferred from 2 retries, unless the \
                    program itself called empty_cache at these moments.";
    assert!(stdout.contains(sentence), "{stdout}");
    let stdout = run(&["replay", &file]).stdout;
    let line = "limit: between 1,090 and 1,140 MiB, probable, from 2 retries";
    assert!(stdout.contains(line), "{stdout}");
    let page = page_of(&file, &folder);
    assert!(page.contains(&format!(r#""below_bytes":{}"#, 1140 * MIB)) && page.contains(sentence));
    // A limit that the user sets is the only one.
    let set = printed(&["replay", &file, "--total-memory", "8GiB"]);
    assert_eq!((&set["retries"], &set["limit_below_bytes"]), (&0.into(), &Value::Null));
}

#[test]
fn a_request_larger_than_the_limit_is_named_first() {
    let folder = Folder::new("larger");
    let sentence = |args: &[&str]| -> String {
        let json = printed(&[&["advise", "--quick"], args].concat());
        json["sentence"].as_str().unwrap().to_owned()
    };
    let start = "No setting can help: ";
    let large = case("request_larger_than_limit");
    let alone = format!(
        "{start}the failed request alone (51,200 MiB, attention.py:201 forward < run.py:20 main) is larger than \
         the limit (24,576 MiB)."
    );
    assert_eq!(sentence(&[&large]), alone);
    assert!(
        page_of(&large, &folder).contains("the failed request alone (51,200 MiB, attention.py:201")
    );
    let file = folder.file("one.json", &one_block(300 * MIB));
    let alone =
        format!("{start}the failed request alone (500 MiB) is larger than the limit (400 MiB).");
    assert_eq!(sentence(&[&file]), alone);
    // A limit that the user sets, and a request that did not fail when it was recorded.
    let mut made = Made::default();
    made.segment(0x7f00_0000_0000, 100 * MIB);
    made.alloc(0x7f00_0000_0000, 100 * MIB);
    let fits = folder.file("fits.json", &made.json());
    let alone = format!("{start}one request alone (100 MiB) is larger than the limit (60 MiB).");
    assert_eq!(sentence(&[&fits, "--total-memory", "60MiB"]), alone);
    // The request fits alone, but takes more than any other code.
    let file = folder.file("one.json", &one_block(450 * MIB));
    let both = format!(
        "{start}the live bytes alone (600 MiB, with the request that failed) exceed the limit (550 MiB) by 50 MiB. \
         The failed request takes the most: 500 MiB. Largest holder: 100 MiB in 1 block of 104,857,600 bytes."
    );
    assert_eq!(sentence(&[&file]), both);
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
        assert!(stdout.contains(&format!("The limit is 1,200 MiB: {from}.")), "{stdout}");
    }
    let page = folder.path("page.html");
    let args = ["report", "--quick", &by_device, "-o", &page, "--total-memory", "1200MiB"];
    ok(&args);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("The limit is 1,200 MiB: set as the memory of the device."));
}
