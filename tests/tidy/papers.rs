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

/// The folders that a path in a document may be relative to.
const BASES: [&str; 10] = [
    "",
    "src",
    "strategies",
    "tests",
    "python",
    "python/stratalloc",
    "crates",
    "crates/cli",
    "crates/cli/src",
    "crates/ffi",
];

/// Returns the paths in a document that do not exist. The `.rs` of a path may be missing, and paths with
/// placeholders are left out.
pub(crate) fn missing_paths(paper: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let breaks = |c: char| c.is_whitespace() || "`()[]|,;:\"'#".contains(c);
    let is_path = |word: &&str| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        word.contains('/')
            && !word.contains("//")
            && !word.starts_with('/')
            && word.chars().all(is_part)
    };
    let words = paper.split(breaks).map(|word| word.trim_end_matches('.'));
    let is_missing = |path: &&str| {
        let mut places = BASES.iter().map(|base| format!("{base}/{path}"));
        !places.any(|place| {
            let place = place.trim_start_matches('/');
            exists(place) || exists(&format!("{place}.rs"))
        })
    };
    words.filter(is_path).filter(is_missing).map(str::to_owned).collect()
}

/// Returns the places of unsafe code that a document lists, as paths without `.rs`. The list is the item that
/// begins with the word, up to the next item or paragraph.
pub(crate) fn places_of_unsafe(paper: &str) -> Vec<String> {
    let list = paper.split_once("- `unsafe` ").map_or("", |(_, list)| list);
    let end = ["\n- ", "\n\n"].iter().filter_map(|end| list.find(end)).min();
    let spans = list[..end.unwrap_or(list.len())].split('`').skip(1).step_by(2);
    spans.map(|span| whole_path(span.trim_end_matches('/').trim_end_matches(".rs"))).collect()
}

/// Returns a path relative to the repository. Documents leave out `src/` of the library and of packages.
fn whole_path(path: &str) -> String {
    match path {
        "crates/ffi" | "crates/account" => format!("{path}/src"),
        _ if ["src/", "strategies/", "crates/"].iter().any(|base| path.starts_with(base)) => {
            path.to_owned()
        }
        _ => format!("src/{path}"),
    }
}

#[test]
fn a_path_of_a_file_that_was_renamed_is_seen() {
    let exists = |path: &str| ["src/heap/at.rs", "tests/common/", "scripts/a.sh"].contains(&path);
    let missing = |paper: &str| missing_paths(paper, exists);
    assert_eq!(
        missing("see `tests/common/law.rs` and [x](docs/y.md#z)."),
        ["tests/common/law.rs", "docs/y.md"]
    );
    let good =
        "`heap/at`, `heap/at.rs`; scripts/a.sh. https://x/y <= `a/*.rs` tests/common/ /dev/null";
    assert_eq!(missing(good), [""; 0]);
}

#[test]
fn places_of_unsafe_code_are_found_in_a_paper() {
    let paper =
        "- `heap/` x\n- `unsafe` is in `sync/`, `heap/at.rs`,\n  `crates/ffi` only.\n- `other`";
    assert_eq!(places_of_unsafe(paper), ["src/sync", "src/heap/at", "crates/ffi/src"]);
    assert_eq!(places_of_unsafe("none"), [""; 0]);
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
