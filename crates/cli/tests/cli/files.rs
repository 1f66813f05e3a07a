//! Files: which formats are read, which files are never overwritten, and how names are printed.

use std::path::Path;

use super::*;

/// Returns a recording with one request on each device marked `true`, and with this configuration.
fn recording(devices: &[bool], conf: &str) -> String {
    let event = r#"{"action":"alloc","addr":4096,"size":512,"stream":0}"#;
    let lists: Vec<_> = devices.iter().map(|has| if *has { event } else { "" }).collect();
    let lists = lists.iter().map(|list| format!("[{list}]")).collect::<Vec<_>>().join(",");
    let conf = serde_json::to_string(conf).expect("text is JSON");
    format!(
        r#"{{"segments":[],"device_traces":[{lists}],"allocator_settings":{{"PYTORCH_CUDA_ALLOC_CONF":{conf}}}}}"#
    )
}

#[test]
fn a_recording_is_not_overwritten_whatever_it_is_called() {
    let folder = Folder::new("overwritten");
    let content = recording(&[true], "");
    let (other, keep) = (folder.file("other.json", &content), folder.file("keep.json", &content));
    let (hard, roundabout) = (folder.path("hard.json"), folder.path("./keep.json"));
    std::fs::hard_link(&keep, &hard).unwrap();
    let fresh = folder.path("fresh.csv");
    for name in [&keep, &hard, &roundabout] {
        let log = format!("layers:[track,log:\"{name}\"]");
        let new_first = format!("layers:[log:\"{fresh}\"]");
        for args in [
            vec!["replay", &keep, "--stats", name],
            vec!["replay", &keep, "--verify", "--stats", name],
            vec!["replay", &keep, "--conf", &log],
            vec!["replay", &other, &keep, "--conf", &log],
            vec!["compare", &keep, "--conf", &log],
            vec!["compare", &other, &keep, "--conf", &new_first, "--conf", &log],
        ] {
            let output = run(&args);
            let stderr = &output.stderr;
            assert_eq!(output.code, Some(2), "{args:?}: {stderr}");
            assert!(stderr.contains(" would be written over the recording "), "{stderr}");
            assert_eq!(output.stdout, "", "{args:?}");
            assert_eq!(std::fs::read_to_string(&keep).unwrap(), content, "{args:?}");
            assert!(!Path::new(&fresh).exists(), "{args:?}");
        }
    }
    ok(&["replay", &keep, "--stats", &fresh]);
}

/// A recording may come from an untrusted source.
#[test]
fn the_configuration_of_a_recording_writes_no_file_and_loads_no_code() {
    let folder = Folder::new("hostile");
    let victim = folder.file("victim", "precious");
    for conf in [
        format!("layers:[track,log:\"{victim}\"]"),
        format!("backend:pluggable,library:\"{victim}\",alloc_fn:a,free_fn:f"),
    ] {
        let path = folder.file("hostile.json", &recording(&[true], &conf));
        for args in [vec!["replay", &path], vec!["replay", &path, "--verify"]] {
            let output = run(&args);
            let stderr = &output.stderr;
            assert_eq!(output.code, Some(2), "{args:?}: {stderr}");
            assert!(
                stderr.contains("the trace's configuration") && stderr.contains("--conf"),
                "{stderr}"
            );
        }
        for args in [vec!["replay", &path, "--conf", ""], vec!["compare", &path, "--conf", ""]] {
            ok(&args);
        }
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
}

#[test]
fn an_empty_recording_is_refused_with_what_may_be_missing() {
    let folder = Folder::new("nothing");
    let block = |state: &str| {
        format!(
            r#"{{"segments":[{{"address":4194304,"total_size":2097152,"stream":0,"segment_type":"small",
            "device":0,"blocks":[{{"address":4194304,"size":2097152,"requested_size":2000000,
            "state":"{state}"}}]}}],"device_traces":[[]]}}"#
        )
    };
    let nothing = [
        folder.file("none.json", r#"{"segments":[],"device_traces":[]}"#),
        folder.file("empty.json", &recording(&[false], "")),
        folder.file("idle.json", &block("inactive")),
    ];
    for path in &nothing {
        for args in [vec!["replay", path], vec!["replay", path, "--verify"], vec!["compare", path]]
        {
            let output = run(&args);
            let stderr = &output.stderr;
            assert_eq!(output.code, Some(2), "{args:?}: {stderr}");
            assert!(
                stderr.contains(path.as_str()) && stderr.contains("holds no events"),
                "{stderr}"
            );
            assert!(stderr.contains("torch.cuda.memory._record_memory_history"), "{stderr}");
            assert_eq!(output.stdout, "", "{args:?}");
        }
    }
    let log = folder.file("log.csv", "Thread,Time,Action,Pointer,Size,Stream\n");
    fails(&["replay", &log], 2, "holds no requests");
    // The recording has live blocks but not the events that allocated them. It is replayed, with a note.
    let output = run(&["replay", &folder.file("live.json", &block("active_allocated"))]);
    let stderr = &output.stderr;
    assert_eq!(output.code, Some(0), "{stderr}");
    assert!(stderr.starts_with("note: ") && stderr.contains("_record_memory_history"), "{stderr}");
}

#[test]
fn a_device_without_events_beside_one_that_has_some_is_refused_only_when_asked_for() {
    let folder = Folder::new("beside");
    let path = folder.file("two.json", &recording(&[false, true], ""));
    ok(&["replay", &path]);
    let output = run(&["replay", &path, "--recorded-device", "0"]);
    let stderr = &output.stderr;
    assert_eq!(output.code, Some(2), "{stderr}");
    assert!(stderr.contains("no events of device 0; others may have some"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn names_of_files_cannot_speak_to_the_terminal() {
    let folder = Folder::new("names");
    let name = |ending: &str| format!("a\nb\u{1b}[31m{ending}");
    let whole = folder.file(&name(".json"), &recording(&[true, true], ""));
    let broken = folder.file(&name("-broken.json"), "{");
    let log = folder.path(&name("/log.csv"));
    let log_conf = format!("layers:[log:\"{log}\"]");
    for (args, shown, on) in [
        (vec!["replay", &whole], "a?b?[31m device 0  [(default)]", true),
        (vec!["replay", &whole], "a?b?[31m.json: 2 devices. ", false),
        (vec!["compare", &whole, "--conf", "cpu_trim_age_s:1"], "a?b?[31m device 0\n", true),
        (vec!["replay", &broken], "a?b?[31m-broken.json: ", false),
        (vec!["replay", &folder.path(&name("-none"))], "a?b?[31m-none: ", false),
        (vec!["replay", &whole, "--stats", &log], "a?b?[31m/log.csv: ", false),
        (vec!["replay", &whole, "--stats", &whole], "a?b?[31m.json would be", false),
        (vec!["replay", &whole, "--conf", &log_conf], "the file cannot be written", false),
        (vec!["explain", &log_conf], "a?b?[31m/log.csv", true),
        (vec!["explain", "layers:[track,\"\u{1b}[31m"], "?[31m", false),
    ] {
        let output = run(&args);
        let (stdout, stderr) = (output.stdout, output.stderr);
        let is_control = |c: char| c.is_control() && c != '\n';
        assert!(
            !stdout.contains(is_control) && !stderr.contains(is_control),
            "{stdout:?} {stderr:?}"
        );
        let text = if on { stdout } else { stderr };
        assert!(text.contains(shown), "{shown}: {text}");
    }
    let row = run(&["replay", &whole, "--recorded-device", "0", "--json"]).json();
    assert_eq!(row["trace"], name(""), "for programs the name is what it is");
}
