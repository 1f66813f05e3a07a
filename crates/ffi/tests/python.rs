//! Runs the Python package's own tests with the library built here.

#[path = "../../../tests/common/shared_library.rs"]
mod shared_library;

use std::path::Path;
use std::process::Command;

#[test]
fn the_python_package_passes_its_tests() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3");
        return;
    }
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let mut command = Command::new("python3");
    for variable in stratalloc::config::VARIABLES {
        command.env_remove(variable);
    }
    command.args(["-B", "-m", "unittest", "discover", "-v", "-s"]).arg(python.join("tests"));
    command.env("PYTHONPATH", &python).env("STRATALLOC_LIBRARY", shared_library::shared_library());
    // Inherited by processes that the tests start, so these write no compiled files either.
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.output().expect("python3 was there a moment ago");
    let stderr = String::from_utf8_lossy(&output.stderr);
    println!("{stderr}");
    assert!(output.status.success(), "{stderr}");
}

#[test]
fn package_and_library_have_one_version() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let version = env!("CARGO_PKG_VERSION");
    for (file, line) in [
        ("pyproject.toml", format!("\nversion = \"{version}\"\n")),
        ("stratalloc/_library.py", format!("\n__version__ = \"{version}\"\n")),
    ] {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        assert!(text.contains(&line), "{file} has another version");
    }
}
