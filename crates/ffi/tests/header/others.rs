//! Generates from the header the declarations for Python's ctypes, and the list of functions for the
//! subclass of PyTorch's allocator.

use std::collections::BTreeSet;
use std::fmt::Write as _;

const MADE: &str = "Made by tests/header.rs from include/stratalloc.h; do not edit.";

const IMPORTS: &str = "\
import enum
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
";

/// A C value: a field, a parameter, or a result.
struct Value {
    base: String,
    stars: usize,
    name: String,
    /// The length of an array.
    length: Option<String>,
}

impl Value {
    /// Reads `const char *name`, or `uint64_t name[16]`.
    fn read(text: &str) -> Self {
        let stars = text.matches('*').count();
        let text = text.replace('*', " ").replace("const ", " ");
        let mut words = text.split_whitespace();
        let base = words.next().unwrap_or_default().to_owned();
        let name = words.next().unwrap_or_default();
        let (name, length) = match name.split_once('[') {
            Some((name, length)) => (name, Some(length.trim_end_matches(']').to_owned())),
            None => (name, None),
        };
        Self { base, stars, name: name.to_owned(), length }
    }

    /// Returns the name of the type in `ctypes`. A callback as parameter is `c_void_p`, and may be `None`.
    fn ctype(&self, header: &Header<'_>, is_field: bool) -> String {
        let known = header.is_known(&self.base);
        let base = match self.base.as_str() {
            "void" | "char" => String::new(),
            "stratalloc_status" => "c_int".to_owned(),
            "size_t" => "c_size_t".to_owned(),
            other if other.starts_with("stratalloc_") => camel(other),
            other => format!("c_{}", other.trim_end_matches("_t")),
        };
        let pointer = if self.base == "char" { "c_char_p" } else { "c_void_p" };
        let is_plain = base.is_empty() || !known;
        match (self.stars, &self.length) {
            (0, _) if self.base == "void" => "None".to_owned(),
            (0, _) if !known || header.is_callback(&self.base) && !is_field => {
                "c_void_p".to_owned()
            }
            (0, Some(length)) => format!("{base} * {length}"),
            (0, None) => base,
            (1, _) if is_plain => pointer.to_owned(),
            (2, _) if is_plain => format!("POINTER({pointer})"),
            _ => format!("POINTER({base})"),
        }
    }
}

/// Returns the Python name of a type: `CacheInfo` for `stratalloc_cache_info_t`.
fn camel(name: &str) -> String {
    let words = name.trim_start_matches("stratalloc_").trim_end_matches("_t").split('_');
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// The declarations of a header, in order, each on one line.
struct Header<'a> {
    declarations: Vec<&'a str>,
}

impl Header<'_> {
    /// Returns true if the type gets a declaration in Python: if it is not opaque.
    fn is_known(&self, base: &str) -> bool {
        let opaque = format!("typedef struct {base} {base}");
        !self.declarations.contains(&opaque.as_str())
    }

    fn is_callback(&self, base: &str) -> bool {
        let named = format!("(*{base})(");
        self.declarations.iter().any(|declaration| declaration.contains(&named))
    }

    /// Returns the result and the parameters as types of `ctypes`.
    fn signature(&self, result: &str, parameters: &str) -> (String, Vec<String>) {
        assert!(!parameters.contains('('), "{parameters}: name the type of the function");
        let values = parameters.split(',').map(Value::read).filter(|value| !value.name.is_empty());
        let parameters = values.map(|value| value.ctype(self, false)).collect();
        (Value::read(result).ctype(self, false), parameters)
    }

    /// Parses a function pointer such as `void (*name)(int a)`. Returns its name and type.
    fn callback(&self, declaration: &str) -> Option<(String, String)> {
        let (result, rest) = declaration.split_once("(*")?;
        let (name, parameters) = rest.split_once(")(")?;
        let (result, parameters) = self.signature(result, parameters.trim_end_matches(')'));
        let types = [vec![result], parameters].concat().join(", ");
        Some((name.to_owned(), format!("CFUNCTYPE({types})")))
    }

    fn field(&self, declaration: &str) -> (String, String) {
        self.callback(declaration).unwrap_or_else(|| {
            let value = Value::read(declaration);
            let ctype = value.ctype(self, true);
            (value.name, ctype)
        })
    }

    /// Returns the exported functions, with result and parameters.
    fn functions(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.declarations.iter().filter_map(|declaration| {
            let (head, parameters) = declaration.split_once('(')?;
            let at = head.find("stratalloc_").filter(|_| !head.starts_with("typedef"))?;
            let at = head[at..].rfind("stratalloc_").map_or(at, |last| at + last);
            Some((&head[at..], &head[..at], parameters.trim_end_matches(')')))
        })
    }
}

