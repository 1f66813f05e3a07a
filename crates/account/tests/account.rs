//! The library in a program over a stand-in for CUDA's driver.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "../../../tests/common/folder.rs"]
#[allow(dead_code, reason = "a part is used here")]
mod folder;
#[path = "../../../tests/common/shared_library.rs"]
#[allow(dead_code, reason = "a part is used here")]
mod shared_library;

use std::path::Path;
use std::process::Command;

use folder::Folder;
use serde_json::json;

const MIB: i64 = 1 << 20;

/// Compiles a file of this folder with these arguments. Returns false, with a message, without a compiler.
fn compile(arguments: &[&str], source: &str, output: &str) -> bool {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o", output])
        .arg(sources.join(source));
    let Ok(done) = compiler.args(arguments).output() else {
        eprintln!("skipped: no C compiler (cc)");
        return false;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    true
}

#[test]
fn growth_is_added_to_the_library_that_made_the_call() {
    let folder = Folder::new("account");
    let path = |name: &str| folder.path(name);
    let libraries = ["-shared", "-fPIC"];
    let driver = path("libcuda.so.1");
    if !compile(&[&libraries[..], &["-Wl,-soname,libcuda.so.1"]].concat(), "driver.c", &driver) {
        return;
    }
    let worker = path("libworker.so");
    assert!(compile(&libraries, "worker.c", &worker));
    let program = path("program");
    // Functions of the driver that the program calls directly are bound to the library that is loaded first.
    assert!(compile(&[&worker, &driver, "-ldl"], "program.c", &program));

    let library = shared_library::built("stratalloc_account", "so");
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", folder.0.as_os_str())
        .env("LD_PRELOAD", library)
        .output()
        .expect("what was compiled runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("valid JSON");
    let device = &found["devices"][0];
    assert_eq!((&device["device"], &device["first_used_bytes"]), (&json!(0), &json!(600 * MIB)));
    let row = |library: &str, kind: &str| {
        let rows = device["rows"].as_array().expect("a list");
        let is_row = |row: &&serde_json::Value| row["library"] == library && row["kind"] == kind;
        let row =
            rows.iter().find(is_row).unwrap_or_else(|| panic!("no {library} {kind}: {device}"));
        row["bytes"].as_i64().expect("a number")
    };
    // Two of the five launches are of kernels that were launched before.
    assert_eq!(row("libworker.so", "kernels"), 21 * MIB);
    assert_eq!(row("libworker.so", "allocations"), (30 + 200 * (5 + 6)) * MIB + 400);
    assert_eq!(row("program", "allocations"), -11 * MIB);
    assert_eq!(row("program", "graphs"), 2 * MIB);
    assert_eq!(device["rows"].as_array().map(Vec::len), Some(4), "{device}");
}
