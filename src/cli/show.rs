//! Tables and numbers for people, and progress bars for terminals.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use crate::analysis::grouped;
use crate::config::shown;

/// Bytes as mebibytes with one decimal.
pub(crate) fn mib(bytes: f64) -> String {
    format!("{:.1}", bytes / f64::from(1 << 20))
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

/// How a column's cells stand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Writes rows under a heading, each column as wide as its widest cell. Cells are shown as a terminal may
/// have them.
pub(crate) fn table(
    out: &mut impl Write,
    heading: &[(&str, Side)],
    rows: &[Vec<String>],
) -> io::Result<()> {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| shown(cell)).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heading[column].0.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| -> io::Result<()> {
        let mut text = String::new();
        for (column, cell) in cells.enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            match heading[column].1 {
                Side::Left => text.extend([cell, &pad]),
                Side::Right => text.extend([&pad, cell]),
            }
            text.push_str("  ");
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&mut heading.iter().map(|(name, _)| *name))?;
    rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))
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
