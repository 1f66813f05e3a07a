//! The guide's C program and Rust package, built unchanged from their pages.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::shared_library::{built, shared_library};

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(path).expect("the guide is there")
}

/// Returns the code blocks of a page in one language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let begin = format!("\n```{language}\n");
    let blocks = page.split(&begin).skip(1).filter_map(|rest| rest.split("\n```").next());
    blocks.map(|block| format!("{block}\n")).collect()
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a test may make a folder");
    folder
}

fn good(command: &mut Command) -> String {
    // The test runner sets `LD_LIBRARY_PATH` to its own output folder, which may contain an older
    // library.
    let output = command.env_remove("LD_LIBRARY_PATH").output().expect("it starts");
    let [stdout, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{command:?}: {stdout}{errors}");
    stdout.into_owned()
}

#[cfg(target_os = "linux")]
#[test]
fn the_program_in_c_compiles_with_its_line_and_runs() {
    let page = page("c.md");
    let [source] = &blocks(&page, "c")[..] else { panic!("one program") };
    let [lines] = &blocks(&page, "sh")[..] else { panic!("one block of commands") };
    let lines: Vec<&str> = lines.lines().filter(|line| !line.starts_with("cargo ")).collect();
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler");
        return;
    }
    let folder = folder("guide-c");
    std::fs::write(folder.join("prog.c"), source).expect("there is room");
    for inner in ["target", "crates/ffi"] {
        std::fs::create_dir_all(folder.join(inner)).expect("there is room");
    }
    let library = shared_library().parent().expect("files lie in folders");
    let link = |to: &Path, name: &str| {
        std::os::unix::fs::symlink(to, folder.join(name)).expect("links can be made");
    };
    link(library, "target/dist");
    link(&Path::new(env!("CARGO_MANIFEST_DIR")).join("include"), "crates/ffi/include");
    let mut stdout = String::new();
    for line in lines {
        stdout = good(Command::new("sh").args(["-c", line]).current_dir(&folder));
    }
    assert!(stdout.starts_with("4 MiB at 0x"), "{stdout}");
}

/// Compiles the page's three Rust files as cargo would, with the libraries that these tests built.
#[test]
fn the_package_with_a_strategy_builds_and_conforms() {
    let page = page("writing-a-strategy.md");
    let [manifest] = &blocks(&page, "toml")[..] else { panic!("one manifest") };
    assert!(manifest.contains("stratalloc-conformance"), "{manifest}");
    let [library, tests, program] = &blocks(&page, "rust")[..] else { panic!("three files") };
    let folder = folder("guide-strategy");
    let stratalloc = built("stratalloc", "rlib");
    let conformance = built("stratalloc_conformance", "rlib");
    let dependencies = stratalloc.parent().expect("files lie in folders").join("deps");
    let compile = |name: &str, source: &str, kind: &[&str]| {
        let file = folder.join(format!("{name}.rs"));
        std::fs::write(&file, source).expect("there is room");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--edition", "2024", "-D", "warnings"]).args(kind).arg(&file);
        rustc.arg("--out-dir").arg(&folder);
        rustc
            .arg("-L")
            .arg(format!("dependency={}", dependencies.display()))
            .arg("-L")
            .arg(&folder);
        rustc.arg("--extern").arg(format!("stratalloc={}", stratalloc.display()));
        rustc.arg("--extern").arg(format!("stratalloc_conformance={}", conformance.display()));
        if name != "mine" {
            let mine = folder.join("libmine.rlib");
            rustc.arg("--extern").arg(format!("mine={}", mine.display()));
        }
        good(&mut rustc);
    };
    compile("mine", library, &["--crate-type", "lib"]);
    compile("conforms", tests, &["--test"]);
    compile("prog", program, &[]);
    let stdout = good(&mut Command::new(folder.join("conforms")));
    assert!(stdout.contains("test result: ok. ") && stdout.contains("conforms::"), "{stdout}");
    let stdout = good(&mut Command::new(folder.join("prog")));
    assert!(stdout.contains("straight"), "{stdout}");
}
