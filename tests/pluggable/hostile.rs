//! Libraries that cannot be loaded. Each error must describe what was found.

use stratalloc::strategies::plugin::LibraryError;

use super::build;
use crate::common::compiled::{compile, conf};
use crate::common::prelude::*;

fn refusal(path: &Path) -> LibraryError {
    match build(&conf(path, "alloc_fn:f,free_fn:g")) {
        Err(BuildError::Library(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let name = format!("{name}-{}.so", std::process::id());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, bytes).expect("the folder of tests can be written");
    path
}

#[test]
fn what_is_no_library_is_refused_with_its_path() {
    let missing = Path::new("/no/such/library.so");
    let text = refusal(missing).to_string();
    assert!(
        text.starts_with("library /no/such/library.so: cannot be read: No such file"),
        "{text}"
    );
    for path in [Path::new(env!("CARGO_MANIFEST_DIR")), Path::new("/dev/null")] {
        assert!(refusal(path).to_string().ends_with("expected a file"));
    }
    for (name, bytes) in
        [("empty", &b""[..]), ("text", b"int main() { return 0; }\n"), ("cut", b"\x7fELF\x02\x01")]
    {
        let path = file(name, bytes);
        let text = refusal(&path).to_string();
        let expected = "expected a 64-bit shared library for";
        assert!(text.contains(expected) && text.contains(path.to_str().unwrap()), "{text}");
        fs::remove_file(path).unwrap();
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn a_library_for_another_machine_is_refused() {
    let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
    let (own, other, name) =
        if cfg!(target_arch = "x86_64") { (62u16, 183u16, "x86-64") } else { (183, 62, "AArch64") };
    header.extend(other.to_le_bytes());
    header.resize(64, 0);
    let path = file("other", &header);
    let text = refusal(&path).to_string();
    assert!(text.ends_with(&format!("shared library for {name}")), "{text}");
    // The machine is right, but nothing follows the header, so the system's loader fails.
    header[18..20].copy_from_slice(&own.to_le_bytes());
    let hollow = file("hollow", &header);
    assert!(matches!(refusal(&hollow), LibraryError::NotLoaded { .. }));
    for path in [path, hollow] {
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_missing_function_is_named_with_its_key_and_nothing_was_called() {
    let Some((library, log)) = compile("cc", "functions.c", "lacks") else { return };
    for (functions, key, name) in [
        ("alloc_fn:no_such,free_fn:my_free", "alloc_fn", "no_such"),
        ("alloc_fn:my_alloc,free_fn:my_fee", "free_fn", "my_fee"),
        ("alloc_fn:my_alloc,free_fn:my_free,init_fn:my_init,reset_fn:nix", "reset_fn", "nix"),
        ("alloc_fn:my_alloc,free_fn:my_free,release_pool_fn:nix", "release_pool_fn", "nix"),
    ] {
        match build(&conf(&library, functions)) {
            Err(BuildError::Library(LibraryError::NoFunction { path, key: k, name: n })) => {
                assert_eq!((path.file_name(), k, n.as_str()), (library.file_name(), key, name));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(!log.exists(), "not even init");
}

#[test]
fn a_missing_key_is_named() {
    for (text, expected) in [
        ("backend:pluggable", "library"),
        ("backend:pluggable,library:a.so", "alloc_fn"),
        ("backend:pluggable,library:a.so,alloc_fn:f", "free_fn"),
    ] {
        match build(text) {
            Err(BuildError::MissingKey { key, .. }) => assert_eq!(key, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn names_that_no_function_has_get_a_caret() {
    let table = registry::key_table();
    let long = "f".repeat(5000);
    for value in ["1f", "\"a b\"", "\"\"", "a-b", "\"a\0b\"", "[f]", &long] {
        let text = format!("alloc_fn:{value}");
        let error = Config::parse(&text, &table).unwrap_err();
        assert_eq!((error.key.as_str(), error.at()), ("alloc_fn", 9), "{value:?}");
        assert_eq!(error.expected, "a function's name");
    }
    for value in ["\"\"", "\"a\0b\"", "[a.so]"] {
        let error = Config::parse(&format!("library:{value}"), &table).unwrap_err();
        assert_eq!(error.expected, "a file's path");
    }
}
