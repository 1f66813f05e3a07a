//! The answer: its schema, and that every output shows the same figures.

use super::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The marks around the list of numbers in the document.
const LIST: [&str; 2] = ["<!-- numbers -->\n", "<!-- end -->"];

/// Compares a file with its contents. If `STRATALLOC_WRITE_SCHEMA` is set, writes it instead.
fn is_current(path: &Path, contents: &str) {
    if std::env::var_os("STRATALLOC_WRITE_SCHEMA").is_some() {
        std::fs::write(path, contents).expect("it is there");
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(written == contents, "{}: STRATALLOC_WRITE_SCHEMA=1 writes it", path.display());
}

#[test]
fn the_schema_and_the_list_of_numbers_in_the_docs_are_those_of_the_program() {
    let schema =
        serde_json::to_string_pretty(&stratalloc_analysis::schema()).expect("it is there") + "\n";
    is_current(&root().join("docs/answer.schema.json"), &schema);
    let path = root().join("docs/answer.md");
    let text = std::fs::read_to_string(&path).expect("it is there");
    let (before, rest) = text.split_once(LIST[0]).expect("the list begins");
    let (_, after) = rest.split_once(LIST[1]).expect("the list ends");
    let row =
        |field: &stratalloc_analysis::Field| format!("| `{}` | {} |\n", field.name, field.meaning);
    let rows: String = stratalloc_analysis::fields().iter().map(row).collect();
    let heading = "| number | meaning |\n|---|---|\n";
    is_current(&path, &format!("{before}{}{heading}{rows}{}{after}", LIST[0], LIST[1]));
}

/// Returns a schema, its references and the parts of which it consists.
fn parts<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a Value> {
    let place = schema["$ref"].as_str().and_then(|place| place.strip_prefix('#'));
    let of = place.and_then(|place| root.pointer(place));
    let all = schema["allOf"].as_array().into_iter().flatten().chain(of);
    std::iter::once(schema).chain(all.flat_map(|part| parts(part, root))).collect()
}

/// Returns the places at which a value does not follow a schema.
fn faults(value: &Value, schema: &Value, root: &Value, at: &str) -> Vec<String> {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_of = |kind: &Value| kind == name || kind == "number" && name == "integer";
    let parts = parts(schema, root);
    let mut known: Vec<(&String, &Value)> = Vec::new();
    let mut found = Vec::new();
    for part in &parts {
        let kinds = &part["type"];
        let is_one = kinds.as_array().is_some_and(|kinds| kinds.iter().any(is_of));
        if !kinds.is_null() && !is_of(kinds) && !is_one {
            return vec![format!("{at}: {name} instead of {kinds}")];
        }
        if !part["const"].is_null() && part["const"] != *value {
            return vec![format!("{at}: not {}", part["const"])];
        }
        let fields = part["properties"].as_object();
        known.extend(fields.into_iter().flatten());
        for required in part["required"].as_array().into_iter().flatten() {
            if value.get(required.as_str().unwrap_or_default()).is_none() {
                found.push(format!("{at}: no {required}"));
            }
        }
        for one_of in ["anyOf", "oneOf"] {
            let Some(choices) = part[one_of].as_array() else { continue };
            // A kind that stands between other fields describes its own fields only.
            let is_between = fields.is_some();
            let own = |choice: &&Value| is_between || faults(value, choice, root, at).is_empty();
            let fits: Vec<&Value> = choices.iter().filter(own).collect();
            let of = fits.iter().flat_map(|choice| self::parts(choice, root));
            // The other choices were compared with the whole value.
            let of = of.filter(|_| is_between);
            known.extend(of.filter_map(|of| of["properties"].as_object()).flatten());
            if fits.is_empty() {
                found.push(format!("{at}: fits no {one_of}"));
            }
        }
        for value in value.as_array().into_iter().flatten() {
            found.extend(faults(value, &part["items"], root, &format!("{at}[]")));
        }
    }
    for (name, value) in value.as_object().filter(|_| !known.is_empty()).into_iter().flatten() {
        let place = format!("{at}.{name}");
        let of: Vec<&Value> =
            known.iter().filter(|(own, _)| *own == name).map(|(_, of)| *of).collect();
        match of.iter().map(|of| faults(value, of, root, &place)).min_by_key(Vec::len) {
            Some(faults) => found.extend(faults),
            None => found.push(format!("{place}: not in the schema")),
        }
    }
    found
}

/// Returns recordings of all kinds, the short ones first; in a full run, all.
fn recordings() -> Vec<PathBuf> {
    let folders = ["tests/cases", "tests/traces"].map(|folder| root().join(folder));
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("it is there"));
    let paths = files.map(|entry| entry.expect("it is there").path());
    let mut all: Vec<PathBuf> =
        paths.filter(|path| path.to_string_lossy().ends_with(".pickle.xz")).collect();
    all.sort_by_key(|path| std::fs::metadata(path).expect("it is there").len());
    all.truncate(if runs(1) > 1 { usize::MAX } else { 24 });
    all
}

