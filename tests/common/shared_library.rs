//! The C library, built when a test first needs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Returns the path of the C library, built with debug assertions. On machines that cannot build it,
/// `STRATALLOC_LIBRARY` is the path of an existing one.
pub(crate) fn shared_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| match std::env::var_os("STRATALLOC_LIBRARY") {
        Some(path) => path.into(),
        None => built("stratalloc", std::env::consts::DLL_EXTENSION),
    })
}

/// Returns the repository's folder, whichever package the running tests belong to.
pub(crate) fn root() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|folder| folder.join("Cargo.lock").exists()).expect("tests run in the repository")
}

/// Builds the libraries of the workspace and the command line, and returns the path of the library with this
/// name and file extension.
pub(crate) fn built(library: &str, ending: &str) -> PathBuf {
    let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
    cargo.current_dir(root()).stderr(Stdio::inherit());
    // The profile of tests, all features and two test targets are selected, so that cargo reuses the
    // libraries that these tests are linked with instead of compiling them again.
    cargo.args(["build", "--profile", "test", "--lib", "--bin", "stratalloc"]);
    cargo.args([
        "--test",
        "descriptors",
        "--test",
        "ffi",
        "--all-features",
        "--message-format",
        "json",
    ]);
    // Cargo sets `CARGO_PKG_*` for a test program. If these variables were passed on, everything would be
    // rebuilt.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_")) {
            cargo.env_remove(name);
        }
    }
    let output = cargo.output().expect("cargo built these tests");
    assert!(output.status.success(), "the shared library does not build");
    let messages = String::from_utf8(output.stdout).expect("cargo writes JSON");
    let mut made = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let file = message["filenames"].as_array()?.iter().find_map(|file| {
            let file = Path::new(file.as_str()?);
            (file.extension()? == ending).then(|| file.to_owned())
        })?;
        message["target"]["name"].as_str().filter(|name| *name == library).map(|_| file)
    });
    made.next_back().expect("the package is a library of that kind")
}
