//! Rules for docs: each begins as a sentence and ends as one. An edit that cuts a sentence shows here.

use super::source::Source;

/// A header or the docs of an item: the kind of comment, the line of its first text, and its lines.
struct Doc<'s> {
    kind: &'static str,
    line: usize,
    text: Vec<&'s str>,
}

/// Returns the headers and the docs of items of a file.
fn docs(file: &Source) -> Vec<Doc<'_>> {
    let mut docs: Vec<Doc<'_>> = Vec::new();
    let mut is_inside = false;
    for (line, text) in file.text.lines().enumerate() {
        let text = text.trim_start();
        let known =
            ["//!", "///"].into_iter().find_map(|kind| Some((kind, text.strip_prefix(kind)?)));
        let Some((kind, text)) = known.filter(|(_, text)| text.is_empty() || text.starts_with(' '))
        else {
            is_inside = false;
            continue;
        };
        match docs.last_mut().filter(|last| is_inside && last.kind == kind) {
            Some(last) => last.text.push(text.trim()),
            None => docs.push(Doc { kind, line, text: vec![text.trim()] }),
        }
        is_inside = true;
    }
    docs
}

/// Checks that docs begin with a capital, a digit, a code span or a mark of Markdown, and end with a full
/// stop, a question mark, a colon, a table, a list of links or code.
pub(crate) fn whole(file: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for Doc { line, text, .. } in docs(file) {
        let mut lines = (0..).zip(&text).filter(|(_, text)| !text.is_empty());
        let Some((at, first)) = lines.next() else {
            found.push(file.at(line, "docs without text"));
            continue;
        };
        if first.starts_with(char::is_lowercase) {
            found.push(file.at(line + at, "docs begin in the middle of a sentence"));
        }
        let (at, last) = lines.last().unwrap_or((at, first));
        let is_link = last.starts_with('[') && last.contains("]: ");
        let ends = [".", "?", ":", "|", "```", ".)"];
        if !is_link && !ends.iter().any(|end| last.ends_with(end)) {
            found.push(file.at(line + at, "docs end in the middle of a sentence"));
        }
    }
    found
}

#[test]
fn half_a_sentence_is_seen() {
    let sees = |text: &str| whole(&Source::new("x.rs", text));
    assert_eq!(
        sees("//! if they are small. Always 0.\n"),
        ["x.rs:1: docs begin in the middle of a sentence"]
    );
    let cut = "    /// Returns 1 if all is free,\n    /// and near\n    #[must_use]\n";
    assert_eq!(sees(cut), ["x.rs:2: docs end in the middle of a sentence"]);
    assert_eq!(sees("/// The first\nstruct A;\n/// second.\n").len(), 2);
    assert_eq!(sees("///\nfn a() {}\n").len(), 1);
    let good = "//! Text:\n//!\n//! ```\n//! code\n//! ```\n\n/// `x` is\n/// | a table |\nfn a() {} /// 3.\n//// no docs";
    assert_eq!(sees(good), [""; 0]);
}
