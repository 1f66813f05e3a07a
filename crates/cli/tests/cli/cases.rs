//! Recordings as people have them, with the answers that they must get. The files are in `tests/cases`.

use super::made::{MIB, Made};
use super::*;

/// An answer: the arguments before the file, the exit code, and texts of which the output contains all and
/// none.
struct Answer {
    args: &'static str,
    code: i32,
    has: &'static [&'static str],
    lacks: &'static [&'static str],
}

impl Answer {
    #[track_caller]
    fn check(&self, file: &str) {
        let args: Vec<&str> = self.args.split_whitespace().chain([file]).collect();
        let Ended { code, stdout, stderr } = run(&args);
        let output = stdout + &stderr;
        assert_eq!(code, Some(self.code), "{args:?}: {output}");
        for text in self.has {
            assert!(output.contains(text), "{args:?} lacks {text:?}: {output}");
        }
        for text in self.lacks {
            assert!(!output.contains(text), "{args:?} has {text:?}: {output}");
        }
    }
}

/// Words of needs, settings, peaks and ages.
const UNSUPPORTED: &[&str] = &[
    "needs",
    "Set ",
    "No setting",
    "at best",
    "peak of",
    "peak MiB",
    "requests ago",
    "Yes:",
    "No:",
    "mismatches",
    "it begins late",
    "settings searched",
    "No stacks",
];
const REASON: &str = "This snapshot has no history (";
const REMEDY: &str = "_record_memory_history() before the steps";

/// The answers for a recording without history.
const NO_HISTORY: &[Answer] = &[
    Answer {
        args: "advise",
        code: 0,
        has: &[
            REASON,
            "it shows the moment of the dump, not the peak",
            REMEDY,
            "At the moment of the dump, ",
            "The largest free range then has",
        ],
        lacks: UNSUPPORTED,
    },
    Answer { args: "advise --fits 24GiB", code: 2, has: &[REASON, REMEDY], lacks: UNSUPPORTED },
    Answer {
        args: "advise --assert live_peak<=20GiB",
        code: 2,
        has: &[REASON],
        lacks: UNSUPPORTED,
    },
    Answer { args: "compare", code: 2, has: &[REASON], lacks: UNSUPPORTED },
    Answer { args: "replay", code: 0, has: &[REASON, REMEDY], lacks: UNSUPPORTED },
    Answer {
        args: "replay --verify",
        code: 2,
        has: &["nothing can be verified", REASON],
        lacks: UNSUPPORTED,
    },
    Answer { args: "sweep --quick", code: 2, has: &[REASON], lacks: &["Set ", "For all"] },
];

/// Statements about blocks from before the recording whose code is not known.
const UNKNOWN_BEFORE: &[&str] = &[
    "lived before the recording began",
    "before the program allocates",
    "before the model is built",
    "has no stacks",
];

/// Returns the answer that names the code of a dump's blocks.
const fn dumped_code(has: &'static [&'static str]) -> Answer {
    Answer { args: "advise", code: 0, has, lacks: UNKNOWN_BEFORE }
}

