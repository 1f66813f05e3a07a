//! Source files in the form that the rules use: path, text, and lines without comments and literals.
//!
//! This is not a full parser. It recognizes line comments, block comments, strings, characters and raw
//! strings in text formatted by `rustfmt`.

use std::fs;
use std::path::{Path, PathBuf};

/// A source file.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path relative to the repository, with `/` between folders.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Returns the repository's folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns every Rust file of the repository.
pub(crate) fn rust_files() -> Vec<Source> {
    let folders =
        ["src", "strategies", "crates", "tests", "benches", "examples", "fuzz/fuzz_targets"];
    let files: Vec<_> =
        folders.iter().flat_map(|folder| files_in(&root().join(folder), &["rs"])).collect();
    assert!(files.len() > 40, "only {} files found", files.len());
    files
}

/// Returns the files with these extensions in a folder and its subfolders.
pub(crate) fn files_in(folder: &Path, extensions: &[&str]) -> Vec<Source> {
    let mut files = Vec::new();
    collect(folder, extensions, &mut files);
    files
}

fn collect(folder: &Path, extensions: &[&str], files: &mut Vec<Source>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.expect("a folder that opened can be listed").path();
        if path.is_dir() {
            collect(&path, extensions, files);
        } else if extensions.iter().any(|one| path.extension().is_some_and(|own| own == *one)) {
            let text = fs::read_to_string(&path).expect("sources are UTF-8");
            let inside = path.strip_prefix(root()).expect("found under the root");
            let parts: Vec<_> = inside.iter().map(|part| part.to_string_lossy()).collect();
            files.push(Source { path: parts.join("/"), text });
        }
    }
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// Formats a complaint about a line; `line` is counted from 0.
    pub(crate) fn at(&self, line: usize, what: &str) -> String {
        format!("{}:{}: {what}", self.path, line + 1)
    }

    /// Returns the lines without comments and without the text of literals, numbered from 0.
    pub(crate) fn code(&self) -> Vec<(usize, String)> {
        let mut inside = Inside::Code;
        let lines = self.text.lines().enumerate();
        lines.map(|(number, line)| (number, strip(line, &mut inside))).collect()
    }

    /// Returns [`code`](Self::code) up to the first test module. Returns nothing for a file of tests.
    pub(crate) fn product_code(&self) -> Vec<(usize, String)> {
        if self.path.ends_with("/tests.rs") || self.path.contains("/tests/") {
            return Vec::new();
        }
        let code = self.code();
        let is_test_module = |at: usize| {
            code[at].1.trim() == "#[cfg(test)]"
                && code.get(at + 1).is_some_and(|(_, next)| {
                    let next = next.trim_start();
                    next.starts_with("mod ") && next.ends_with('{')
                })
        };
        let end = (0..code.len()).find(|&at| is_test_module(at)).unwrap_or(code.len());
        code[..end].to_vec()
    }
}

/// The state at the beginning of a line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inside {
    Code,
    Text,
    /// A raw string that ends with a quote and this many hashes.
    RawText(usize),
    Comment,
}

fn strip(line: &str, inside: &mut Inside) -> String {
    let bytes = line.as_bytes();
    let mut kept = String::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &line[at..];
        let step = rest.chars().next().map_or(1, char::len_utf8);
        match *inside {
            Inside::Text if rest.starts_with('\\') => at += 2,
            Inside::Text => {
                if rest.starts_with('"') {
                    *inside = Inside::Code;
                    kept.push('"');
                }
                at += step;
            }
            Inside::RawText(hashes) => {
                let end = format!("\"{}", "#".repeat(hashes));
                if rest.starts_with(&end) {
                    *inside = Inside::Code;
                    at += end.len();
                } else {
                    at += step;
                }
            }
            Inside::Comment => {
                if rest.starts_with("*/") {
                    *inside = Inside::Code;
                    at += 2;
                } else {
                    at += step;
                }
            }
            Inside::Code if rest.starts_with("//") => return kept,
            Inside::Code if rest.starts_with("/*") => {
                *inside = Inside::Comment;
                at += 2;
            }
            Inside::Code if rest.starts_with("r\"") || rest.starts_with("r#") => {
                let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
                if rest[1 + hashes..].starts_with('"') {
                    *inside = Inside::RawText(hashes);
                    at += 2 + hashes;
                } else {
                    kept.push('r');
                    at += 1;
                }
            }
            Inside::Code if rest.starts_with('"') => {
                *inside = Inside::Text;
                kept.push('"');
                at += 1;
            }
            Inside::Code if rest.starts_with('\'') => at += character(rest, &mut kept),
            Inside::Code => {
                kept.push_str(&rest[..step]);
                at += step;
            }
        }
    }
    kept
}

/// Returns the length of the character literal at the start of `rest`, or 1 if the quote begins a
/// lifetime.
fn character(rest: &str, kept: &mut String) -> usize {
    let mut chars = rest.char_indices().skip(1);
    let first = chars.next();
    let close = match first {
        Some((_, '\\')) => {
            rest[2..].char_indices().skip(1).find(|(_, c)| *c == '\'').map(|f| f.0 + 2)
        }
        Some(_) => chars.next().filter(|(_, c)| *c == '\'').map(|(at, _)| at),
        None => None,
    };
    kept.push('\'');
    close.map_or(1, |at| at + 1)
}

#[test]
fn comments_and_literals_are_not_code() {
    let text = "let a = \"unsafe // no\"; // unsafe\nlet b = '\"'; /* unsafe */ c::<'a>();\n\
                let d = r#\"unsafe\"#; e('\\'');\n\"one\ntwo unsafe\" end\n";
    let code: Vec<_> = Source::new("x.rs", text).code().into_iter().map(|(_, line)| line).collect();
    assert_eq!(
        code,
        ["let a = \"\"; ", "let b = ';  c::<'a>();", "let d = ; e(');", "\"", "\" end"]
    );
}

#[test]
fn product_code_ends_where_the_test_module_begins() {
    let text = "fn a() {}\n#[cfg(test)]\nmod far;\nfn b() {}\n#[cfg(test)]\nmod tests {\n}\n";
    assert_eq!(Source::new("src/x.rs", text).product_code().len(), 4);
    assert_eq!(Source::new("src/heap/tests.rs", text).product_code().len(), 0);
}
