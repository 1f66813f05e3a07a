//! The backend `pluggable` with functions of a shared library, compared with other strategies.

use serde_json::Value;

use crate::common::compiled::{compile, conf};
use crate::common::prelude::*;
use crate::common::shared_library::{root, shared_library};

/// The C library of this project exports the symbols that PyTorch loads, so it can serve as such a
/// library.
#[test]
fn our_own_library_can_be_loaded_as_pytorch_loads_it() {
    let text = conf(
        shared_library(),
        "alloc_fn:stratalloc_torch_malloc,free_fn:stratalloc_torch_free,\
        init_fn:stratalloc_torch_init,reset_fn:stratalloc_torch_reset",
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_stratalloc"));
    let trace = root().join("tests/traces/serve.default.pickle.xz");
    command.env_remove("ALLOC_CONF").env("STRATALLOC_DEVICE", "sim");
    let output =
        command.arg("compare").arg(trace).args(["--json", "--conf", &text]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{stderr}");
    let row: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(row["ooms"], 0);
}

#[test]
fn the_command_line_compares_a_library_with_others() {
    let Some((library, _)) = compile("cc", "functions.c", "cli") else { return };
    let text = conf(&library, "alloc_fn:quiet_alloc,free_fn:quiet_free");
    let trace = root().join("tests/traces/serve.default.pickle.xz");
    let run =
        |args: &[&str]| unconfigured(env!("CARGO_BIN_EXE_stratalloc")).args(args).output().unwrap();
    let output = run(&["compare", trace.to_str().unwrap(), "--json", "--conf", &text]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let row: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(row["ooms"], 0);
    let bytes = |key: &str| row[key].as_i64().unwrap();
    assert!(bytes("peak_allocated_bytes") > 1 << 30);
    // Nothing is cached: besides live blocks, only blocks that wait for other streams are held.
    assert!(row["waste"].as_f64().unwrap() < 0.1 && bytes("retries") == 0, "{row}");
    let explained = run(&["explain", &text]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("quiet_alloc") && !explained.contains("not registered"));
    let info = run(&["info"]);
    assert!(String::from_utf8_lossy(&info.stdout).contains("pluggable"));
    let missing = conf(Path::new("/no/such.so"), "alloc_fn:f,free_fn:f");
    let output = run(&["compare", trace.to_str().unwrap(), "--conf", &missing]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        stderr,
        format!(
            "stratalloc: {}: library /no/such.so: cannot be read: No such file or directory \
             (os error 2)\n",
            trace.display()
        )
    );
}