/// The answers for each file.
const CASES: &[(&str, &[Answer])] = &[
    ("no_history_small", NO_HISTORY),
    ("legacy_true_one_event", NO_HISTORY),
    (
        "legacy_true_one_event",
        &[dumped_code(&["768  70.6%", "model.py:37 load < train.py:12 main"])],
    ),
    ("state_only", NO_HISTORY),
    (
        "state_only",
        &[dumped_code(&[
            "320  29.4%",
            "cache.py:224 update < train.py:31 main",
            "The category of 1,088 MiB (100 %) is not known.",
        ])],
    ),
    ("torch215_true", NO_HISTORY),
    ("torch215_true", &[dumped_code(&["real.py:4 e < real.py:8 load"])]),
    ("torch215_state", NO_HISTORY),
    ("torch215_state", &[dumped_code(&["real.py:4 e < real.py:6 update"])]),
    (
        "ring_overflowed",
        &[Answer {
            args: "advise --quick",
            code: 0,
            has: &[
                "it begins late",
                "500  32.7%      10             -  adamw.py:887 step < train.py:40 main",
                "30.0   2.0%       1             0  model.py:60 forward < train.py:30 main",
            ],
            lacks: UNKNOWN_BEFORE,
        }],
    ),
    (
        "torch215_ring",
        &[
            Answer {
                args: "advise --quick",
                code: 0,
                has: &["768  53.8%       8             -  real.py:4 e < real.py:8 load"],
                lacks: UNKNOWN_BEFORE,
            },
            Answer {
                args: "advise --quick --total-memory 80GiB",
                code: 0,
                has: &["320  22.4%       8             -  real.py:4 e < real.py:6 update"],
                lacks: UNKNOWN_BEFORE,
            },
        ],
    ),
    (
        "torch215_skip",
        &[
            Answer {
                args: "advise --quick",
                code: 0,
                has: &["needs 1,428 MiB", "At the peak of live bytes"],
                lacks: &["11,288", "no history"],
            },
            Answer {
                args: "replay --verify",
                code: 0,
                has: &["76 allocations, 60 frees", "0 addresses, 0 segment events, 0 segments"],
                lacks: &["probably lacks"],
            },
            Answer { args: "advise --quick --fits 2GiB", code: 0, has: &["Yes"], lacks: &[] },
        ],
    ),
    (
        "torch215_graphs",
        &[
            Answer {
                args: "advise --quick",
                code: 0,
                has: &[
                    "33,000 MiB (83 %) are free in 11 private pools: their graphs keep them, empty_cache does not \
                     release them; one pool for all captures (pool=), the largest captured first, would need \
                     about 3,930 MiB",
                    "11 private pools  stream 0",
                ],
                lacks: &["pool 11.0", "are completely free segments"],
            },
            Answer {
                args: "advise --quick --json",
                code: 0,
                has: &["\"shared_need_bytes\":4120903680"],
                lacks: &[],
            },
        ],
    ),
];

#[test]
fn each_file_gets_its_answers() {
    for (name, answers) in CASES {
        answers.iter().for_each(|answer| answer.check(&case(name)));
    }
}

#[test]
fn the_data_for_programs_has_no_figure_that_a_recording_without_history_does_not_support() {
    let file = &case("torch215_true");
    let advice = ok(&["advise", "--json", file]).json();
    assert_eq!(advice["headline"], "no history");
    let reason = serde_json::json!({"lack": "requests", "entries": 1, "requests": 0, "missing": 0});
    assert_eq!(advice["no_history"], reason);
    assert_eq!((&advice["choice"], &advice["best"]), (&Value::Null, &Value::Null));
    assert_eq!(advice["recorded"]["needs_bytes"], Value::Null);
    assert_eq!(advice["causes"]["live_peak_bytes"], Value::Null);
    assert_eq!(advice["causes"]["reserved_bytes"], 1428 * MIB);
    assert_eq!(advice["holders"]["by_age"], serde_json::json!([]));
    assert_eq!(advice["holders"]["by_size"][0]["blocks"], 8);
    assert_eq!(advice["free_ranges"][0]["each_bytes"], 180 * MIB);
    let replayed = ok(&["replay", "--json", file]).json();
    assert_eq!(replayed["needs_bytes"], Value::Null);
    let folder = Folder::new("cases");
    let page = folder.path("page.html");
    ok(&["report", file, "-o", &page]);
    let data = &report::recordings(&std::fs::read_to_string(&page).unwrap())[0];
    assert_eq!((&data["peak_live"], &data["peak_reserved"]), (&Value::Null, &Value::Null));
    assert_eq!(data["no_history"], reason);
    assert_eq!(
        (&data["needs"]["rows"], &data["advice"]["set"]),
        (&Value::Array(vec![]), &Value::Array(vec![]))
    );
    let names: Vec<&Value> =
        data["holders"].as_array().unwrap().iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["moment of the dump"]);
    let memory = data["headline"]["memory"].as_str().unwrap();
    assert!(memory.contains("1,088 MiB are live"), "{memory}");
    assert!(data["advice"]["sentence"].as_str().unwrap().starts_with(REASON));
    assert_eq!(data["advice"]["pictures"][0]["name"], "moment of the dump");
}

#[test]
fn a_condition_that_cannot_be_judged_is_an_error_of_the_test_file() {
    let folder = Folder::new("cases-junit");
    let junit = folder.path("fits.xml");
    fails(&["advise", "--fits", "24GiB", "--junit", &junit, &case("state_only")], 2, REASON);
    let text = std::fs::read_to_string(&junit).unwrap();
    assert!(text.contains("errors=\"1\"") && text.contains("no history"), "{text}");
}

