//! Programs whose cause of memory use is known: the answer names it, and the categories have their bytes.
//!
//! The files in `tests/truth` are from `scripts/truth/programs.py`: a recording, and what the program knows
//! about itself. `scripts/truth/check.py` compares all of its programs in the same way.

use super::*;

/// For a category, the labels whose bytes it has to contain, and those that it may contain besides.
const CATEGORIES: &[(&str, &[&str], &[&str])] = &[
    ("parameters and buffers", &["parameters"], &[]),
    ("gradients", &["gradients"], &[]),
    ("optimizer state", &["optimizer state"], &[]),
    ("activations kept for the backward pass", &["kept for backward"], &["input"]),
    ("activations recomputed in the backward pass", &["kept for backward"], &[]),
    ("workspace", &["workspace"], &[]),
    ("activations", &[], &["kept for backward", "temporary"]),
    ("temporary", &[], &["temporary"]),
    ("backward pass", &[], &["temporary"]),
    ("optimizer step", &[], &["temporary"]),
];

/// Returns the sentences of an answer that stand above its tables.
fn headline(answer: &Value) -> String {
    let texts = answer.as_object().expect("an object").values().filter_map(Value::as_str);
    let texts = texts.filter(|text| text.ends_with('.')).chain(answer["causes"]["why"].as_str());
    texts.collect::<Vec<_>>().join(" ")
}

fn words(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().expect("a list").iter().filter_map(Value::as_str)
}

#[test]
fn the_headline_names_the_true_cause_and_categories_have_the_true_bytes() {
    let folder = shared_library::root().join("tests/truth");
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let truths: Vec<_> =
        files.filter(|file| file.extension().is_some_and(|e| e == "json")).collect();
    assert_eq!(truths.len(), 8);
    for file in truths {
        let truth: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let recording = file.with_extension("pickle.xz").display().to_string();
        let answer = ok(&["advise", "--quick", "--json", &recording]).json();
        let text = headline(&answer);
        let is_in = |word: &str| match word {
            "{culprit}" => words(&truth["culprits"]).any(|line| text.contains(line)),
            word => text.contains(word),
        };
        let mut accepted = truth["accepted"].as_array().unwrap().iter();
        assert!(accepted.any(|all| words(all).all(is_in)), "{recording}: {truth:#}: {text}");
        check_categories(&recording, &truth["devices"]["0"], &answer["moments"][0]);
    }
}

fn check_categories(recording: &str, truth: &Value, moment: &Value) {
    assert_eq!(moment["moment"], truth["moment"], "{recording}");
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let live_bytes = number(&truth["live_bytes"]);
    let rows = || moment["categories"].as_array().expect("a list").iter();
    let bytes_of = |is_one: &dyn Fn(&str) -> bool| -> f64 {
        let is_it = |row: &&Value| is_one(row["category"].as_str().expect("a text"));
        rows().filter(is_it).map(|row| number(&row["requested_bytes"])).sum()
    };
    let unknown = bytes_of(&|name| name.starts_with("unknown"));
    // The recording does not show whether these are kept.
    let undecided = bytes_of(&|name| name == "activations");
    for row in rows() {
        let (name, bytes) =
            (row["category"].as_str().expect("a text"), number(&row["requested_bytes"]));
        if name.starts_with("unknown") {
            continue;
        }
        let known = CATEGORIES.iter().find(|(category, ..)| *category == name);
        let (_, exact, besides) = known.unwrap_or_else(|| panic!("{recording}: {name}"));
        let sum = |labels: &[&str]| -> f64 {
            labels.iter().map(|label| number(&truth["categories"][*label])).sum()
        };
        let (least, most) = (sum(exact), sum(exact) + sum(besides));
        let slack = (most * 0.02).max(live_bytes * 0.002);
        let open = if name.starts_with("activations ") { unknown + undecided } else { unknown };
        let is_right = least - slack - open <= bytes && bytes <= most + slack;
        assert!(is_right, "{recording}: {name}: {bytes} of {least} to {most}");
    }
}
