//! Messages: their wording, and where they are written if the output cannot be written.

use super::*;

/// The exit code must not depend on whether the output can be written.
#[cfg(target_os = "linux")]
#[test]
fn streams_that_cannot_be_written_change_no_exit_code_into_a_panic() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let path = &trace("multistream.default");
    let idle = "expandable_segments_reserve:0.5";
    for (args, code) in [
        (vec!["explain", "backend:foo"], 2),
        (vec!["replay", "missing"], 2),
        (vec!["replay", path, "--conf", idle], 0),
        (vec!["compare", path, "--conf", idle], 0),
        (vec!["bench", "--conf", idle, "--case", "pear"], 2),
        (vec!["bogus"], 2),
        (vec!["--help"], 0),
    ] {
        assert_eq!(ended(stratalloc().args(&args).stderr(full())).code, Some(code), "{args:?}");
    }
    let compare = vec!["compare", path, "--conf", ""];
    for args in [vec!["explain"], vec!["info"], vec!["replay", path], compare] {
        let output = ended(stratalloc().args(&args).stdout(full()));
        assert_eq!(output.code, Some(2), "{args:?}");
        assert!(output.stderr.starts_with("stratalloc: "), "{args:?}");
        let mute = ended(stratalloc().args(&args).stdout(full()).stderr(full()));
        assert_eq!(mute.code, Some(2), "{args:?}");
    }
}

#[test]
fn arguments_that_cannot_be_are_the_callers_to_mend() {
    for wrong in [
        &["bench", "--case", "pear"][..],
        &["bench", "--threads", "0"],
        &["bench", "--threads", "999999999"],
        &["replay", "x", "--memory-fraction", "nan"],
        &["replay", "x", "--memory-fraction", "1.5"],
        &["compare", "x", "--total-memory", "0"],
        &["replay", "x", "--verify", "--device", "host"],
        &["replay", "x", "y", "--stats", "z"],
    ] {
        fails(wrong, 2, "");
    }
}