/// Parses the header, and calls `read` with it.
fn with_header<R>(text: &str, read: impl FnOnce(&Header<'_>) -> R) -> R {
    let is_code = |line: &&str| !line.trim_start().starts_with("//") && !line.starts_with('#');
    let code: Vec<&str> = text.lines().skip(1).filter(is_code).collect();
    let code = code.join(" ").replace("extern \"C\" {", "").replace("}  // extern \"C\"", "");
    // A `;` inside braces separates fields and does not end the declaration. It is replaced by `|`.
    let mut joined = String::new();
    let mut depth = 0;
    for c in code.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        joined.push(if c == ';' && depth > 0 { '|' } else { c });
    }
    let words = joined.split(';').map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let declarations: Vec<String> = words.filter(|part| !part.is_empty()).collect();
    read(&Header { declarations: declarations.iter().map(String::as_str).collect() })
}

/// Returns the text of `python/stratalloc/_calls.py`.
pub(crate) fn python(text: &str) -> String {
    with_header(text, |header| {
        let mut out = format!("\"\"\"{MADE}\"\"\"\n\n{IMPORTS}");
        for declaration in &header.declarations {
            let Some(typedef) = declaration.strip_prefix("typedef ") else { continue };
            let braces = typedef.split_once('{').zip(typedef.rsplit_once('}'));
            let inside = braces.map(|((_, from), (_, name))| {
                (camel(name.trim()), &from[..from.rfind('}').unwrap_or(0)])
            });
            match inside {
                Some((name, inside)) if typedef.starts_with("enum") => {
                    let prefix = format!("STRATALLOC_{}_", name.to_uppercase());
                    let _ = write!(out, "\n\nclass {name}(enum.IntEnum):\n");
                    for value in inside.split(',').map(str::trim).filter(|value| !value.is_empty())
                    {
                        let _ = writeln!(out, "    {}", value.trim_start_matches(&prefix));
                    }
                }
                Some((name, inside)) => {
                    let _ = write!(out, "\n\nclass {name}(Structure):\n    _fields_ = [\n");
                    for field in inside.split('|').map(str::trim).filter(|field| !field.is_empty())
                    {
                        let (name, ctype) = header.field(field);
                        let _ = writeln!(out, "        (\"{name}\", {ctype}),");
                    }
                    out.push_str("    ]\n");
                }
                None => {
                    if let Some((name, ctype)) = header.callback(typedef) {
                        let _ = write!(out, "\n\n{} = {ctype}\n", camel(&name));
                    }
                }
            }
        }
        out.push_str("\n\n# Result and arguments of every function.\nCALLS = {\n");
        for (name, result, parameters) in header.functions() {
            let (result, parameters) = header.signature(result, parameters);
            let _ = writeln!(out, "    \"{name}\": ({result}, [{}]),", parameters.join(", "));
        }
        out + "}\n"
    })
}

/// Returns the text of `python/stratalloc/csrc/calls.h`: the functions that `sources` (those of the
/// subclass) call.
pub(crate) fn macro_list(text: &str, sources: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let called = sources.split("library.").skip(1);
    let called: BTreeSet<&str> =
        called.filter_map(|rest| rest.split(|c| !is_word(c)).next()).collect();
    with_header(text, |header| {
        let names = header.functions().map(|(name, ..)| name.trim_start_matches("stratalloc_"));
        let names = names.filter(|name| called.contains(name));
        let lines: Vec<String> = names.map(|name| format!("  X({name})")).collect();
        let list = lines.join(" \\\n");
        format!("// {MADE}\n#pragma once\n\n#define STRATALLOC_FUNCTIONS(X) \\\n{list}\n")
    })
}
