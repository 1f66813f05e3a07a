//! Libraries in C and C++ that tests compile and load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::shared_library::root;

/// Compiles a library for one test and returns the paths of the library and of its log. Without a
/// compiler, prints that the test is skipped and returns `None`.
pub(crate) fn compile(compiler: &str, source: &str, name: &str) -> Option<(PathBuf, PathBuf)> {
    if Command::new(compiler).arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler ({compiler})");
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let process = std::process::id();
    let library = folder.join(format!("{name}-{process}.so"));
    let log = folder.join(format!("{name}-{process}.log"));
    let _ = fs::remove_file(&log);
    let source = root().join("tests/pluggable").join(source);
    let done = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg(format!("-DLOG_PATH=\"{}\"", log.display()))
        .arg(source)
        .arg("-o")
        .arg(&library)
        .output()
        .expect("it prints its version");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some((library, log))
}

/// Returns a configuration string that selects the library and these functions of it.
pub(crate) fn conf(library: &Path, functions: &str) -> String {
    format!("backend:pluggable,library:\"{}\",{functions}", library.display())
}