/// Returns the answer that Python gets, or `None` without Python.
fn in_python(path: &str) -> Option<Value> {
    let code = "import json, sys\nsys.path.insert(0, sys.argv[1])\nfrom stratalloc import _advice\n\
                print(json.dumps(_advice._advice_of(sys.argv[2], sys.argv[3], ['--quick'])))";
    let python = root().join("python");
    let program = env!("CARGO_BIN_EXE_stratalloc");
    let done = std::process::Command::new("python3")
        .args(["-c", code])
        .arg(python)
        .args([program, path])
        .output()
        .ok()?;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(serde_json::from_slice(&done.stdout).expect("it is there"))
}

/// Compares what the text, the JSON, the page and Python state about each recording.
#[test]
fn text_json_page_and_python_state_the_same_figures() {
    let schema = stratalloc_analysis::schema();
    let folder = Folder::new("answers");
    let page = folder.path("page.html");
    for file in recordings() {
        let path = file.to_str().expect("it is there");
        let name = file.file_name().expect("it is there").to_string_lossy().into_owned();
        // Of several devices, the first is compared.
        let printed = ok(&["advise", path, "--quick", "--json"]).stdout;
        let json: Value = printed.lines().next().expect("a line").parse().expect("it is JSON");
        let mut answer = json.clone();
        answer.as_object_mut().expect("it is there").remove("assertions");
        assert_eq!(faults(&answer, &schema, &schema, ""), [""; 0], "{name}");
        let text = ok(&["advise", path, "--quick"]).stdout;
        ok(&["report", path, "--quick", "-o", &page]);
        let html = std::fs::read_to_string(&page).expect("it is there");
        let [data, ..] = &super::report::recordings(&html)[..] else { panic!("{name}") };
        agree(&name, &json, &text, data);
        if let Some(python) = in_python(path) {
            assert_eq!(python, json, "{name}");
        }
    }
}

