//! Runs the Python package's own tests with the library built here.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::shared_library::shared_library;
use crate::common::unconfigured;

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python")
}

/// Runs one file of the package's tests.
fn passes(file: &str) {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3");
        return;
    }
    let tests = package().join("tests");
    let mut command = unconfigured("python3");
    command.args(["-m", "unittest", "discover", "-v", "-p", file, "-s"]).arg(&tests);
    command.env("PYTHONPATH", package()).env("STRATALLOC_LIBRARY", shared_library());
    // The tests start many processes. Each would compile the package again if its compiled files were not
    // kept, so they are kept outside the sources.
    command.env_remove("PYTHONDONTWRITEBYTECODE");
    command.env("PYTHONPYCACHEPREFIX", Path::new(env!("CARGO_TARGET_TMPDIR")).join("python"));
    let output = command.output().expect("python3 was there a moment ago");
    let stderr = String::from_utf8_lossy(&output.stderr);
    println!("{stderr}");
    assert!(output.status.success(), "{stderr}");
    assert!(!stderr.contains("\nRan 0 tests"), "{stderr}");
}

/// Each file is a test of its own, so that the files run beside each other.
macro_rules! files {
    ($($name:ident)+) => {
        const FILES: &[&str] = &[$(concat!(stringify!($name), ".py")),+];

        mod the_package_passes {$(
            #[test]
            fn $name() {
                super::passes(concat!(stringify!($name), ".py"));
            }
        )+}
    };
}

files! {
    test_account test_advice test_allocator test_dlpack test_exit test_extension test_files test_history test_jax
    test_libraries test_reach test_sleep test_sweep test_torch test_watch
}

#[test]
fn every_file_of_the_packages_tests_runs() {
    let entries = std::fs::read_dir(package().join("tests")).expect("the folder is there");
    let names = entries.map(|entry| entry.expect("it can be read").file_name());
    let names = names.map(|name| name.into_string().expect("names are text"));
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".py")).collect();
    names.sort();
    assert_eq!(names, FILES);
}

#[test]
fn package_and_library_have_one_version() {
    let version = env!("CARGO_PKG_VERSION");
    for (file, line) in [
        ("pyproject.toml", format!("\nversion = \"{version}\"\n")),
        ("stratalloc/_library.py", format!("\n__version__ = \"{version}\"\n")),
    ] {
        let text = std::fs::read_to_string(package().join(file)).unwrap();
        assert!(text.contains(&line), "{file} has another version");
    }
}