const BASE: u64 = 0x7f00_0000_0000;

/// Returns a program that holds 100 MiB and ten times allocates and frees 200 and 300 MiB.
fn steps() -> Made {
    let mut made = Made::default();
    for (at, mib) in [(0, 100), (1, 200), (2, 300)] {
        made.segment(BASE + at * 1024 * MIB, mib * MIB);
        made.alloc(BASE + at * 1024 * MIB, mib * MIB);
    }
    for step in 0..10 {
        for (at, mib) in [(1, 200), (2, 300)] {
            made.free(BASE + at * 1024 * MIB, mib * MIB);
        }
        for (at, mib) in [(1, 200), (2, 300)].into_iter().filter(|_| step < 9) {
            made.alloc(BASE + at * 1024 * MIB, mib * MIB);
        }
    }
    made
}

#[test]
fn actions_that_were_skipped_are_not_taken_as_not_having_happened() {
    let folder = Folder::new("skipped");
    let mut file = 0;
    let mut written = |made: &Made| {
        file += 1;
        folder.file(&format!("{file}.json"), &made.json())
    };
    let needs =
        Answer { args: "advise --quick", code: 0, has: &["needs 600 MiB"], lacks: &["no history"] };
    for skipped in ["none", "free_requested", "free_completed"] {
        let mut made = steps();
        made.skip(skipped);
        let path = written(&made);
        needs.check(&path);
        let row = run(&["replay", "--verify", "--json", &path]).json();
        let found = (&row["address_mismatches"], &row["segment_mismatches"]);
        assert_eq!(found, (&0.into(), &0.into()), "{skipped}: {row}");
        // The layout of such a file lacks the requested sizes of free blocks.
        let lacks = row["probably_lacks"].as_str().unwrap();
        assert_eq!(lacks.contains("skip_actions"), skipped != "none", "{lacks}");
    }
    for (skipped, why) in [
        (["free_requested", "free_completed"], "no free was recorded"),
        (["alloc", "snapshot"], "no such entry was recorded"),
        (["alloc", "free_requested"], "no such entry was recorded"),
    ] {
        let mut made = steps();
        skipped.iter().for_each(|action| made.skip(action));
        let path = written(&made);
        fails(&["advise", "--fits", "24GiB", &path], 2, REASON);
        let advice = ok(&["advise", &path]);
        assert!(advice.stdout.contains(REASON), "{skipped:?}: {}", advice.stdout);
        assert!(advice.stdout.contains(why), "{skipped:?}: {}", advice.stdout);
        assert!(advice.stdout.contains("Record again without skip_actions"), "{}", advice.stdout);
        for text in UNSUPPORTED {
            assert!(!advice.stdout.contains(text), "{skipped:?} {text}: {}", advice.stdout);
        }
        fails(&["replay", "--verify", &path], 2, "nothing can be verified");
        fails(&["compare", &path], 2, why);
    }
}

#[test]
fn without_entries_of_segments_needs_are_right_and_reserved_bytes_are_unknown() {
    let folder = Folder::new("skipped-segments");
    let mut made = steps();
    made.release(BASE + 1024 * MIB);
    made.out_of_memory(900 * MIB, 7 * MIB);
    let whole = ok(&["advise", "--quick", &folder.file("whole.json", &made.json())]);
    assert!(whole.stdout.contains("The limit is 407 MiB"), "{}", whole.stdout);
    made.skip("segment_alloc");
    made.skip("segment_free");
    let cut = ok(&["advise", "--quick", &folder.file("cut.json", &made.json())]);
    assert!(cut.stderr.contains("10 requests lie in no recorded segment"), "{}", cut.stderr);
    assert!(cut.stdout.contains("needs 1,000 MiB"), "{}", cut.stdout);
    assert!(!cut.stdout.contains("The limit is"), "{}", cut.stdout);
}

