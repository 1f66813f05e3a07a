//! Rules for documents and manifest: `ARCHITECTURE.md` mentions every folder, tables list every strategy,
//! and the package contains all sources of the library.

use std::fs;

use super::source::root;

pub(crate) fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).expect("a paper that every checkout has")
}

/// Returns the folders and files directly under `src/`, without `lib.rs`, and `strategies/`.
pub(crate) fn folders() -> Vec<String> {
    let mut names = vec!["strategies/".to_owned()];
    for entry in fs::read_dir(root().join("src")).expect("the package has sources") {
        let entry = entry.expect("a folder that opened can be listed");
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() {
            names.push(format!("src/{name}/"));
        } else if name != "lib.rs" {
            names.push(format!("src/{name}"));
        }
    }
    assert!(names.len() > 8, "{names:?}");
    names.sort();
    names
}

/// Returns the top-level folders that `ARCHITECTURE.md` must mention, if they exist.
pub(crate) fn top_folders() -> Vec<String> {
    let known =
        ["src", "strategies", "tests", "benches", "examples", "crates", "python", "docs", "fuzz"];
    let there = known.into_iter().filter(|name| root().join(name).is_dir());
    there.map(|name| format!("{name}/")).collect()
}

/// Returns the strategies that no line of a document lists, as `NAME` in a table's first column or as
/// `backend:NAME`.
pub(crate) fn rows<'n>(paper: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let rows: Vec<_> = paper.lines().map(|line| line.trim_start_matches(['/', '!', ' '])).collect();
    let has_row = |name: &str| {
        rows.iter().any(|row| {
            row.starts_with(&format!("| `{name}`")) || row.contains(&format!("`backend:{name}`"))
        })
    };
    names.filter(|name| !has_row(name)).map(|name| format!("no row for {name}")).collect()
}

/// Returns the folders that `ARCHITECTURE.md` does not mention.
pub(crate) fn rooms(plan: &str, folders: &[String]) -> Vec<String> {
    let missing = folders.iter().filter(|folder| !plan.contains(folder.as_str()));
    missing.map(|folder| format!("{folder} is not mentioned")).collect()
}

/// Checks that the package includes `strategies/`, which is outside of `src/` but part of the library, and
/// that `unsafe_code` and `unwrap_used` are denied.
pub(crate) fn manifest(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let list = |key: &str| {
        let from = text.find(&format!("\n{key} = ["))?;
        let rest = &text[from..];
        Some(&rest[..rest.find(']').unwrap_or(rest.len())])
    };
    if list("exclude").is_some_and(|list| list.contains("strategies") || list.contains("\"*")) {
        found.push("Cargo.toml: the package leaves the strategies out".to_owned());
    }
    if list("include").is_some_and(|list| !list.contains("strategies")) {
        found.push("Cargo.toml: the package does not include the strategies".to_owned());
    }
    for lint in ["unsafe_code = \"deny\"", "unwrap_used = \"deny\""] {
        if !text.contains(lint) {
            found.push(format!("Cargo.toml: {lint} is gone"));
        }
    }
    found
}

#[test]
fn an_unnamed_room_is_seen() {
    let folders = ["src/heap/".to_owned(), "src/novel/".to_owned()];
    assert_eq!(rooms("src/heap/ blocks", &folders).len(), 1);
    assert_eq!(rooms("src/heap/ src/novel/", &folders).len(), 0);
}

#[test]
fn a_strategy_without_a_row_is_seen() {
    let sees = |paper: &str| rows(paper, ["native"].into_iter()).len();
    assert_eq!(sees("| name |\n| `other` | native |"), 1);
    assert_eq!(sees("//! | `native` | a |"), 0);
}

#[test]
fn a_package_without_strategies_is_seen() {
    let lints = "unsafe_code = \"deny\"\nunwrap_used = \"deny\"\n";
    let sees = |key: &str| manifest(&format!("[package]\n{key}\n{lints}")).len();
    assert_eq!(sees("exclude = [\".ci/\"]"), 0);
    assert_eq!(sees("exclude = [\".ci/\", \"strategies/\"]"), 1);
    assert_eq!(sees("include = [\"src/\"]"), 1);
    assert_eq!(sees("include = [\"src/\", \"strategies/\"]"), 0);
    assert_eq!(manifest("[package]\n").len(), 2);
}
