//! Checks that the reference of keys in `docs/configuration.md` matches the table of keys. With
//! `STRATALLOC_WRITE_DOCS` set, writes the reference instead.

use stratalloc::config::{BUILT_IN, Key};

use crate::common::prelude::*;

const BEGIN: &str = "<!-- keys: begin -->\n";
const END: &str = "<!-- keys: end -->\n";

fn row(key: &Key) -> String {
    let names = key
        .aliases
        .iter()
        .fold(format!("`{}`", key.name), |names, alias| format!("{names}, also `{alias}`"));
    let since = key.since.map_or_else(|| "-".to_owned(), |since| since.to_string());
    let cell = |text: &str| text.replace('|', "\\|").replace('<', "&lt;").replace('>', "&gt;");
    format!("| {names} | {since} | {} | {} |\n", cell(key.range), cell(key.meaning))
}

#[test]
fn the_reference_of_keys_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let old = fs::read_to_string(&path).unwrap();
    let (before, rest) = old.split_once(BEGIN).expect("the reference has a beginning");
    let (_, after) = rest.split_once(END).expect("the reference has an end");
    let rows: String = BUILT_IN.iter().map(row).collect();
    let heading = "| key | PyTorch | value | meaning |\n|---|---|---|---|\n";
    let new = format!("{before}{BEGIN}{heading}{rows}{END}{after}");
    if std::env::var_os("STRATALLOC_WRITE_DOCS").is_some() {
        fs::write(&path, new).unwrap();
        return;
    }
    assert!(
        new == old,
        "the reference is old: STRATALLOC_WRITE_DOCS=1 cargo test --test main keys::"
    );
}
