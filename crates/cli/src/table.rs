//! Prints tables: fitted to the terminal's width, sorted, and in the chosen format.
//!
//! Columns are ordered by importance. If a table is too wide, its last columns are left out; a last
//! column of text is wrapped instead. Output to a pipe or a file is never cut.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};

use super::outcome::BadArguments;
use super::view::{self, Tone, View};
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

/// Checks before long work that a column to sort by exists. `names` are the headings of the tables, as for
/// [`columns`].
pub(crate) fn check_sort(names: &[&str]) -> Result<(), BadArguments> {
    let Some(sort) = OPTIONS.get().and_then(|options| options.sort.as_deref()) else {
        return Ok(());
    };
    let known: Vec<_> = names.iter().flat_map(|names| columns(names)).collect();
    match column_of(&known, sort) {
        Some(_) => Ok(()),
        None => {
            let known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let known = known.join(", ");
            Err(BadArguments(format!("--sort: no column is called {sort}: there are {known}")))
        }
    }
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
    toned_table(out, heading, rows, &[])
}

/// Does the same as [`table`]. `tones` has the colours of the first cells of rows.
pub(crate) fn toned_table(
    out: &mut impl Write,
    heading: &[(&str, Align)],
    rows: &[Vec<String>],
    tones: &[Tone],
) -> io::Result<()> {
    let unset = TableOptions::default();
    let options = OPTIONS.get().unwrap_or(&unset);
    let tones = tones.iter().copied().map(Some).chain(std::iter::repeat(None));
    let mut rows: Vec<Row> =
        rows.iter().zip(tones).map(|(row, tone)| Row::new(row, tone)).collect();
    let sort = options.sort.as_deref().and_then(|name| column_of(heading, name));
    if let Some(column) = sort {
        IS_SORTED.store(true, Ordering::Relaxed);
        rows.sort_by(|a, b| compare(&a.cells[column], &b.cells[column]));
    }
    if options.format == Some(OutputFormat::Markdown) {
        return markdown(out, heading, &rows);
    }
    let view = view::current();
    let columns = if options.wide { None } else { view.columns };
    plain(out, heading, &rows, View { columns, ..view })
}

/// Returns the same table as text, with all columns and whatever the options are.
pub(crate) fn table_text(heading: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let rows: Vec<Row> = rows.iter().map(|row| Row::new(row, None)).collect();
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = plain(&mut text, heading, &rows, View::default());
    String::from_utf8_lossy(&text).into_owned()
}

/// Returns true if the results are to be printed as Markdown.
pub(crate) fn is_markdown() -> bool {
    OPTIONS.get().is_some_and(|options| options.format == Some(OutputFormat::Markdown))
}

/// The cells of a row, without control characters, and the colour of the first one.
struct Row {
    cells: Vec<String>,
    tone: Option<Tone>,
}