#[test]
fn one_request_is_a_history_only_from_the_start_of_the_program_on() {
    let folder = Folder::new("ring");
    let mut from_start = Made::default();
    from_start.segment(BASE, 20 * MIB);
    from_start.alloc(BASE, 3 * MIB);
    let path = folder.file("start.json", &from_start.json());
    let advice = ok(&["advise", "--quick", &path]).stdout;
    assert!(advice.contains("needs 20 MiB"), "{advice}");

    let late = |make: &dyn Fn(&mut Made)| {
        let mut made = steps();
        made.forget_entries();
        make(&mut made);
        made.json()
    };
    let second = BASE + 1024 * MIB;
    let files = [
        (
            "ring of two",
            late(&|made| {
                made.alloc(second, 200 * MIB);
                made.annotate(second, 200 * MIB, "a text");
            }),
            "1 of its 2 entries is a request",
        ),
        ("remarks", late(&|made| made.annotate(BASE, 100 * MIB, "a text")), "a ring of one entry"),
        (
            "segments",
            late(&|made| made.segment(BASE + 4096 * MIB, 20 * MIB)),
            "a ring of one entry",
        ),
        ("frees", late(&|made| made.free(BASE, 100 * MIB)), "none of its 2 entries is a request"),
        ("failure", late(&|made| made.out_of_memory(900 * MIB, 7 * MIB)), "a ring of one entry"),
    ];
    for (name, text, reason) in files {
        let path = folder.file(&format!("{name}.json"), &text);
        fails(&["advise", "--fits", "24GiB", &path], 2, reason);
        let advice = ok(&["advise", &path]).stdout;
        assert!(advice.contains(reason), "{name}: {advice}");
        let failed = advice.contains("A request of 900 MiB failed before the dump.");
        assert_eq!(failed, name == "failure", "{advice}");
    }
    // Two requests are a history that begins late.
    let text = late(&|made| {
        made.alloc(second, 200 * MIB);
        made.free(second, 200 * MIB);
        made.alloc(second, 200 * MIB);
    });
    let advice = ok(&["advise", "--quick", &folder.file("late.json", &text)]);
    assert!(advice.stdout.contains("needs 300 MiB"), "{}", advice.stdout);
    assert!(advice.stderr.contains("it begins late"), "{}", advice.stderr);
    let ages = advice.stdout.contains("before the recording began");
    assert!(ages, "blocks from before have no age: {}", advice.stdout);
}

#[test]
fn each_device_is_judged_by_its_own_entries() {
    let folder = Folder::new("devices-history");
    let one = steps().json();
    let segments = |text: &str| {
        let list = text.split_once("\"segments\":[").unwrap().1;
        list.split_once("],\"device_traces\"").unwrap().0.to_owned()
    };
    let other = segments(&one).replace("\"device\":0", "\"device\":1");
    let both = one.replacen("\"segments\":[", &format!("\"segments\":[{other},"), 1);
    let both = both.replacen("]],\"allocator_settings\"", "],[]],\"allocator_settings\"", 1);
    let path = folder.file("two.json", &both);
    let advice = ok(&["advise", "--quick", &path]).stdout;
    assert!(advice.contains("needs 600 MiB"), "{advice}");
    let advice = ok(&["advise", "--recorded-device", "1", &path]).stdout;
    let reason = "has no history of this device (0 events, and 64 of another): it shows the moment of the dump";
    assert!(advice.contains(reason) && !advice.contains("needs"), "{advice}");
}

#[test]
fn a_list_of_segments_has_no_history() {
    let folder = Folder::new("list-of-segments");
    let text = report::without_history();
    let list = text.split_once("\"segments\":").unwrap().1;
    let list = list.split_once(",\"device_traces\"").unwrap().0;
    let path = folder.file("list.json", list);
    NO_HISTORY.iter().for_each(|answer| answer.check(&path));
}

#[test]
fn a_job_is_answered_without_the_ranks_that_have_no_history() {
    let folder = Folder::new("ranks-history");
    let whole = folder.file("whole.json", &steps().json());
    let ended = run(&["sweep", "--quick", &case("torch215_true"), &whole]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stdout.contains("For 1 of 2 recordings"), "{}", ended.stdout);
    assert!(ended.stdout.contains(REASON) && !ended.stdout.contains("differs"), "{}", ended.stdout);
    for command in ["diff", "forecast"] {
        let (a, b) = (case("torch215_true"), whole.clone());
        let args = match command {
            "diff" => vec![command.to_owned(), a, b],
            _ => vec![
                command.to_owned(),
                format!("n=1:{a}"),
                format!("n=2:{b}"),
                "--for".into(),
                "n=3".into(),
            ],
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let ended = fails(&args, 2, REASON);
        assert!(!ended.stdout.contains("needs"), "{}", ended.stdout);
    }
}
