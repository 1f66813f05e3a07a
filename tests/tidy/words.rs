//! The words in comments: standard terms of the field, and no words that treat code as persons.

use super::source::Source;

/// Words that comments must not contain. Most of them treat code as a person; a comment uses "thread",
/// "caller" or "process" instead.
const WORDS: [&str; 21] = [
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "said",
    "says",
    "told",
    "tells",
    "anew",
    "meanwhile",
    "give back",
    "gives back",
    "given back",
    "gave back",
    "hands out",
    "handed out",
    "in vain",
    "for ever",
    "wears",
    "lets go",
    "who",
];

/// Finds the forbidden words in comments.
pub(crate) fn plain(file: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (line, text) in file.text.lines().enumerate() {
        let Some(comment) = text.trim_start().strip_prefix("//") else { continue };
        let comment = format!(
            " {} ",
            comment.to_lowercase().replace(|c: char| !c.is_alphanumeric() && c != '_', " ")
        );
        let words = WORDS.iter().filter(|word| comment.contains(&format!(" {word} ")));
        found.extend(words.map(|word| file.at(line, &format!("not plain English: {word}"))));
    }
    found
}

#[test]
fn a_comment_about_persons_is_seen() {
    let sees = |text: &str| plain(&Source::new("src/x.rs", text)).len();
    assert_eq!(sees("/// Whoever comes first hands out the block."), 2);
    assert_eq!(sees("let said = \"nobody\";"), 0);
    assert_eq!(sees("// Frees the block."), 0);
}
