//! Prints tables: fitted to the terminal's width, sorted, and in the chosen format.
//!
//! Columns are ordered by importance. If a table is too wide, its last columns are left out; a last
//! column of text is wrapped instead. Output to a pipe or a file is never cut.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};

use super::view;
use stratalloc::config::shown;

/// Options of the output of all commands.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Output options")]
pub(crate) struct TableOptions {
    /// Print JSON, as --format json does.
    #[arg(long, global = true)]
    json: bool,
    /// Format of the results.
    #[arg(long, global = true, value_enum)]
    format: Option<OutputFormat>,
    /// Sort the rows of tables by the column whose name contains this.
    #[arg(long, global = true, value_name = "COLUMN")]
    sort: Option<String>,
    /// Print all columns, even if the terminal is too narrow.
    #[arg(long, global = true)]
    wide: bool,
}

/// An output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Table for the terminal.
    Table,
    /// Markdown table.
    Markdown,
    /// One JSON object per line.
    Json,
}

static OPTIONS: OnceLock<TableOptions> = OnceLock::new();
/// True once a printed table had the column to sort by.
static IS_SORTED: AtomicBool = AtomicBool::new(false);

/// Sets the options of all tables. Only the first call has an effect.
pub(crate) fn set_options(options: &TableOptions) {
    let _ = OPTIONS.set(options.clone());
}

/// Returns true if the results are to be printed as JSON.
pub(crate) fn is_json() -> bool {
    OPTIONS.get().is_some_and(|options| options.json || options.format == Some(OutputFormat::Json))
}

/// Returns the name of the column to sort by, if no printed table has such a column.
pub(crate) fn missing_column() -> Option<&'static str> {
    let sort = OPTIONS.get()?.sort.as_deref()?;
    (!IS_SORTED.load(Ordering::Relaxed)).then_some(sort)
}

/// Alignment of a column's cells.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Returns the heading with these columns. `:` at the end of a name aligns its column right, as in Markdown.
pub(crate) fn columns<'a>(names: &'a str) -> Vec<(&'a str, Align)> {
    let column = |name: &'a str| match name.strip_suffix(':') {
        Some(name) => (name, Align::Right),
        None => (name, Align::Left),
    };
    names.split(" | ").map(column).collect()
}

/// Writes rows under a heading. Each column is as wide as its widest cell. Control characters are
/// removed.
pub(crate) fn table(
    out: &mut impl Write,
    heading: &[(&str, Align)],
    rows: &[Vec<String>],
) -> io::Result<()> {
    let unset = TableOptions::default();
    let options = OPTIONS.get().unwrap_or(&unset);
    let clean = |row: &Vec<String>| row.iter().map(|cell| shown(cell)).collect();
    let mut rows: Vec<Vec<String>> = rows.iter().map(clean).collect();
    let sort = options.sort.as_deref().and_then(|name| column_of(heading, name));
    if let Some(column) = sort {
        IS_SORTED.store(true, Ordering::Relaxed);
        rows.sort_by(|a, b| compare(&a[column], &b[column]));
    }
    if options.format == Some(OutputFormat::Markdown) {
        return markdown(out, heading, &rows);
    }
    let width = if options.wide { None } else { view::current().columns };
    plain(out, heading, &rows, width.unwrap_or(usize::MAX))
}

