//! Formats numbers and names, and shows progress bars on terminals.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::{Value, json};

pub(crate) use super::table::{
    Align, check_sort, columns, is_json, is_markdown, table, table_text, toned_table,
};
use super::view;
use stratalloc::config::shown;
pub(crate) use stratalloc_analysis::near;
use stratalloc_analysis::{Paste, Setting};

/// The note below tables in which a need depends on the addresses that the device assigns.
pub(crate) const LUCK: &str = "with luck: which of two free blocks of one size is taken depends on their \
    addresses; three orders of addresses were replayed, and needs is the largest result";

/// The note below tables with rows that make PyTorch's decisions.
pub(crate) const PYTORCHS: &str = "compat:pytorch: replayed with PyTorch's decisions; a line for PyTorch is without \
    this key, which only stratalloc has";

/// Formats a negative number of bytes with a minus, and else like [`near`].
pub(crate) fn signed_near(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", near(bytes.unsigned_abs()))
}

/// Formats a difference of bytes with its sign.
pub(crate) fn with_sign(bytes: i64) -> String {
    let sign = if bytes < 0 { "" } else { "+" };
    format!("{sign}{}", signed_near(bytes))
}

/// Formats bytes in MiB with one decimal, for conditions, whose bounds are exact.
pub(crate) fn tenths(bytes: f64) -> String {
    format!("{:.1}", bytes / f64::from(1 << 20))
}

/// Formats the time of device calls in milliseconds, and as a share of the recorded time.
fn device_ms(device_ms: f64, recorded_ms: Option<f64>) -> String {
    match recorded_ms.filter(|recorded| *recorded > 0.0) {
        None => format!("{device_ms:.1}"),
        Some(recorded) => format!("{device_ms:.1} ({:.1}%)", device_ms * 1e2 / recorded),
    }
}

/// The text for a value that a file or a device does not provide.
pub(crate) const UNKNOWN: &str = "-";

/// Formats a value, or a dash if it is unknown.
pub(crate) fn value_or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
}

/// The headings of [`need_cells`].
pub(crate) const NEED_HEADING: &str = "configuration | needs MiB: | retries: | device calls: | device ms: | reserved without a limit:";

/// Returns the table cells for a setting. `needs` is the formatted need.
pub(crate) fn need_cells(
    conf: String,
    needs: String,
    setting: &Setting,
    recorded_ms: Option<f64>,
) -> Vec<String> {
    vec![
        conf,
        needs,
        value_or_dash(setting.retries),
        value_or_dash(setting.device_calls),
        value_or_dash(setting.device_ms.map(|ms| device_ms(ms, recorded_ms))),
        near(setting.reserved_unlimited_bytes),
    ]
}

/// Returns the line that sets a setting and the allocator that reads it, as JSON. The line is empty if
/// nothing has to be set.
pub(crate) fn paste_json(paste: &Paste) -> Value {
    json!({"paste": paste.set, "paste_for": paste.allocator})
}

/// Merges JSON objects into one.
pub(crate) fn joined<const N: usize>(objects: [Value; N]) -> Value {
    let fields = objects.into_iter().filter_map(|object| match object {
        Value::Object(fields) => Some(fields),
        _ => None,
    });
    fields.flatten().collect()
}

/// Prints a text, each of its lines wrapped to the width of a line and without control characters. What
/// follows an indented line's first is indented too.
pub(crate) fn say(out: &mut impl Write, text: impl Display) -> io::Result<()> {
    let view = view::current();
    text.to_string().split('\n').try_for_each(|line| {
        let line = shown(line);
        let indent = " ".repeat(line.len() - line.trim_start().len());
        let lines = view.wrapped(line.trim_start(), &indent);
        writeln!(out, "{lines}")
    })
}

/// Wraps sentences to the width of a line, without control characters.
pub(crate) fn wrapped(text: impl Display) -> String {
    view::current().wrapped(&shown(&text.to_string()), "")
}

/// Does the same as [`wrapped`], and makes the sentences bold if standard output shows colours.
pub(crate) fn emphasised(text: impl Display) -> String {
    view::current().bold(&wrapped(text))
}

/// Formats a configuration that was replayed. With the default settings of an allocator, this is its name.
pub(crate) fn replayed_conf(conf: &str) -> String {
    match conf.trim() {
        "" => "stratalloc's default".to_owned(),
        "compat:pytorch" => "PyTorch's default".to_owned(),
        conf => shown(conf),
    }
}

/// Formats a path without control characters, because file names come from untrusted sources.
pub(crate) fn shown_path(path: &Path) -> String {
    shown(&path.display().to_string())
}

/// Formats a configuration string. An empty one is shown as "(default)".
pub(crate) fn shown_conf(conf: &str) -> String {
    if conf.trim().is_empty() { "(default)".to_owned() } else { shown(conf) }
}

/// Returns a progress bar, which is hidden unless standard error is a terminal. Dropping it clears it.
pub(crate) fn progress(length: u64, what: &str) -> ProgressBar {
    if view::current().is_quiet() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length).with_message(what.to_owned());
    let bar = bar.with_finish(ProgressFinish::AndClear);
    bar.with_style(style("{msg} {wide_bar} {percent}%"))
}

/// Returns a progress message, which is hidden unless standard error is a terminal.
pub(crate) fn spinner() -> ProgressBar {
    if view::current().is_quiet() {
        return ProgressBar::hidden();
    }
    ProgressBar::new_spinner().with_style(style("timing {msg}"))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a legal template")
}
