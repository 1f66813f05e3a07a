//! Checks that code uses only thread-locals that are still usable while a thread's last destructors run.
//!
//! At that time a thread-local with a destructor may be destroyed already, and so may the data of
//! `std::thread::current`. Using either then panics.

use super::source::Source;

/// Types that a `Cell` may contain because they need no drop.
const PLAIN: [&str; 8] = [
    "bool",
    "u32",
    "u64",
    "usize",
    "Moment",
    "Option<Rank>",
    "Option<&'static HazardSlot>",
    "Option<&static HazardSlot>",
];

/// Thread-locals with a destructor. They are accessed only by `try_with`, and the thread works without
/// them afterwards.
const DESTROYED: [(&str, &str); 4] = [
    // Frees the hazard slot of an ending thread for other threads. Afterwards the thread reads by a counted
    // reference.
    ("src/sync/slots.rs", "RETURN"),
    // Frees the names that are still open when the thread ends.
    ("src/history/context.rs", "CLEAR_NAMES"),
    // Frees the cached blocks when the thread ends. Later calls of the thread go to the allocator below.
    ("src/layers/front/local.rs", "LOCAL"),
    // The text of the last error. Without it, a call of an ending thread still returns its status.
    ("crates/ffi/src/guard.rs", "LAST"),
];

/// Checks that thread-locals have no destructor or are on the list, and that `thread::current` is not
/// used.
pub(crate) fn usable_to_the_end(file: &Source) -> Vec<String> {
    let code = file.product_code();
    let mut found = Vec::new();
    let is_destroyed = |name: &str| DESTROYED.contains(&(file.path.as_str(), name));
    let mut inside = false;
    for (line, text) in &code {
        if text.contains("thread::current()") {
            found.push(file.at(*line, "an ending thread has no std::thread::current"));
        }
        inside |= text.contains("thread_local! {");
        let text = text.trim();
        if inside && let Some((name, value)) = declared(text) {
            if !is_destroyed(name) && !lasts(value) {
                found.push(
                    file.at(*line, &format!("{name} has a destructor; use threads::Lasting")),
                );
            }
        } else if inside && text == "}" {
            inside = false;
        }
    }
    for (_, name) in DESTROYED.iter().filter(|(path, _)| *path == file.path) {
        let member = format!("{name}.");
        for (line, text) in &code {
            let mut uses = text.match_indices(&member).map(|(at, used)| at + used.len());
            if uses.any(|at| !text[at..].starts_with("try_with(")) {
                found.push(file.at(*line, &format!("{name} is used by try_with only")));
            }
        }
    }
    found
}

/// Returns the name and the type of a thread-local.
fn declared(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.strip_prefix("static ")?.split_once(": ")?;
    Some((name, rest.split_once(" =").map_or(rest, |(value, _)| value)))
}

fn lasts(value: &str) -> bool {
    let cell = value.strip_prefix("Cell<").and_then(|inner| inner.strip_suffix('>'));
    cell.is_some_and(|inner| PLAIN.contains(&inner))
        || value.starts_with("Lasting<")
        // A list of names, which has no destructor either.
        || value == "NameList"
}

#[test]
fn what_an_ending_thread_has_no_more_is_seen() {
    let sees = |path: &str, text: &str| usable_to_the_end(&Source::new(path, text)).len();
    let local = |value: &str| format!("thread_local! {{\n    static A: {value} = x;\n}}\n");
    assert_eq!(sees("src/x.rs", &local("Cell<bool>")), 0);
    assert_eq!(sees("src/x.rs", &local("Lasting<Vec<u64>>")), 0);
    assert_eq!(sees("src/x.rs", &local("RefCell<Vec<u64>>")), 1);
    assert_eq!(sees("src/x.rs", &local("Cell<Option<Box<u64>>>")), 1);
    assert_eq!(sees("src/x.rs", "let a = std::thread::current().id();"), 1);
    let last = "thread_local! {\n    static LAST: RefCell<String> = x;\n}\n";
    assert_eq!(sees("crates/ffi/src/guard.rs", &format!("{last}LAST.try_with(f);")), 0);
    assert_eq!(sees("crates/ffi/src/guard.rs", &format!("{last}LAST.with_borrow(f);")), 1);
}
