//! An answer on one screen: what to set, which code holds the memory, when, and why.
//!
//! The answer is a list of parts. Parts of little weight are left out until the rest fits.

use std::io::{self, Write};

use stratalloc::config::shown;
use stratalloc_analysis::{
    Answer, Choice, CodeFigures, HolderList, SizeClass, counted_as, grouped, near,
};

use super::chart;
use super::outcome::out;
use super::view::{self, Tone, View};

/// The most rows: a terminal with 24 has one for the empty row after an answer, and one for its prompt.
const ROWS: usize = 22;
/// The most rows about what is not recorded.
const LACKS_ROWS: usize = 2;
/// The number of holders.
const HOLDERS: usize = 5;

const ALL: &str = "--all prints the rest: settings tried, causes by stream, ages, categories.";
const ALL_DEVICES: &str =
    "--all prints the rest and the other devices, --recorded-device N one of them.";

/// How much a part is worth, the most first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    Answer,
    Cause,
    FirstHolders,
    Lacks,
    Holders,
    Chart,
    Code,
    Limit,
    OtherSetting,
    Space,
}

/// Rows that are shown or left out together.
struct Part {
    weight: Weight,
    rows: Vec<String>,
}

/// Prints an answer, after `used` rows about other things.
pub(crate) fn write(answer: &Answer, used: usize) -> io::Result<()> {
    let view = view::current();
    let rows = fitted(parts(answer, view), ROWS.saturating_sub(used));
    rows.iter().try_for_each(|row| writeln!(out(), "{row}"))
}

/// Leaves out parts of little weight until there are at most `most` rows.
fn fitted(mut parts: Vec<Part>, most: usize) -> Vec<String> {
    while parts.iter().map(|part| part.rows.len()).sum::<usize>() > most {
        let least = parts.iter().enumerate().max_by_key(|(_, part)| part.weight);
        match least.filter(|(_, part)| part.weight > Weight::Answer).map(|(at, _)| at) {
            Some(at) => drop(parts.remove(at)),
            None => break,
        }
    }
    parts.into_iter().flat_map(|part| part.rows).collect()
}

fn parts(answer: &Answer, view: View) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut add = |weight, rows: Vec<String>| {
        if !rows.is_empty() {
            parts.push(Part { weight, rows });
        }
    };
    let lines = |sentences: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        let text = sentences.collect::<Vec<&str>>().join(" ");
        if text.is_empty() { Vec::new() } else { view.lines(&shown(&text), "") }
    };
    let space = || vec![String::new()];
    let name = match answer.devices.len() {
        0 | 1 => shown(&answer.trace),
        _ => format!("{} device {}", shown(&answer.trace), answer.device),
    };
    add(Weight::Answer, vec![view.cut(&name)]);
    let headline = lines(&mut answer.sentence.main().take(1));
    add(Weight::Answer, headline.iter().map(|row| view.bold(row)).collect());
    add(Weight::Answer, lines(&mut answer.sentence.main().skip(1)));
    for (at, choice) in answer.choices.iter().enumerate() {
        let weight = if at == 0 { Weight::Answer } else { Weight::OtherSetting };
        add(weight, choice_rows(choice, view));
    }
    add(Weight::Limit, lines(&mut answer.platform_sentence().into_iter()));
    add(Weight::Limit, lines(&mut answer.limit.limit_sentence.as_deref().into_iter()));
    // Without code, the sentence names the option that records it.
    let has_stacks = answer.holders.as_ref().is_some_and(|holders| holders.has_stacks);
    let weight = if has_stacks { Weight::Code } else { Weight::Lacks };
    add(weight, lines(&mut answer.memory.main()));
    add(Weight::FirstHolders, lines(&mut answer.code.main()));
    if let Some(growth) = answer.growth.as_ref().filter(|one| one.is_growing && !one.is_decisive) {
        add(Weight::Code, lines(&mut growth.sentence.main()));
    }
    if let Some(over) = &answer.over_time {
        add(Weight::Space, space());
        add(Weight::Chart, chart::lines(over, answer.limit.known_bytes(), view));
    }
    if let Some((causes, holders)) = answer.causes.as_ref().zip(answer.holders.as_ref()) {
        add(Weight::Space, space());
        let mut rows = holder_rows(answer, holders, view);
        let others = rows.split_off(rows.len().min(HOLDERS - 2));
        let mut first = lines(&mut [answer.holders_sentence(holders).as_str()].into_iter());
        first.append(&mut rows);
        add(Weight::FirstHolders, first);
        add(Weight::Holders, others);
        add(Weight::Space, space());
        add(Weight::Cause, lines(&mut causes.main.why.main()));
    }
    add(Weight::Lacks, lacks_rows(answer, view));
    let end = if answer.devices.len() > 1 { ALL_DEVICES } else { ALL };
    add(Weight::Answer, view.lines(end, "").iter().map(|row| view.paint(Tone::Dim, row)).collect());
    parts
}

