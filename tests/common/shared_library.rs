//! The shared library, built when a test first asks for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The library for other languages, with assertions as in these tests. `STRATALLOC_LIBRARY` names one
/// that is there already, for machines that cannot build.
pub(crate) fn shared_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| match std::env::var_os("STRATALLOC_LIBRARY") {
        Some(path) => path.into(),
        None => built(std::env::consts::DLL_EXTENSION),
    })
}

/// The library's file with this ending, of the build that these tests are linked with.
pub(crate) fn built(ending: &str) -> PathBuf {
    let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).stderr(Stdio::inherit());
    // With the features of these tests, also those that only a test brings: so their build of the library
    // is linked, and nothing is compiled a second time.
    cargo.args(["build", "--package", "stratalloc-ffi", "--package", "stratalloc", "--lib"]);
    cargo.args(["--test", "descriptors", "--all-features", "--message-format", "json"]);
    // Variables of the program that runs these tests would make cargo build everything anew.
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
        message["target"]["name"].as_str().filter(|name| *name == "stratalloc").map(|_| file)
    });
    made.next_back().expect("the package is a library of that kind")
}