#[test]
fn shells_complete_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ok(&["completions", shell]).stdout;
        for word in ["advise", "compare", "recorded-device"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    fails(&["completions", "dos"], 2, "");
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_no_text_is_named_once() {
    use std::os::unix::ffi::OsStrExt;
    let no_text = std::ffi::OsStr::from_bytes(b"backend:\xff");
    let output = ended(stratalloc().arg("explain").env("ALLOC_CONF", no_text));
    assert_eq!(output.code, Some(2));
    let stderr = &output.stderr;
    assert!(
        stderr.starts_with("stratalloc: ALLOC_CONF: expected text in UTF-8 (byte 8)\n"),
        "{stderr}"
    );
}

#[test]
fn an_empty_configuration_has_a_name_in_tables() {
    let path = &trace("multistream.default");
    let compared = run(&["compare", path, path, "--conf", ""]).stdout;
    assert_eq!(compared.matches("\n(default) ").count(), 3, "{compared}");
    let timed = run(&["bench", "--case", "pair:512B", "--conf", ""]).stdout;
    assert!(timed.contains("\nA: (default) on sim\n"), "{timed}");
}

#[test]
fn mismatches_show_sizes_as_numbers_and_addresses_as_such() {
    let path = &trace("unet.frac045");
    let args = ["replay", path, "--verify", "--memory-fraction", "0.02", "--json"];
    let row = run(&args).json();
    let first = row["first_mismatch"].as_str().unwrap();
    let words: Vec<&str> = first.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let addresses = words.iter().filter(|word| word.starts_with("0x")).count();
    assert!(addresses > 0 && first.contains(" bytes at 0x"), "{first}");
    let mixed = |word: &&&str| {
        let digits = word.bytes().filter(u8::is_ascii_digit).count();
        digits > 0 && digits < word.len() && !word.starts_with("0x")
    };
    assert_eq!(
        words.iter().find(mixed),
        None,
        "a number that can be confused with another: {first}"
    );
}

#[test]
fn a_largest_split_that_does_nothing_in_expandable_segments_is_named() {
    let path = &trace("multistream.default");
    let conf = "expandable_segments:True,max_split_size_mb:64";
    for command in ["replay", "compare"] {
        let stderr = |conf: &str| run(&[command, path, "--conf", conf, "--json"]).stderr;
        let idle = "note: max_split_size_mb does nothing here: ";
        assert!(stderr(conf).starts_with(idle), "{}", stderr(conf));
        assert_eq!(stderr(&format!("{conf},compat:pytorch")), "", "{command}");
        assert_eq!(stderr("max_split_size_mb:64"), "", "{command}");
    }
}

#[test]
fn explain_notes_the_values_that_pytorch_refuses() {
    for (conf, note) in [
        ("expandable_segments:true", "it accepts True or False only"),
        ("expandable_segments:FALSE", "it accepts True or False only"),
        ("expandable_segments:\"True\"", "without quotes only"),
        ("max_split_size_mb:1GiB", "it takes the leading digits and ignores the unit"),
        ("backend:cpu", "it has the backends native and cudaMallocAsync only"),
        ("expandable_segments:True,expandable_segments_reserve:8GiB", "GiB as 8G, only"),
    ] {
        let ended = ok(&["explain", conf]);
        assert!(
            ended.stdout.contains("\nnote: PyTorch does not read "),
            "{conf}: {}",
            ended.stdout
        );
        assert!(ended.stdout.contains(note), "{conf}: {}", ended.stdout);
        let warnings = ok(&["explain", conf, "--json"]).json()["warnings"].to_string();
        assert!(warnings.contains("PyTorch does not read "), "{warnings}");
    }
    for conf in [
        "expandable_segments:True, max_split_size_mb : 64",
        "roundup_power2_divisions:[256:1,>:2]",
        "max_split_size_mb:64MiB",
        "garbage_collection_threshold:.8,backend:native",
        "expandable_segments:True,expandable_segments_reserve:8G",
        "compat:pytorch",
        "ALLOC_CONF=expandable_segments:true,compat:pytorch",
    ] {
        let ended = ok(&["explain", conf]);
        assert!(!ended.stdout.contains("note: "), "{conf}: {}", ended.stdout);
    }
    // A variable that PyTorch reads.
    for (conf, key) in
        [("compat:pytorch", "compat"), ("malloc_async_own_pool:True", "malloc_async_own_pool")]
    {
        let ended = ok(&["explain", &format!("PYTORCH_CUDA_ALLOC_CONF={conf}")]);
        let note = format!("note: PyTorch has no key {key} and stops with a ValueError");
        assert!(ended.stdout.contains(&note), "{conf}: {}", ended.stdout);
    }
}

#[test]
fn an_error_names_the_file_its_kind_and_the_remedy() {
    let folder = Folder::new("errors");
    // A checkpoint, and a list of settings: both are well formed, and no snapshot.
    let checkpoint = folder.file("checkpoint.json", r#"{"model":{"weight":[1,2,3]},"epoch":3}"#);
    let settings = folder.file("settings.json", r#"{"torch":"2.8","total_memory":"24GiB"}"#);
    for file in [&checkpoint, &settings] {
        let stderr = fails(&["advise", file], 2, file).stderr;
        assert!(
            stderr.contains("it is no memory snapshot") && stderr.contains("_dump_snapshot("),
            "{stderr}"
        );
    }
    for command in ["advise", "replay", "report"] {
        let stderr =
            fails(&[command, &folder.path("")], 2, "it is a folder; pass the recordings in it")
                .stderr;
        assert!(stderr.contains("/*.pickle"), "{stderr}");
    }
    let path = &trace("multistream.default");
    fails(&["sweep", path, "--jobs", "0"], 2, "expected a number of threads, 1 or more");
    fails(&["replay", path, "--at", "1e3"], 2, "expected a number of events, such as 1000");
    // A column that does not exist is refused before the work.
    for command in [&["compare", path, "--conf", "backend:native"][..], &["sweep", path]] {
        let ended = fails(
            &[command, &["--sort", "price"]].concat(),
            2,
            "no column is called price: there are ",
        );
        assert_eq!(ended.stdout, "", "{command:?}");
    }
}

#[test]
fn recordings_of_two_programs_are_named_as_such() {
    let (serve, other) = (&trace("serve.default"), &trace("unet.frac045"));
    let note = "the same: these may be recordings of two programs";
    assert!(run(&["diff", serve, other]).stderr.contains(note));
    assert!(!run(&["diff", other, &trace("unet.expandable")]).stderr.contains(note));
}