/// Returns the same table as text, with all columns and whatever the options are.
pub(crate) fn table_text(heading: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let clean = |row: &Vec<String>| row.iter().map(|cell| shown(cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(clean).collect();
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = plain(&mut text, heading, &rows, usize::MAX);
    String::from_utf8_lossy(&text).into_owned()
}

fn column_of(heading: &[(&str, Align)], name: &str) -> Option<usize> {
    let name = name.to_lowercase();
    let exact = heading.iter().position(|(column, _)| column.to_lowercase() == name);
    exact.or_else(|| heading.iter().position(|(column, _)| column.to_lowercase().contains(&name)))
}

/// Compares cells for sorting: numbers by value, before all other texts.
fn compare(a: &str, b: &str) -> std::cmp::Ordering {
    let number = |cell: &str| {
        let cell = cell.trim_start_matches('*').replace(',', "");
        let end = cell.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-'));
        cell[..end.unwrap_or(cell.len())].parse::<f64>().ok()
    };
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (Some(_), None) => std::cmp::Ordering::Less,
        (None, Some(_)) => std::cmp::Ordering::Greater,
        (None, None) => a.cmp(b),
    }
}

fn markdown(
    out: &mut impl Write,
    heading: &[(&str, Align)],
    rows: &[Vec<String>],
) -> io::Result<()> {
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let escaped = |cell: &str| cell.replace('|', "\\|");
    writeln!(out, "{}", line(heading.iter().map(|(name, _)| escaped(name)).collect()))?;
    let rule = |side: &Align| if *side == Align::Left { "---" } else { "---:" }.to_owned();
    writeln!(out, "{}", line(heading.iter().map(|(_, side)| rule(side)).collect()))?;
    rows.iter().try_for_each(|row| {
        writeln!(out, "{}", line(row.iter().map(|cell| escaped(cell)).collect()))
    })
}

/// The number of spaces between two columns.
const GAP: usize = 2;
/// A column of text is wrapped to at least this many characters.
const BROKEN_MIN: usize = 24;

fn plain(
    out: &mut impl Write,
    heading: &[(&str, Align)],
    rows: &[Vec<String>],
    columns: usize,
) -> io::Result<()> {
    let length = |text: &str| text.chars().count();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| length(&row[column]));
        cells.chain([length(heading[column].0)]).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let total = |widths: &[usize]| {
        widths.iter().map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
    };
    let is_text = heading.last().is_some_and(|(_, side)| *side == Align::Left);
    if is_text && widths.len() > 1 && total(&widths) > columns {
        let before = total(&widths[..widths.len() - 1]) + GAP;
        let last = widths.len() - 1;
        widths[last] = widths[last].min(columns.saturating_sub(before)).max(BROKEN_MIN);
    }
    let mut kept = widths.len();
    while !is_text && kept > 2 && total(&widths[..kept]) > columns {
        kept -= 1;
    }
    let mut line = |cells: &mut dyn Iterator<Item = &str>| -> io::Result<()> {
        let mut text = String::new();
        let mut rest = "";
        for (column, cell) in cells.take(kept).enumerate() {
            let (cell, more) = broken(cell, widths[column]);
            rest = more;
            let pad = " ".repeat(widths[column] - length(cell));
            match heading[column].1 {
                Align::Left => text.extend([cell, &pad]),
                Align::Right => text.extend([&pad, cell]),
            }
            text.push_str(&" ".repeat(GAP));
        }
        writeln!(out, "{}", text.trim_end())?;
        let indent = total(&widths[..kept]) - widths[kept - 1];
        while !rest.is_empty() {
            let (cell, more) = broken(rest, widths[kept - 1]);
            writeln!(out, "{}{cell}", " ".repeat(indent))?;
            rest = more;
        }
        Ok(())
    };
    line(&mut heading.iter().map(|(name, _)| *name))?;
    rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))?;
    if kept < heading.len() {
        let names: Vec<&str> = heading[kept..].iter().map(|(name, _)| *name).collect();
        writeln!(out, "(--wide shows {} too)", names.join(", "))?;
    }
    Ok(())
}

/// Splits a text: returns its beginning of at most `width` characters, cut at a space if there is one,
/// and the rest.
fn broken(text: &str, width: usize) -> (&str, &str) {
    let Some((end, _)) = text.char_indices().nth(width.max(1)) else {
        return (text, "");
    };
    match text[..end].rfind(' ').filter(|at| *at > 0) {
        Some(space) if !text[end..].starts_with(' ') => {
            (&text[..space], text[space..].trim_start())
        }
        _ => (&text[..end], text[end..].trim_start()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(heading: &[(&str, Align)], rows: &[Vec<&str>], columns: usize) -> String {
        let owned = |row: &Vec<&str>| row.iter().map(|cell| (*cell).to_owned()).collect();
        let rows: Vec<Vec<String>> = rows.iter().map(owned).collect();
        let mut out = Vec::new();
        plain(&mut out, heading, &rows, columns).unwrap();
        String::from_utf8(out).unwrap()
    }

    const NUMBERS: [(&str, Align); 4] = [
        ("name", Align::Left),
        ("needs", Align::Right),
        ("calls", Align::Right),
        ("ms", Align::Right),
    ];

    #[test]
    fn a_table_that_is_too_wide_loses_its_last_columns_with_a_note() {
        let rows = [vec!["native", "2,100", "77", "1.5"]];
        let all = printed(&NUMBERS, &rows, 26);
        assert_eq!(all, "name    needs  calls   ms\nnative  2,100     77  1.5\n");
        let less = printed(&NUMBERS, &rows, 24);
        assert_eq!(less, "name    needs  calls\nnative  2,100     77\n(--wide shows ms too)\n");
        let least = printed(&NUMBERS, &rows, 3);
        assert!(least.starts_with("name    needs\nnative  2,100\n"), "{least}");
    }

    #[test]
    fn a_last_column_of_text_is_broken_into_lines() {
        let heading = [("key", Align::Left), ("note", Align::Left)];
        let note = "which strategy allocates, read once when an allocator is built";
        let text = printed(&heading, &[vec!["backend", note]], 40);
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        let words: Vec<&str> = text.lines().skip(1).map(str::trim).collect();
        assert_eq!(words.join(" "), format!("backend  {note}"));
    }

    #[test]
    fn rows_are_sorted_by_numbers_as_numbers() {
        use std::cmp::Ordering::{Greater, Less};
        assert_eq!(compare("*1,493.0", "12,000"), Less);
        assert_eq!(compare("none fits", "9.5 (1%)"), Greater);
        assert_eq!(compare("a", "b"), Less);
        assert_eq!(column_of(&NUMBERS, "need"), Some(1));
        assert_eq!(column_of(&NUMBERS, "waste"), None);
    }

    #[test]
    fn markdown_keeps_bars_of_cells_apart() {
        let mut out = Vec::new();
        markdown(&mut out, &NUMBERS[..2], &[vec!["a|b".to_owned(), "1".to_owned()]]).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "| name | needs |\n| --- | ---: |\n| a\\|b | 1 |\n"
        );
    }
}
