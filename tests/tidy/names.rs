//! No decision depends on the name of a strategy. A method, a field of `Control` or a row of the registry
//! states the property instead, and the allocator that made a block answers for the block.

use super::source::{Source, files_in, root};

/// Folders in which a name may be compared: there a name selects the row or the keys of a strategy.
const HOMES: [&str; 2] = ["src/registry/", "src/config/"];

/// Returns the sources of the Python package: Python, and PyTorch's class in C++.
pub(crate) fn package_files() -> Vec<Source> {
    files_in(&root().join("python/stratalloc"), &["py", "cpp", "h", "hpp"])
}

/// Finds comparisons with the name of a built-in strategy.
pub(crate) fn compared(file: &Source) -> Vec<String> {
    if HOMES.iter().any(|home| file.path.starts_with(home)) {
        return Vec::new();
    }
    let is_rust = file.path.ends_with(".rs");
    let rust_lines = || file.product_code().into_iter().map(|(line, _)| line).collect();
    let lines: Vec<usize> =
        if is_rust { rust_lines() } else { (0..).take(lines_of(file)).collect() };
    let text: Vec<_> = file.text.lines().collect();
    let names = || stratalloc::registry::BUILT_IN.iter().flat_map(|own| [own.name, own.alias]);
    let bad = lines.into_iter().filter(|line| names().any(|name| compares(text[*line], name)));
    bad.map(|line| file.at(line, "a decision by the name of a strategy")).collect()
}

fn lines_of(file: &Source) -> usize {
    file.text.lines().count()
}

/// Returns true if a line compares a value with the literal `name`, or matches on it.
fn compares(line: &str, name: &str) -> bool {
    let is_comment = ["//", "#", "*"].iter().any(|mark| line.trim_start().starts_with(mark));
    let literals = [format!("\"{name}\""), format!("'{name}'")];
    let places = literals.iter().flat_map(|own| line.match_indices(own.as_str()));
    !is_comment
        && places.into_iter().any(|(at, literal)| {
            let (before, after) = (line[..at].trim_end(), line[at + literal.len()..].trim_start());
            ["==", "!=", "eq(", "with(", "contains(", "contains(&", "case"]
                .iter()
                .any(|end| before.ends_with(end))
                || ["==", "!=", ".equals("].iter().any(|start| after.starts_with(start))
                || [" in (", " in [", " in {", "matches!("].iter().any(|list| before.contains(list))
                || after.contains("=>")
        })
}

#[test]
fn a_comparison_with_a_name_is_found() {
    for bad in [
        "if handle.name() == \"pinned\" {",
        "if \"native\" != name {",
        "(\"cpu\", _) | (_, \"host\") => 1,",
        "matches!(name, \"native\" | \"cpu\")",
        "if backend in (\"native\", \"cudaMallocAsync\"):",
        "elif backend == 'pinned':",
    ] {
        assert_eq!(compared(&Source::new("src/handle/x.rs", bad)).len(), 1, "{bad}");
        assert_eq!(compared(&Source::new("python/stratalloc/x.py", bad)).len(), 1, "{bad}");
        assert_eq!(compared(&Source::new("src/registry/x.rs", bad)).len(), 0, "{bad}");
    }
    for good in ["fn name(&self) -> &str { \"pinned\" }", "(1, _) => \"cpu\",", "// == \"cpu\""] {
        assert_eq!(compared(&Source::new("src/handle/x.rs", good)), [""; 0], "{good}");
    }
}
