//! Rules for the text of every file.

use super::source::Source;

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 90;
const COMMENT_CHARS_MAX: usize = 110;

pub(crate) fn short_file(file: &Source) -> Vec<String> {
    let lines = file.text.lines().count();
    let long = lines > FILE_LINES_MAX;
    long.then(|| file.at(FILE_LINES_MAX, &format!("{lines} lines: split it"))).into_iter().collect()
}

/// Checks the length of functions. A function ends at the closing brace in the column of its `fn`, as
/// `rustfmt` formats it.
pub(crate) fn short_functions(file: &Source) -> Vec<String> {
    let code = file.code();
    let mut found = Vec::new();
    for (at, (line, text)) in code.iter().enumerate() {
        let indent = text.len() - text.trim_start().len();
        let mut words = text.split_whitespace();
        let before = ["pub", "const", "async", "extern", "\"\""];
        let is_function = words
            .find(|word| !before.contains(word) && !word.starts_with("pub("))
            .is_some_and(|word| word == "fn");
        if !is_function || text.trim_end().ends_with(';') || text.trim_end().ends_with('}') {
            continue;
        }
        let close = format!("{}}}", " ".repeat(indent));
        let end = code[at..].iter().position(|(_, text)| text.trim_end() == close);
        let lines = end.map_or(0, |end| end + 1);
        if lines > FUNCTION_LINES_MAX {
            found.push(file.at(*line, &format!("a function of {lines} lines: name its steps")));
        }
    }
    found
}

/// Checks that a file has a header comment. For a file of tests it may be short.
pub(crate) fn header(file: &Source) -> Vec<String> {
    let lines = file.text.lines().take_while(|line| line.starts_with("//!"));
    let header: String = lines.map(|line| line.trim_start_matches("//!")).collect();
    let words = header.split_whitespace().count();
    let least = if file.path.contains("/tests") { 1 } else { 4 };
    let few = words < least;
    few.then(|| file.at(0, "no //! header that explains the file")).into_iter().collect()
}

/// Checks the width of comments, which `rustfmt` does not change. Rows of tables are excluded, because
/// they cannot be broken.
pub(crate) fn short_comments(file: &Source) -> Vec<String> {
    let lines = file.text.lines().enumerate();
    let long = lines.filter(|(_, text)| {
        let comment = text.trim_start().trim_start_matches(['/', '!']);
        let is_comment = text.trim_start().starts_with("//") && !comment.starts_with(" |");
        is_comment && text.chars().count() > COMMENT_CHARS_MAX
    });
    long.map(|(line, _)| file.at(line, "a long line: break the comment")).collect()
}

/// Finds banners, marks of unfinished work, and tests that never run.
pub(crate) fn leftovers(file: &Source) -> Vec<String> {
    let mut found = Vec::new();
    // The words are assembled from parts, so that this file does not contain them.
    let unfinished = ["TO", "FIX", "XX"].into_iter().zip(["DO", "ME", "X"]);
    let unfinished: Vec<_> = unfinished.map(|(a, b)| [a, b].concat()).collect();
    for (line, text) in file.text.lines().enumerate() {
        let comment = text.find("//").map(|at| text[at..].trim_start_matches(['/', '!', ' ']));
        let drawn = |c: char| matches!(c, '-' | '=' | '*' | '#' | '~' | '_' | '─' | '━');
        if let Some(comment) = comment {
            let length = comment.chars().take_while(|c| drawn(*c)).count();
            if length >= 5 && !text.contains('|') {
                found.push(file.at(line, "a banner: a missing module"));
            }
        }
        let word = |mark: &String| {
            text.split(|c: char| !c.is_alphanumeric()).any(|word| word == mark.as_str())
        };
        if unfinished.iter().any(word) {
            found.push(file.at(line, "unfinished work"));
        }
    }
    for (line, code) in file.code() {
        if ["todo!", "unimplemented!", "dbg!"].iter().any(|call| code.contains(call)) {
            found.push(file.at(line, "unfinished work"));
        }
        if code.contains("#[ignore") {
            found.push(file.at(line, "a test that never runs"));
        }
    }
    found
}

/// Checks that `allow` and `expect` have a reason.
pub(crate) fn reasons(file: &Source) -> Vec<String> {
    let code = file.code();
    let mut found = Vec::new();
    for (at, (line, text)) in code.iter().enumerate() {
        let attribute = text.trim_start();
        let opens = ["#[allow(", "#![allow(", "#[expect(", "#![expect("];
        if !opens.iter().any(|open| attribute.starts_with(open)) {
            continue;
        }
        let lines = code[at..].iter().map(|(_, text)| text.as_str());
        let end = lines.clone().position(|text| text.trim_end().ends_with(']')).unwrap_or(0);
        if !lines.take(end + 1).any(|text| text.contains("reason = ")) {
            found.push(file.at(*line, "a silenced lint without a reason"));
        }
    }
    found
}

