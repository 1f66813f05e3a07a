//! Generates `include/stratalloc.h` from `src`, and from the header the declarations for Python and for
//! the subclass of PyTorch's allocator. The test compares them with the files. If
//! `STRATALLOC_WRITE_HEADER` is set, it writes the three files instead.

#[path = "header/others.rs"]
mod others;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files that export functions or types, in the header's order. Cbindgen also reads their submodules.
const SOURCES: &str = "guard.rs user_data.rs table.rs calls.rs figures.rs host.rs text.rs pools.rs checkpoints.rs \
                       tags.rs sharing.rs dlpack.rs history.rs snapshots.rs hooks.rs torch/mod.rs libraries.rs";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn made() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("it is legal");
    let sources = SOURCES.split(' ').map(|name| root().join("src").join(name));
    let builder = cbindgen::Builder::new().with_config(config);
    let bindings = sources.fold(builder, |builder, path| builder.with_src(path)).generate();
    let mut text = Vec::new();
    bindings.expect("the sources are legal").write(&mut text);
    String::from_utf8(text).expect("cbindgen writes text")
}

/// Returns the sources of the subclass of PyTorch's allocator.
fn class_sources() -> String {
    let files =
        fs::read_dir(root().join("../../python/stratalloc/csrc")).expect("the folder is there");
    let paths = files.map(|file| file.expect("the folder can be read").path());
    let is_source = |path: &PathBuf| {
        let ending = path.extension().unwrap_or_default();
        ending == "cpp" || ending == "h" && !path.is_symlink()
    };
    paths.filter(is_source).map(|path| fs::read_to_string(path).expect("it is text")).collect()
}

#[test]
fn the_header_and_what_is_made_of_it_are_up_to_date() {
    let header = made();
    for (path, made) in [
        ("../../python/stratalloc/_calls.py", others::python(&header)),
        ("../../python/stratalloc/csrc/calls.h", others::macro_list(&header, &class_sources())),
        ("include/stratalloc.h", header),
    ] {
        let full = root().join(path);
        if std::env::var_os("STRATALLOC_WRITE_HEADER").is_some() {
            fs::write(&full, made).unwrap();
            continue;
        }
        assert!(
            made == fs::read_to_string(&full).unwrap(),
            "{path} is old: STRATALLOC_WRITE_HEADER=1 cargo test -p stratalloc-ffi --all-features --test ffi header"
        );
    }
}

#[test]
fn the_header_compiles_with_all_warnings_and_declares_nothing_twice() {
    let header = root().join("include/stratalloc.h");
    let warnings = ["-Wall", "-Wextra", "-Wredundant-decls", "-Werror", "-fsyntax-only"];
    for (program, language) in [("cc", "c"), ("c++", "c++")] {
        let mut compiler = Command::new(program);
        compiler.args(warnings).args(["-x", language]).arg(&header);
        match compiler.output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{program}: {text}");
            }
            Err(_) => eprintln!("skipped: there is no {program}"),
        }
    }
}

#[test]
fn every_exported_name_is_in_the_header() {
    let header = made();
    let mut names = 0;
    let mut folders: Vec<PathBuf> = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            // Functions that are not public are passed to the system as pointers, and not exported.
            let is_public = |at: usize| {
                let before = text[..at].trim_end();
                before.ends_with("pub") || before.ends_with("pub unsafe")
            };
            let functions = text.match_indices("extern \"C\" fn ").map(|(at, _)| at);
            let public: Vec<usize> = functions.filter(|at| is_public(*at)).collect();
            for &at in &public {
                let name: String = text[at..].split(['(', ' ']).nth(3).unwrap_or("").to_owned();
                assert!(header.contains(&format!("{name}(")), "{name} of {}", path.display());
                names += 1;
            }
            let exported = text.matches("#[unsafe(no_mangle)]").count();
            assert_eq!(exported, public.len(), "{}", path.display());
        }
    }
    assert!(names > 20, "{names}");
}
