//! Rules for the sources, checked by reading them.
//!
//! Each rule is a function from a file's path and text to complaints. For each rule, a test shows that
//! it finds a bad file. A change of the layers must be made here and in `ARCHITECTURE.md`.

mod layers;
mod names;
mod papers;
mod sentences;
mod source;
mod text;
mod threads;
mod words;

use source::{Source, rust_files};

/// Returns the complaints of one rule about all files that it applies to.
fn complaints(of: impl Fn(&str) -> bool, rule: impl Fn(&Source) -> Vec<String>) -> String {
    let files = rust_files();
    let chosen: Vec<_> = files.iter().filter(|file| of(&file.path)).collect();
    assert!(!chosen.is_empty(), "a rule without files keeps nothing");
    chosen.into_iter().flat_map(rule).collect::<Vec<_>>().join("\n")
}

fn library(path: &str) -> bool {
    path.starts_with("src/") || path.starts_with("strategies/")
}

fn product(path: &str) -> bool {
    library(path) || path.starts_with("crates/") && !path.contains("/tests/")
}

fn any(_: &str) -> bool {
    true
}

fn bookkeeping(path: &str) -> bool {
    path.starts_with("src/heap/") || path.starts_with("strategies/native/")
}

macro_rules! rules {
    ($($name:ident: $files:expr, $rule:path;)*) => {
        $(#[test]
        fn $name() {
            assert_eq!(complaints($files, $rule), "");
        })*
    };
}

rules! {
    files_use_only_what_stands_to_the_left_of_them: library, layers::imports;
    files_of_the_c_library_use_only_earlier_ones: |path| path.starts_with("crates/ffi/src/"), layers::ffi_imports;
    heaps_know_no_driver_and_no_lock: |path| path.starts_with("src/heap/"), layers::heap_is_pure;
    no_strategy_uses_another: |path| path.starts_with("strategies/"), layers::strategies_apart;
    nothing_below_the_views_reaches_the_machine: layers::below_the_views, layers::no_machine;
    unsafe_lives_only_where_it_may: product, layers::unsafe_allowed_in;
    no_file_is_longer_than_600_lines: any, text::short_file;
    no_function_of_the_heap_or_the_engine_is_longer_than_90_lines: bookkeeping, text::short_functions;
    no_comment_runs_on_past_110_columns: any, text::short_comments;
    every_file_begins_with_a_header: any, text::header;
    no_banners_no_leftovers_no_ignored_tests: any, text::leftovers;
    a_lint_is_silenced_only_with_a_reason: any, text::reasons;
    nothing_is_used_that_an_ending_thread_has_no_more: product, threads::usable_to_the_end;
    nothing_is_unwrapped_outside_tests: product, text::unwraps;
    no_decision_depends_on_the_name_of_a_strategy: product, names::compared;
    comments_are_in_plain_english: any, words::plain;
    docs_are_whole_sentences: any, sentences::whole;
}

#[test]
fn nor_does_the_python_package() {
    let found: Vec<_> = names::package_files().iter().flat_map(names::compared).collect();
    assert_eq!(found, [""; 0]);
}

#[test]
fn the_papers_know_every_room_of_the_house() {
    let plan = papers::read("ARCHITECTURE.md");
    assert_eq!(papers::rooms(&plan, &papers::folders()), [""; 0]);
    assert_eq!(papers::rooms(&plan, &papers::top_folders()), [""; 0]);
}

#[test]
fn packages_depend_only_on_those_before_them() {
    for (name, may_use) in layers::PACKAGES {
        let manifest = papers::read(&format!("crates/{name}/Cargo.toml"));
        assert_eq!(layers::packages(name, &manifest, may_use), [""; 0], "{name}");
    }
}

#[test]
fn every_path_in_a_paper_exists() {
    for paper in ["ARCHITECTURE.md", "CONTRIBUTING.md", "RELEASING.md"] {
        let exists = |path: &str| source::root().join(path).exists();
        assert_eq!(papers::missing_paths(&papers::read(paper), exists), [""; 0], "{paper}");
    }
}

#[test]
fn the_papers_list_the_places_of_unsafe_code() {
    for paper in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let places = layers::UNSAFE;
        assert_eq!(papers::places_of_unsafe(&papers::read(paper)), places, "{paper}");
    }
}

#[test]
fn every_built_in_strategy_has_its_row() {
    let names = || stratalloc::registry::BUILT_IN.iter().map(|own| own.name);
    assert_eq!(papers::rows(&papers::read("strategies/mod.rs"), names()), [""; 0]);
    match std::fs::read_to_string(source::root().join("docs/strategies.md")) {
        Ok(page) => assert_eq!(papers::rows(&page, names()), [""; 0]),
        Err(_) => eprintln!("skipped: no docs/strategies.md"),
    }
}

#[test]
fn the_package_carries_the_strategies() {
    assert_eq!(papers::manifest(&papers::read("Cargo.toml")), [""; 0]);
}
