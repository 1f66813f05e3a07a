//! The results, printed as a table with a column for each subject, or as one JSON object per result.

use std::io::{self, Write};

use serde::Serialize;

use super::super::outcome::out;
use super::super::show::{Align, is_json, say, shown_conf, table};
use super::cases::Together;

/// The subject of a timing: a configuration on a device, or another allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) conf: String,
    pub(super) device: String,
}

impl Subject {
    /// Returns the machine itself as a subject, for the floors.
    pub(super) fn machine() -> Self {
        Self { conf: String::new(), device: String::new() }
    }
}

/// The result of a case for one subject, as JSON.
#[derive(Serialize)]
pub(super) struct CaseResult<'a> {
    case: &'a str,
    threads: usize,
    conf: &'a str,
    device: &'a str,
    ns_per_op: f64,
    mops: f64,
    /// Half of the interquartile range as a share of the median. Null for a single timing.
    spread: Option<f64>,
}

impl<'a> CaseResult<'a> {
    /// Returns the median of the timings; `None` if there are none.
    pub(super) fn of(
        case: &'a str,
        threads: usize,
        subject: &'a Subject,
        mut times: Vec<Together>,
    ) -> Option<Self> {
        times.sort_by(|a, b| a.ns.total_cmp(&b.ns));
        let Together { ns, mops } = *times.get(times.len() / 2)?;
        let rest = times.len() / 4;
        let quartiles = [&times[rest], &times[times.len() - 1 - rest]];
        let spread = (quartiles[1].ns - quartiles[0].ns) / (2.0 * ns);
        Some(Self {
            case,
            threads,
            conf: &subject.conf,
            device: &subject.device,
            ns_per_op: rounded(ns, 100.0),
            mops: rounded(mops, 1000.0),
            spread: (times.len() > 1).then(|| rounded(spread, 1000.0)),
        })
    }

    pub(super) fn print_json(&self) -> io::Result<()> {
        writeln!(out(), "{}", serde_json::to_string(self)?)
    }

    fn cell(&self) -> String {
        match self.spread {
            Some(spread) => format!("{:.1} ±{:.0}%", self.ns_per_op, spread * 100.0),
            None => format!("{:.1}", self.ns_per_op),
        }
    }
}

fn rounded(number: f64, parts: f64) -> f64 {
    (number * parts).round() / parts
}

/// All results. With `--json` each row is printed immediately; otherwise [`print`](Self::print) prints all.
#[derive(Default)]
pub(super) struct Results {
    subjects: Vec<Subject>,
    /// Each case with its number of threads, in the order in which they were timed, and the table cell
    /// for each subject. A line may end before the last subject.
    lines: Vec<((String, usize), Vec<String>)>,
}

impl Results {
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Adds the timings of a case for a subject. An empty list means that the subject does not support
    /// the case.
    pub(super) fn add(
        &mut self,
        case: &str,
        threads: usize,
        subject: &Subject,
        times: Vec<Together>,
    ) -> io::Result<()> {
        let Some(row) = CaseResult::of(case, threads, subject, times) else {
            return Ok(());
        };
        let known = self.subjects.iter().position(|known| known == subject);
        let column = known.unwrap_or_else(|| {
            self.subjects.push(subject.clone());
            self.subjects.len() - 1
        });
        let line = (case.to_owned(), threads);
        let at = self.lines.iter().position(|(known, _)| *known == line).unwrap_or_else(|| {
            self.lines.push((line, Vec::new()));
            self.lines.len() - 1
        });
        let cells = &mut self.lines[at].1;
        if cells.len() <= column {
            cells.resize(column + 1, String::new());
        }
        cells[column] = row.cell();
        if is_json() { row.print_json() } else { Ok(()) }
    }

    /// Prints the table and then the names of the columns.
    pub(super) fn print(&self) -> io::Result<()> {
        if is_json() {
            return Ok(());
        }
        let names: Vec<String> = self.subjects.iter().enumerate().map(name_of).collect();
        let mut heading = vec![("case", Align::Left), ("threads", Align::Right)];
        heading.extend(names.iter().map(|name| (name.as_str(), Align::Right)));
        let rows = self.lines.iter().map(|((case, threads), cells)| {
            let mut row = vec![case.clone(), threads.to_string()];
            row.extend_from_slice(cells);
            row.resize(heading.len(), String::new());
            row
        });
        let mut out = out();
        table(&mut out, &heading, &rows.collect::<Vec<_>>())?;
        for (subject, name) in self.subjects.iter().zip(&names) {
            if *subject != Subject::machine() {
                writeln!(out, "{name}: {} on {}", shown_conf(&subject.conf), subject.device)?;
            }
        }
        say(
            &mut out,
            "Nanoseconds a step, with several threads as the slowest of them saw it. Medians of rounds in turn; \
             ± half of the distance between the quartiles.",
        )
    }
}

/// Returns the name of a column.
fn name_of((at, subject): (usize, &Subject)) -> String {
    match (u8::try_from(at), *subject == Subject::machine()) {
        (_, true) => "machine".to_owned(),
        (Ok(at @ 0..26), _) => char::from(b'A' + at).to_string(),
        _ => format!("#{at}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_median_and_the_quartiles_around_it() {
        let subject = Subject { conf: "backend:native".to_owned(), device: "sim".to_owned() };
        let times = [10.0, 30.0, 20.0, 25.0, 15.0].map(|ns| Together { ns, mops: 1000.0 / ns });
        let row = CaseResult::of("pair", 1, &subject, times.to_vec()).unwrap();
        assert_eq!((row.ns_per_op, row.mops, row.spread), (20.0, 50.0, Some(0.25)));
        assert_eq!(row.cell(), "20.0 ±25%");
        let once = CaseResult::of("pair", 1, &subject, vec![times[0]]).unwrap();
        assert_eq!((once.spread, once.cell()), (None, "10.0".to_owned()));
        assert!(CaseResult::of("pair", 1, &subject, Vec::new()).is_none());
    }
}