pub(crate) fn unwraps(file: &Source) -> Vec<String> {
    let code = file.product_code().into_iter();
    let bad = code.filter(|(_, code)| code.contains(".unwrap()") || code.contains(".unwrap_err()"));
    bad.map(|(line, _)| file.at(line, "expect, with the invariant's name, or an error")).collect()
}

#[test]
fn a_long_file_and_a_long_function_are_seen() {
    let file = |lines: usize| Source::new("src/x.rs", &"x\n".repeat(lines));
    assert_eq!(short_file(&file(FILE_LINES_MAX)).len(), 0);
    assert_eq!(short_file(&file(FILE_LINES_MAX + 1)).len(), 1);
    let function = |lines: usize| {
        let body = "        step();\n".repeat(lines);
        let text = format!("impl A {{\n    pub(super) const fn f() {{\n{body}    }}\n}}\n");
        short_functions(&Source::new("strategies/native/x.rs", &text)).len()
    };
    assert_eq!(function(FUNCTION_LINES_MAX - 2), 0);
    assert_eq!(function(FUNCTION_LINES_MAX - 1), 1);
}

#[test]
fn a_long_comment_is_seen() {
    let sees = |text: &str| short_comments(&Source::new("src/x.rs", text)).len();
    let words = "x".repeat(COMMENT_CHARS_MAX - 7);
    assert_eq!(sees(&format!("    // {words}\n")), 0);
    assert_eq!(sees(&format!("    /// {words}\n    //! {words}\n")), 2);
    assert_eq!(sees(&format!("    //! | {words} |\n    let a = \"{words}\";\n")), 0);
}

#[test]
fn a_file_without_a_header_is_seen() {
    let sees = |text: &str| header(&Source::new("src/x.rs", text)).len();
    assert_eq!(sees("use std::fmt;\n"), 1);
    assert_eq!(sees("//! Pool module.\n"), 1);
    assert_eq!(sees("//!\n"), 1);
    assert_eq!(header(&Source::new("src/heap/tests.rs", "use super::*;\n")).len(), 1);
    assert_eq!(sees("//! Free blocks of one kind, ordered.\n"), 0);
}

#[test]
fn banners_and_leftovers_are_seen() {
    let sees = |text: &str| leftovers(&Source::new("src/x.rs", text)).len();
    let mark = ["TO", "DO"].concat();
    for bad in [
        &format!("// {0} pool {0}", "-".repeat(10)),
        &format!("    // {}", "=".repeat(5)),
        &format!("//! {}", "#".repeat(6)),
        &format!("// {mark}: later"),
        &format!("let a = b; // {mark}(me)"),
        "fn f() { todo!() }",
        "unimplemented!(\"x\")",
        "#[ignore = \"slow\"]",
    ] {
        assert_eq!(sees(bad), 1, "{bad}");
    }
    for good in ["// A dash - here.", "//! |-----|------|", "let todos = 1;", "// ignore it"] {
        assert_eq!(sees(good), 0, "{good}");
    }
}

#[test]
fn a_silenced_lint_without_a_reason_is_seen() {
    let sees = |text: &str| reasons(&Source::new("src/x.rs", text)).len();
    assert_eq!(sees("#[allow(dead_code)]"), 1);
    assert_eq!(sees("#![expect(\n    dead_code,\n    unused\n)]\nlet reason = 1;"), 1);
    assert_eq!(sees("#[allow(dead_code, reason = \"x\")]"), 0);
    assert_eq!(sees("#[expect(\n    dead_code,\n    reason = \"x\"\n)]"), 0);
    assert_eq!(sees("// #[allow(dead_code)]\nself.allow(x)"), 0);
}

#[test]
fn an_unwrap_is_seen_outside_tests_only() {
    let sees = |path: &str, text: &str| unwraps(&Source::new(path, text)).len();
    assert_eq!(sees("src/x.rs", "a.unwrap();"), 1);
    assert_eq!(sees("src/x.rs", "a.unwrap_or(1); // .unwrap()"), 0);
    assert_eq!(sees("src/x.rs", "#[cfg(test)]\nmod tests {\n    a.unwrap();\n}"), 0);
    assert_eq!(sees("src/heap/tests.rs", "a.unwrap();"), 0);
}
