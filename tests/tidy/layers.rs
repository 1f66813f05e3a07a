//! Which layers may use which others.

use super::source::Source;

/// A layer, and the layers that its files may use, in the order of `ARCHITECTURE.md`: itself and every
/// earlier layer in the list, except those under `never`.
struct Layer {
    name: &'static str,
    never: &'static [&'static str],
    /// Later layers that it may use too. A comment gives the reason.
    also: &'static [&'static str],
}

const fn layer(name: &'static str) -> Layer {
    Layer { name, never: &[], also: &[] }
}

const LAYERS: [Layer; 27] = [
    layer("size"),
    layer("ids"),
    Layer { never: &["ids"], ..layer("limit") },
    Layer { never: &["size"], ..layer("threads") },
    // Log lines are plain text, so this layer uses no sizes or ids.
    Layer { never: &["size", "ids"], ..layer("diagnostics") },
    // Paths and bytes, whatever they mean.
    Layer { never: &["size", "ids", "limit", "threads", "diagnostics"], ..layer("files") },
    // The error of a failed free returns the allocation.
    Layer { also: &["allocator"], ..layer("error") },
    Layer { never: &["error"], ..layer("config") },
    Layer { never: &["config"], ..layer("driver") },
    // Host memory from the system, for tags, `backend:cpu` and `backend:pinned`.
    Layer { never: &["config"], ..layer("system") },
    // The layer only transfers bytes and descriptors between processes, whatever they mean.
    Layer { never: &["config", "driver"], ..layer("sharing") },
    Layer { never: &["config", "driver", "error", "sharing"], ..layer("heap") },
    // The ledger's lock is one of `sync`.
    Layer { never: &["config", "driver", "sharing"], also: &["sync"], ..layer("stats") },
    // `history` walks stacks with a lock-free structure of `sync`.
    Layer { never: &["driver", "sharing", "heap", "stats"], also: &["sync"], ..layer("history") },
    // Tracepoints have only numbers as arguments.
    Layer { never: &["driver", "heap", "stats"], ..layer("tracepoints") },
    Layer { never: &["driver", "heap"], ..layer("allocator") },
    Layer { never: &["config", "driver", "sharing", "heap", "stats"], ..layer("sync") },
    Layer { never: &["config", "driver", "sharing", "heap", "stats"], ..layer("live_blocks") },
    // A table of live blocks with counters, for authors of strategies.
    Layer { never: &["config", "driver", "sharing", "heap"], ..layer("blocks") },
    // Reports of requests that got no memory, for strategies that ask the driver for each block.
    Layer { never: &["config", "sharing", "heap", "history"], ..layer("refusal") },
    // Blocks that wait for streams. All strategies that defer frees share this code.
    Layer {
        never: &["config", "sharing", "heap", "stats", "history", "allocator"],
        ..layer("event_queue")
    },
    // Routing of requests and detection of captures. All strategies share this code.
    Layer { never: &["config", "sharing", "heap", "stats"], ..layer("scopes") },
    layer("layers"),
    layer("strategies"),
    layer("registry"),
    layer("switch"),
    layer("handle"),
];

/// Returns the layer of a file: the name of its folder under `src/`, or of the file itself.
fn layer_of(path: &str) -> Option<&str> {
    if path.starts_with("strategies/") {
        return Some("strategies");
    }
    let inside = path.strip_prefix("src/")?;
    match inside.split_once('/') {
        // A separate program, which uses the library from outside.
        Some(("bin", _)) => None,
        Some((folder, _)) => Some(folder),
        None => inside.strip_suffix(".rs").filter(|name| *name != "lib"),
    }
}