impl Row {
    fn new(cells: &[String], tone: Option<Tone>) -> Self {
        Self { cells: cells.iter().map(|cell| shown(cell)).collect(), tone }
    }
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

fn markdown(out: &mut impl Write, heading: &[(&str, Align)], rows: &[Row]) -> io::Result<()> {
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let escaped = |cell: &str| cell.replace('|', "\\|");
    writeln!(out, "{}", line(heading.iter().map(|(name, _)| escaped(name)).collect()))?;
    let rule = |side: &Align| if *side == Align::Left { "---" } else { "---:" }.to_owned();
    writeln!(out, "{}", line(heading.iter().map(|(_, side)| rule(side)).collect()))?;
    rows.iter().try_for_each(|row| {
        writeln!(out, "{}", line(row.cells.iter().map(|cell| escaped(cell)).collect()))
    })
}

/// The number of spaces between two columns.
const GAP: usize = 2;
/// A column of text is wrapped to at least this many characters. If there are fewer, it follows below its
/// row.
const BROKEN_MIN: usize = 24;
/// The spaces before text that follows below its row.
const INDENT: usize = 4;

fn plain(
    out: &mut impl Write,
    heading: &[(&str, Align)],
    rows: &[Row],
    view: View,
) -> io::Result<()> {
    let columns = view.columns.unwrap_or(usize::MAX);
    let mut layout = Layout::of(heading, rows);
    layout.fit(heading, columns);
    let headings: Vec<String> = heading.iter().map(|(name, _)| (*name).to_owned()).collect();
    let headings = Row { cells: headings, tone: None };
    for row in [&headings].into_iter().chain(rows) {
        layout.write(out, heading, row, view)?;
    }
    if layout.kept < heading.len() && !layout.is_below {
        let names: Vec<&str> = heading[layout.kept..].iter().map(|(name, _)| *name).collect();
        let note = format!("(--wide shows {} too)", names.join(", "));
        writeln!(out, "{}", view.wrapped(&note, ""))?;
    }
    Ok(())
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// The widths of the columns of a table.
struct Layout {
    widths: Vec<usize>,
    /// The number of columns that are printed side by side.
    kept: usize,
    /// Whether the last column, a text, is printed below its row.
    is_below: bool,
}

impl Layout {
    fn of(heading: &[(&str, Align)], rows: &[Row]) -> Self {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| length(&row.cells[column]));
            cells.chain([length(heading[column].0)]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..heading.len()).map(width).collect();
        Self { kept: widths.len(), widths, is_below: false }
    }

    fn total(&self) -> usize {
        let kept = &self.widths[..self.kept];
        kept.iter().map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
    }

    /// Makes the table at most `columns` wide: wraps a last column of text or prints it below its row; leaves
    /// out other last columns; wraps the widest columns.
    fn fit(&mut self, heading: &[(&str, Align)], columns: usize) {
        let is_text = heading.last().is_some_and(|(_, side)| *side == Align::Left);
        if is_text && self.kept > 1 && self.total() > columns {
            let last = self.kept - 1;
            let before = self.total() - self.widths[last];
            match columns.checked_sub(before).filter(|rest| *rest >= BROKEN_MIN) {
                Some(rest) => self.widths[last] = rest,
                None => (self.kept, self.is_below) = (last, true),
            }
        }
        while !is_text && self.kept > 2 && self.total() > columns {
            self.kept -= 1;
        }
        loop {
            let over = self.total().saturating_sub(columns);
            let is_wide = |column: &usize| {
                heading[*column].1 == Align::Left && self.widths[*column] > BROKEN_MIN
            };
            let widest = (0..self.kept).filter(is_wide).max_by_key(|column| self.widths[*column]);
            match widest.filter(|_| over > 0) {
                Some(at) => {
                    self.widths[at] = self.widths[at].saturating_sub(over).max(BROKEN_MIN);
                }
                None => break,
            }
        }
    }

    fn write(
        &self,
        out: &mut impl Write,
        heading: &[(&str, Align)],
        row: &Row,
        view: View,
    ) -> io::Result<()> {
        let mut rest: Vec<&str> = row.cells[..self.kept].iter().map(String::as_str).collect();
        let mut is_first = true;
        while is_first || rest.iter().any(|cell| !cell.is_empty()) {
            let mut text = String::new();
            for (column, cell) in rest.iter_mut().enumerate() {
                let (part, more) = broken(cell, self.widths[column]);
                *cell = more;
                let pad = " ".repeat(self.widths[column].saturating_sub(length(part)));
                let part = match row.tone.filter(|_| column == 0) {
                    Some(tone) => view.paint(tone, part),
                    None => part.to_owned(),
                };
                match heading[column].1 {
                    Align::Left => text.extend([part, pad]),
                    Align::Right => text.extend([pad, part]),
                }
                text.push_str(&" ".repeat(GAP));
            }
            writeln!(out, "{}", text.trim_end())?;
            is_first = false;
        }
        let indent = " ".repeat(INDENT);
        let below = row.cells.get(self.kept).filter(|text| self.is_below && !text.is_empty());
        below.map_or(Ok(()), |text| writeln!(out, "{}", view.wrapped(text, &indent)))
    }
}

/// Splits a text: returns its beginning of at most `width` characters, cut at a space if there is one,
/// and the rest.
fn broken(text: &str, width: usize) -> (&str, &str) {
    let Some((end, _)) = text.char_indices().nth(width.max(1)) else {
        return (text, "");
    };
    let space = || text[..end].rfind(' ').filter(|at| *at > 0);
    // The keys of a configuration are separated by commas.
    let comma = || text[..end].rfind(',').map(|at| at + 1);
    match Some(end).filter(|_| text[end..].starts_with(' ')).or_else(space).or_else(comma) {
        Some(at) => (&text[..at], text[at..].trim_start()),
        None => (&text[..end], text[end..].trim_start()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Row {
        Row { cells: cells.iter().map(|cell| (*cell).to_owned()).collect(), tone: None }
    }

    fn printed(heading: &[(&str, Align)], rows: &[Vec<&str>], columns: usize) -> String {
        let rows: Vec<Row> = rows.iter().map(|cells| row(cells)).collect();
        let mut out = Vec::new();
        let view = View { columns: Some(columns), ..View::default() };
        plain(&mut out, heading, &rows, view).unwrap();
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
    fn a_last_column_of_text_follows_below_its_row_if_there_is_no_room_beside_it() {
        let heading = columns("key | value | note");
        let value = "[1:1,2:1,4:1,8:1,16:1,32:1,64:1,128:1]";
        let note = "which strategy allocates, read once";
        let text = printed(&heading, &[vec!["roundup_power2_divisions", value, note]], 52);
        let expected = "key                       value\n    note\n\
                        roundup_power2_divisions  [1:1,2:1,4:1,8:1,16:1,\n                          \
                        32:1,64:1,128:1]\n    which strategy allocates, read once\n";
        assert_eq!(text, expected);
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
        markdown(&mut out, &NUMBERS[..2], &[row(&["a|b", "1"])]).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "| name | needs |\n| --- | ---: |\n| a\\|b | 1 |\n"
        );
    }
}