/// Returns the line to paste, with the allocator that reads it.
pub(crate) fn choice_rows(choice: &Choice, view: View) -> Vec<String> {
    let Choice { allocator, set, .. } = choice;
    let row = format!("  {:<21} {set}", format!("{allocator}:"));
    match view.columns.is_some_and(|columns| row.chars().count() > columns) {
        true => vec![format!("  {allocator}:"), format!("  {set}")],
        false => vec![row],
    }
}

/// Returns the rows about what is not recorded: as much as there is room for.
fn lacks_rows(answer: &Answer, view: View) -> Vec<String> {
    let lacks: Vec<String> = answer.not_shown.iter().map(ToString::to_string).collect();
    let rows = |count: usize| {
        let more = match lacks.len() - count {
            0 => String::new(),
            more => format!("; and {} more", grouped(more as u64)),
        };
        view.lines(&shown(&format!("Not recorded: {}{more}.", lacks[..count].join("; "))), "")
    };
    let counts = (1..=lacks.len()).rev();
    let mut fitting = counts.map(rows).skip_while(|rows| rows.len() > LACKS_ROWS);
    fitting.next().unwrap_or_else(|| if lacks.is_empty() { Vec::new() } else { rows(1) })
}

/// Returns a row for each of the largest holders: by code, or by size if no stacks are recorded.
fn holder_rows(answer: &Answer, holders: &HolderList, view: View) -> Vec<String> {
    let all_bytes = holders.requested_bytes.max(1);
    let row = |(bytes, label): (u64, String)| {
        let share = format!("{:.0} %", bytes as f64 * 100.0 / all_bytes as f64);
        let figures = format!("{:>8} MiB {share:>6}  ", near(bytes));
        view.cut_label(figures, &shown(&label))
    };
    let mut largest: Vec<(u64, String)> = match holders.has_stacks {
        true => {
            let of = |row: &CodeFigures| (row.holder.requested_bytes, row.asked_for_by.clone());
            holders.by_stack.iter().map(of).collect()
        }
        false => {
            let of = |class: &SizeClass| {
                let blocks = counted_as(class.blocks, "block", "blocks");
                let on = match answer.stream_numbers.has_several() {
                    true => format!(" on {}", answer.stream_numbers.name(class.stream)),
                    false => String::new(),
                };
                let label = format!("{blocks} of {} bytes{on}", grouped(class.each_bytes));
                (class.requested_bytes, label)
            };
            holders.by_size.iter().map(of).collect()
        }
    };
    largest.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    largest.into_iter().take(HOLDERS).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_little_weight_are_left_out_until_the_rest_fits() {
        let part = |weight, text: &str| Part { weight, rows: vec![text.to_owned()] };
        let parts = || {
            vec![
                part(Weight::Answer, "answer"),
                part(Weight::Space, ""),
                part(Weight::Chart, "chart"),
                part(Weight::Space, ""),
                part(Weight::Cause, "cause"),
                part(Weight::Answer, "end"),
            ]
        };
        assert_eq!(fitted(parts(), 6).len(), 6);
        assert_eq!(fitted(parts(), 5), ["answer", "", "chart", "cause", "end"]);
        assert_eq!(fitted(parts(), 3), ["answer", "cause", "end"]);
        assert_eq!(fitted(parts(), 0), ["answer", "end"]);
    }
}