/// The files and folders of `crates/ffi/src` in the order of `ARCHITECTURE.md`: each uses only earlier ones.
/// The functions for PyTorch are the last, so no other file uses them.
const FFI: [&str; 26] = [
    "gate",
    "guard",
    "pointers",
    "user_data",
    "messages",
    "device",
    "uncached",
    "advice",
    "instance",
    "table",
    "fork",
    "devices",
    "calls",
    "figures",
    "host",
    "text",
    "pools",
    "checkpoints",
    "tags",
    "sharing",
    "dlpack",
    "history",
    "snapshots",
    "hooks",
    "libraries",
    "torch",
];

/// Returns the layers that a file uses as `root::layer`, each with its line. Also finds those in a `use
/// root::{...}` over several lines. A use of everything counts as the layer `*`.
fn used(file: &Source, root: &str) -> Vec<(usize, String)> {
    let lines: Vec<_> = file.product_code().into_iter().map(|(_, code)| code).collect();
    let text = lines.join("\n");
    let mut found = Vec::new();
    for (at, path) in text.match_indices(root) {
        let line = text[..at].matches('\n').count();
        let rest = &text[at + path.len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(first_names(list).into_iter().map(|name| (line, name))),
            None => found.extend(first_name(rest).map(|name| (line, name))),
        }
    }
    found
}

/// Returns the first name of `path`, or `None` if it is a macro.
fn first_name(path: &str) -> Option<String> {
    let path = path.trim_start();
    let is_part = |c: &char| c.is_alphanumeric() || ['_', '*'].contains(c);
    let name: String = path.chars().take_while(is_part).collect();
    (!name.is_empty() && !path[name.len()..].starts_with('!')).then_some(name)
}

/// Returns the first name of each path in a list, up to the brace that closes the list.
fn first_names(list: &str) -> Vec<String> {
    let (mut depth, mut starts) = (1, vec![0]);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => starts.push(at + 1),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    starts.into_iter().filter_map(|start| first_name(&list[start..])).collect()
}

/// Checks that a file uses only its own layer and those that `LAYERS` allows.
pub(crate) fn imports(file: &Source) -> Vec<String> {
    let Some(own) = layer_of(&file.path) else {
        return Vec::new();
    };
    let place = |name: &str| LAYERS.iter().position(|layer| layer.name == name);
    let Some(at) = place(own) else {
        return vec![
            file.at(0, &format!("{own} is no layer; name it in ARCHITECTURE.md and here")),
        ];
    };
    let layer = &LAYERS[at];
    let legal = |name: &str| {
        name == own
            || layer.also.contains(&name)
            || place(name).is_some_and(|other| other < at && !layer.never.contains(&name))
    };
    let used = used(file, "crate::").into_iter().filter(|(_, name)| !legal(name));
    used.map(|(line, name)| file.at(line, &format!("{own} may not use {name}"))).collect()
}

/// Checks that a file of the C library uses only earlier ones, and none of their names through `lib.rs`.
pub(crate) fn ffi_imports(file: &Source) -> Vec<String> {
    let inside = file.path.strip_prefix("crates/ffi/src/").unwrap_or(&file.path);
    let own = inside.split(['/', '.']).next().unwrap_or_default();
    let place = |name: &str| FFI.iter().position(|other| *other == name);
    let at = match place(own) {
        // `super` is the folder itself in its files, and every other file is earlier.
        Some(at) if at == FFI.len() - 1 => return Vec::new(),
        Some(at) => at,
        None if ["lib", "tests"].contains(&own) => return Vec::new(),
        None => return vec![file.at(0, &format!("{own} has no place in the order of crates/ffi"))],
    };
    let roots = ["super::", "crate::"].into_iter();
    roots
        .flat_map(|root| used(file, root))
        .filter(|(_, name)| place(name).is_none_or(|other| other >= at))
        .map(|(line, name)| file.at(line, &format!("{own} may not use {name}")))
        .collect()
}

/// Checks that `heap/` uses no driver, lock, atomic or `Arc`.
pub(crate) fn heap_is_pure(file: &Source) -> Vec<String> {
    words(file, &["driver", "Driver", "Mutex", "RwLock", "parking_lot", "Atomic", "Arc"])
}

