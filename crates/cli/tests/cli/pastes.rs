//! Every line to paste, of every command, has only keys and values that its allocator accepts.

use super::*;
use crate::common::prelude::*;
use stratalloc::config::torch_notes;

/// Returns the assignments of `ALLOC_CONF` and `PYTORCH_CUDA_ALLOC_CONF` in a text or on a page.
fn assignments(text: &str) -> Vec<(bool, &str)> {
    let found = text.match_indices("ALLOC_CONF=").map(|(at, name)| {
        let value = &text[at + name.len()..];
        let end = value.find([' ', '\n', '`', '"', '<', '\\', '&']).unwrap_or(value.len());
        (text[..at].ends_with("PYTORCH_CUDA_"), &value[..end])
    });
    found.collect()
}

/// Checks that PyTorch of this version accepts a string as it is.
#[track_caller]
fn accepted(conf: &str, version: &str) {
    let config = Config::parse(conf, &KeyTable::default()).expect(conf);
    assert!(config.is_accepted_by(version.parse().expect("a version")), "{version}: {conf}");
    assert_eq!(torch_notes(conf, &KeyTable::default()), [], "{conf}");
}

/// Checks all lines in a text, and all fields `paste` in JSON. Returns their number.
#[track_caller]
fn check(text: &str, torch: Option<&str>) -> usize {
    let lines = assignments(text);
    for (is_pytorch, conf) in &lines {
        match is_pytorch {
            true => accepted(conf, torch.unwrap_or("2.15")),
            false => drop(Config::parse(conf, &KeyTable::default()).expect(conf)),
        }
    }
    let rows = text.lines().filter_map(|line| line.parse::<Value>().ok());
    lines.len() + rows.map(|row| check_fields(&row)).sum::<usize>()
}

/// Checks the lines in a JSON value: the version of each is the one that its field names.
#[track_caller]
fn check_fields(value: &Value) -> usize {
    let of_all = |values: &mut dyn Iterator<Item = &Value>| values.map(check_fields).sum::<usize>();
    let fields = match value {
        Value::Array(values) => return of_all(&mut values.iter()),
        Value::Object(fields) => fields,
        _ => return 0,
    };
    let mut count = of_all(&mut fields.values());
    if let (Some(paste), Some(to)) = (fields.get("paste"), fields.get("paste_for")) {
        let (paste, to) = (paste.as_str().expect("a line"), to.as_str().expect("an allocator"));
        let version = to.strip_prefix("PyTorch ").map(|version| version.replace(" or later", ""));
        assert_eq!(version.is_none(), to == "stratalloc", "{to}");
        if let Some(version) = version
            && !paste.is_empty()
        {
            accepted(paste.strip_prefix("PYTORCH_CUDA_ALLOC_CONF=").expect(paste), &version);
        }
        count += 1;
    }
    count
}

#[test]
fn every_line_to_paste_is_one_that_its_allocator_accepts() {
    let folder = Folder::new("pastes");
    let page = folder.path("page.html");
    let path = &trace("unet.frac045");
    let [a, b] = [2, 4].map(|batch| format!("batch={batch}:{}", forecast::recorded("gpt", batch)));
    let commands: [&[&str]; 5] = [
        &["advise", "--quick", path],
        &["advise", "--quick", path, "--fits", "6.3GiB"],
        &["compare", path],
        &["sweep", "--quick", path, "--output", &page],
        &["forecast", &a, &b, "--for", "batch=8", "--fits", "16GiB"],
    ];
    for command in commands {
        let mut versions = vec![None];
        versions.extend((command[0] != "forecast").then_some(Some("2.15")));
        for torch in versions {
            let version = torch.map_or_else(Vec::new, |version| vec!["--torch", version]);
            let text = run(&[command, &version].concat()).stdout;
            assert!(check(&text, torch) > 0, "{command:?}: {text}");
            let json = run(&[command, &version, &["--json"]].concat()).stdout;
            assert!(check(&json, torch) > 0, "{command:?}: {json}");
            if command[0] == "sweep" {
                let page = std::fs::read_to_string(&page).expect("it is written");
                assert!(check(&page, torch) > 0, "{page}");
                assert!(!text.contains("compat:") && !page.contains("compat:"), "{text}");
            }
        }
    }
    ok(&["report", "--quick", path, "-o", &page]);
    let page = std::fs::read_to_string(&page).expect("it is written");
    let [data] = &report::recordings(&page)[..] else { panic!("one recording") };
    assert!(check_fields(data) > 3 && check(&data["advice"].to_string(), None) > 0, "{data}");
}