fn agree(name: &str, json: &Value, text: &str, data: &Value) {
    let has_history = json["no_history"].is_null();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    // The headline, and the explanation of each moment.
    assert_eq!(data["advice"]["sentence"], json["sentence"], "{name}");
    assert_eq!(data["headline"]["memory"], json["memory"], "{name}");
    let begin = json["sentence"]
        .as_str()
        .expect("it is there")
        .split(". ")
        .next()
        .expect("it is there")
        .to_owned();
    assert!(text.contains(&begin), "{name}: {begin}\n{text}");
    let pictures = list(&data["advice"]["pictures"]);
    assert_eq!(pictures[0]["sentence"], json["causes"]["why"], "{name}");
    for picture in &pictures {
        assert!(text.contains(picture["sentence"].as_str().expect("it is there")), "{name}");
    }
    // The needs.
    let needs = &json["recorded"]["needs_bytes"];
    let rows = list(&data["needs"]["rows"]);
    let recorded = rows.iter().find(|row| row["recorded"] == true);
    assert_eq!(recorded.map(|row| &row["needs_bytes"]), has_history.then_some(needs), "{name}");
    if let Some(bytes) = needs.as_u64() {
        let row = text.lines().find(|line| line.contains("as recorded:")).expect("it is there");
        let mib = bytes.div_ceil(MIB).to_string();
        assert!(row.replace(',', "").contains(&mib), "{name}: {mib} in {row}");
    }
    // The moments and their holders.
    let (moments, drawn) = (list(&json["moments"]), list(&data["holders"]));
    assert_eq!(moments.len(), drawn.len(), "{name}");
    for (moment, shown) in moments.iter().zip(&drawn) {
        assert_eq!(shown["name"], moment["moment"], "{name}");
        let holders = &moment["holders"];
        assert_eq!(shown["bytes"], holders["requested_bytes"], "{name}");
        assert_eq!(shown["blocks"], holders["blocks"], "{name}");
        let has_stacks = holders["has_stacks"] == true;
        let rows = list(&holders[if has_stacks { "by_stack" } else { "by_size" }]);
        let first = rows.first().map(|row| &row["requested_bytes"]);
        assert_eq!(list(&shown["list"]["bytes"]).first(), first, "{name}");
    }
    if has_history {
        let peak = |which: &str| moments.iter().find(|moment| moment["moment"] == which);
        let reserved = peak("peak of reserved bytes").expect("it is there");
        assert_eq!(data["peak_reserved"]["bytes"], reserved["reserved_bytes"], "{name}");
        let live = peak("peak of live bytes").expect("it is there");
        assert_eq!(data["peak_live"]["bytes"], live["holders"]["requested_bytes"], "{name}");
    }
    // The largest holder.
    let holders = &json["holders"];
    let mib = |bytes: &Value| {
        format!("{} MiB", stratalloc_analysis::near(bytes.as_u64().expect("it is there")))
    };
    let many = if holders["blocks"] == 1 { "s" } else { "" };
    assert!(
        text.contains(&format!(" hold{many} {}:", mib(&holders["requested_bytes"]))),
        "{name}\n{text}"
    );
    for row in list(&holders["by_stack"]).iter().take(3).filter(|_| holders["has_stacks"] == true) {
        assert!(text.contains(row["asked_for_by"].as_str().expect("it is there")), "{name}: {row}");
    }
}

#[test]
fn any_number_of_the_answer_can_be_asserted() {
    let path = &trace("serve.default");
    for (condition, code) in [
        ("causes.reserved_bytes>1B", 0),
        ("causes.peak_reserved.reserved_bytes<1MiB", 1),
        ("holders.blocks>=1", 0),
        ("passed_over==77", 1),
        // The long name of a quantity means the same as the short one.
        ("least_need<=1700MiB", 0),
        ("least_need_bytes<=1700MiB", 0),
        ("recorded.needs_bytes<=1700MiB", 1),
        ("best.device_ms>0.5", 0),
        ("limit_bytes<1GiB", 2),
        ("recorded.conf==1", 2),
        ("tried==1", 2),
    ] {
        let done = run(&["advise", path, "--quick", "--assert", condition]);
        assert_eq!(done.code, Some(code), "{condition}: {} {}", done.stdout, done.stderr);
    }
}

#[test]
fn sentences_under_a_set_memory_are_about_the_replay_with_that_memory() {
    let path = &trace("serve.default");
    let json = run(&["advise", path, "--quick", "--json", "--total-memory", "1400MiB"]).json();
    assert_eq!(json["causes"]["is_replay"], true);
    assert!(json["failures"].as_u64() > Some(0) && json["failures_are_replayed"] == true);
    let memory = json["memory"].as_str().expect("a sentence");
    let most = memory.split("reserves up to ").nth(1).and_then(|rest| rest.split(' ').next());
    let most: Option<u64> = most.map(|mib| mib.replace(',', "").parse().expect("a number"));
    assert!(most.is_none_or(|mib| mib <= 1400), "{memory}");
    let args = ["--quick", "--memory-fraction", "1", "--assert", "failures==0"];
    let done = run(&[&["advise", &trace("unet.frac045")][..], &args].concat());
    assert!(!done.stdout.contains("when it was recorded"), "{}", done.stdout);
}