/// Checks that no strategy uses another strategy's file, the list of all strategies or the registry. A
/// strategy of several files has a folder, whose files may use each other.
pub(crate) fn strategies_apart(file: &Source) -> Vec<String> {
    if file.path == "strategies/mod.rs" {
        return Vec::new();
    }
    // Inside a strategy's own folder `super` is the strategy itself.
    let own_file = file.path.matches('/').count() > 1 && !file.path.ends_with("/mod.rs");
    let up = if own_file { "super::super" } else { "super" };
    words(file, &[up, "crate::strategies", "crate::registry"])
}

/// The names by which code reaches the machine: threads, clocks, files and the terminal.
const MACHINE: [&str; 14] = [
    "thread",
    "rayon",
    "Instant",
    "SystemTime",
    "fs",
    "File",
    "OpenOptions",
    "stdout",
    "stderr",
    "print",
    "println",
    "eprint",
    "eprintln",
    "dbg",
];

/// Returns true for the sources of the packages below the views.
pub(crate) fn below_the_views(path: &str) -> bool {
    ["recording", "analysis"].iter().any(|name| path.starts_with(&format!("crates/{name}/src/")))
}

/// Checks that a file below the views reaches the machine only through `Progress`.
pub(crate) fn no_machine(file: &Source) -> Vec<String> {
    // `reader::read` opens the file at a path, for tests and small programs; all else is given bytes.
    let names: Vec<&str> = match file.path.as_str() {
        "crates/recording/src/reader/mod.rs" => {
            MACHINE.into_iter().filter(|name| !["fs", "File"].contains(name)).collect()
        }
        _ => MACHINE.to_vec(),
    };
    words(file, &names)
}

/// The packages of the tools, and the packages of the workspace that each may use, in the order of
/// `ARCHITECTURE.md`.
pub(crate) const PACKAGES: [(&str, &[&str]); 5] = [
    ("recording", &["sim"]),
    ("analysis", &["sim", "recording"]),
    ("page", &["sim", "recording", "analysis"]),
    ("cli", &["sim", "recording", "analysis", "page"]),
    ("ffi", &["sim", "recording", "analysis"]),
];

/// Checks that a package uses no others of the workspace than these, and below the command line no threads.
/// Its tests may use more.
pub(crate) fn packages(name: &str, manifest: &str, may_use: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_dependency = false;
    for line in manifest.lines() {
        let mut package = line.split([' ', '=', '.']).next().unwrap_or_default();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            let (before, named) = section.rsplit_once("dependencies").unwrap_or((section, ""));
            is_dependency = section.contains("dependencies") && !before.ends_with("dev-");
            package = named.trim_start_matches('.');
        }
        if !is_dependency {
            continue;
        }
        let own = package.strip_prefix("stratalloc-");
        let is_thread = package == "rayon" && ["recording", "analysis", "page"].contains(&name);
        if is_thread || own.is_some_and(|own| !may_use.contains(&own)) {
            found.push(format!("{name} may not depend on {package}"));
        }
    }
    found
}

/// The files and folders with unsafe code, in the order of `ARCHITECTURE.md` and `CONTRIBUTING.md`.
pub(crate) const UNSAFE: [&str; 10] = [
    "src/driver/cuda",
    "strategies/pluggable/plugin",
    "src/system",
    "src/sync",
    "src/heap/at",
    "src/allocator/halves",
    "src/handle/dlpack",
    "crates/sim/src/host",
    "crates/ffi/src",
    "crates/account/src",
];

/// Checks that `unsafe` occurs only in the listed places.
pub(crate) fn unsafe_allowed_in(file: &Source) -> Vec<String> {
    let at_home = |home: &str| {
        let rest = file.path.strip_prefix(home);
        rest.is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
    };
    if UNSAFE.into_iter().any(at_home) {
        return Vec::new();
    }
    let mut found = words(file, &["unsafe"]);
    let allowed = file.code().into_iter().filter(|(_, code)| code.contains("(unsafe_code"));
    found.extend(allowed.map(|(line, _)| file.at(line, "unsafe code is not allowed here")));
    found
}

