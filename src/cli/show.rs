//! Numbers and names for people, and progress bars for terminals.

use std::io::{self, IsTerminal};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use super::table::{Side, table};
use crate::config::shown;

/// Explains needs with luck.
pub(crate) const LUCK: &str = "with luck: which of two free blocks of one size is taken depends on their \
    addresses; three orders of addresses were replayed, and needs is the largest result";

/// Bytes as mebibytes with one decimal.
pub(crate) fn mib(bytes: f64) -> String {
    format!("{:.1}", bytes / f64::from(1 << 20))
}

/// What a device's calls take, in milliseconds, and which part of the recorded time that is.
pub(crate) fn device_ms(device_ns: u64, recorded_us: Option<u64>) -> String {
    let (ms, recorded_us) = (device_ns as f64 / 1e6, recorded_us.unwrap_or(0));
    match recorded_us {
        0 => format!("{ms:.1}"),
        us => format!("{ms:.1} ({:.1}%)", ms * 1e5 / us as f64),
    }
}

/// A line that stands out on a terminal.
pub(crate) fn emphasised(text: &str) -> String {
    let said = |variable| std::env::var_os(variable).is_some_and(|value| !value.is_empty());
    let text = shown(text);
    match io::stdout().is_terminal() && !said("NO_COLOR") {
        true => format!("\x1b[1m{text}\x1b[0m"),
        false => text,
    }
}

/// A file's name for people: names come from anybody.
pub(crate) fn shown_path(path: &Path) -> String {
    shown(&path.display().to_string())
}

/// A configuration's string for people; the empty one has a name.
pub(crate) fn shown_conf(conf: &str) -> String {
    if conf.trim().is_empty() { "(default)".to_owned() } else { shown(conf) }
}

/// A bar on a terminal; nothing in a pipe.
pub(crate) fn progress(length: u64, what: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length).with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent}%") {
        bar.set_style(style);
    }
    bar
}

/// What is being done, on a terminal; nothing in a pipe.
pub(crate) fn spinner() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("timing {msg}") {
        bar.set_style(style);
    }
    bar
}