/// Returns complaints about words in the product code of a file. Only `Atomic` also matches as a prefix.
fn words(file: &Source, forbidden: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (line, code) in file.product_code() {
        for word in forbidden {
            let whole = code.match_indices(word).any(|(at, _)| {
                let part = |c: char| c.is_alphanumeric() || c == '_';
                let starts = !code[..at].ends_with(part);
                starts && (*word == "Atomic" || !code[at + word.len()..].starts_with(part))
            });
            if whole {
                found.push(file.at(line, &format!("{word} does not belong here")));
            }
        }
    }
    found
}

#[test]
fn a_file_that_reaches_to_the_right_is_seen() {
    let sees = |path: &str, text: &str| imports(&Source::new(path, text)).len();
    assert_eq!(sees("src/heap/mod.rs", "use crate::driver::Driver;"), 1);
    assert_eq!(sees("src/heap/mod.rs", "use crate::size::MIB;\nuse crate::ids::StreamId;"), 0);
    assert_eq!(sees("src/size.rs", "fn f() -> crate::strategies::native::Engine {}"), 1);
    assert_eq!(sees("src/stats/report.rs", "use crate::heap::HandOut;"), 0);
    assert_eq!(sees("src/error.rs", "use crate::allocator::Allocation;"), 0);
    assert_eq!(sees("src/allocator.rs", "use crate::driver::Driver;"), 1);
    assert_eq!(sees("src/layers/stack.rs", "use crate::strategies::Strategy;"), 1);
    assert_eq!(sees("strategies/native.rs", "use crate::{registry, stats::{Usage, replay}};"), 1);
    let several =
        "use crate::{\n    stats::Usage,\n    replay::{\n        run,\n    },\n    ids,\n};";
    assert_eq!(sees("strategies/native.rs", several), 1);
    assert_eq!(
        sees(
            "src/driver/mod.rs",
            "/// See crate::strategies::native.\n// crate::strategies::native"
        ),
        0
    );
    assert_eq!(sees("src/driver/mod.rs", "crate::driver::forward!(x);"), 0);
    assert_eq!(sees("src/novel/mod.rs", ""), 1);
    assert_eq!(sees("src/bin/stratalloc.rs", "use crate::output;"), 0);
}

#[test]
fn a_file_of_the_c_library_that_uses_a_later_one_is_seen() {
    let sees = |name: &str, text: &str| {
        ffi_imports(&Source::new(&format!("crates/ffi/src/{name}"), text)).len()
    };
    assert_eq!(sees("table.rs", "use super::torch;"), 1);
    assert_eq!(sees("table.rs", "use super::{guard, torch::find, user_data};"), 1);
    assert_eq!(sees("libraries.rs", "let open = crate::torch::open_device(0);"), 1);
    assert_eq!(sees("instance.rs", "super::fork::prepare_for();"), 1);
    assert_eq!(sees("text.rs", "use super::stratalloc_torch_malloc;"), 1, "through lib.rs");
    assert_eq!(sees("text.rs", "use super::*;"), 1, "through lib.rs");
    assert_eq!(sees("novel.rs", ""), 1);
    assert_eq!(sees("table.rs", "use super::{instance::Instance, user_data};\n// super::torch"), 0);
    assert_eq!(sees("torch/class.rs", "use super::not_ours;\nuse crate::table;"), 0);
    assert_eq!(sees("lib.rs", "mod torch;"), 0);
    assert_eq!(sees("tests/alone.rs", "use super::create;"), 0);
}

#[test]
fn an_impure_heap_is_seen() {
    let sees = |text: &str| heap_is_pure(&Source::new("src/heap/x.rs", text)).len();
    for bad in ["use std::sync::Mutex;", "let a: AtomicU32;", "fn f(d: &Driver) {}"] {
        assert_eq!(sees(bad), 1, "{bad}");
    }
    assert_eq!(sees("// Mutex, unsafe, driver\nlet drivers = \"driver\"; let arch = 1;"), 0);
}

#[test]
fn a_strategy_that_leans_on_another_is_seen() {
    let sees = |path: &str, text: &str| strategies_apart(&Source::new(path, text)).len();
    assert_eq!(sees("strategies/a.rs", "use super::native::Engine;"), 1);
    assert_eq!(sees("strategies/a.rs", "use crate::strategies::Engine;"), 1);
    assert_eq!(sees("strategies/a.rs", "use crate::heap::Heap;"), 0);
    assert_eq!(sees("strategies/mod.rs", "use super::x;"), 0);
    assert_eq!(sees("strategies/a/mod.rs", "use super::native::Engine;"), 1);
    assert_eq!(sees("strategies/a/b.rs", "use super::super::native::Engine;"), 1);
    assert_eq!(sees("strategies/a/b.rs", "pub(super) fn b(a: super::A) {}"), 0);
}

#[test]
fn code_below_the_views_that_reaches_the_machine_is_seen() {
    let sees = |path: &str, text: &str| no_machine(&Source::new(path, text)).len();
    for bad in [
        "use rayon::prelude::*;",
        "use std::{mem, thread};",
        "let begin = Instant::now();",
        "let text = std::fs::read(path);",
        "eprintln!(\"done\");",
    ] {
        assert_eq!(sees("crates/analysis/src/advice.rs", bad), 1, "{bad}");
    }
    assert_eq!(sees("crates/recording/src/reader/mod.rs", "match File::open(path) {}"), 0);
    assert_eq!(sees("crates/recording/src/reader/mod.rs", "println!();"), 1);
    assert_eq!(sees("crates/analysis/src/x.rs", "// println!\nlet printed = InFile(3);"), 0);
    assert!(below_the_views("crates/analysis/src/advice.rs"));
    assert!(!below_the_views("crates/cli/src/host.rs"));
}

#[test]
fn a_package_that_reaches_up_is_seen() {
    let sees = |name: &str, text: &str| packages(name, text, &["sim"]).len();
    let on = |package: &str| format!("[dependencies]\n{package} = {{ path = \"..\" }}\n");
    assert_eq!(sees("page", &on("stratalloc-cli")), 1);
    assert_eq!(sees("page", &on("stratalloc-sim")), 0);
    assert_eq!(sees("page", &on("stratalloc")), 0);
    assert_eq!(sees("analysis", &on("rayon")), 1);
    assert_eq!(sees("cli", &on("rayon")), 0);
    assert_eq!(sees("page", "[dependencies.stratalloc-cli]\npath = \"..\""), 1);
    assert_eq!(sees("page", "[target.'cfg(unix)'.dependencies]\nstratalloc-cli.path = \"..\""), 1);
    assert_eq!(sees("page", "[dev-dependencies]\nstratalloc-cli = { path = \"..\" }"), 0);
}

#[test]
fn homeless_unsafe_is_seen() {
    let sees = |path: &str, text: &str| unsafe_allowed_in(&Source::new(path, text)).len();
    assert_eq!(sees("strategies/native/engine.rs", "let a = unsafe { b() };"), 1);
    assert_eq!(sees("strategies/native/engine.rs", "#![allow(unsafe_code, reason = \"x\")]"), 1);
    assert_eq!(sees("src/driver/hostile.rs", "unsafe impl Send for A {}"), 1);
    assert_eq!(sees("crates/sim/src/host/mod.rs", "unsafe impl Send for A {}"), 0);
    assert_eq!(sees("src/sync.rs", "unsafe impl Send for A {}"), 0);
    assert_eq!(sees("strategies/native/engine.rs", "/// Nothing unsafe here."), 0);
}
