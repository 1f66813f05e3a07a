//! An answer as text for a terminal.

use std::io::{self, Write};

use stratalloc::config::shown;
use stratalloc_analysis::{
    Answer, CategoryBytes, CodeFigures, Compared, FrameFigures, FreeClass, GrowthRow, HolderList,
    MomentCauses, Question, Setting, StepGrowth, counted_as, device_remark, devices_headline,
    grouped, host_sentence, size_text, totals_rows, totals_sentence,
};
use stratalloc_recording::{DeviceFigures, Totals};

use super::outcome::out;
use super::short;
use super::show::Align::{Left, Right};
use super::show::{
    LUCK, NEED_HEADING, PYTORCHS, UNKNOWN, columns, emphasised, near, need_cells, replayed_conf,
    say, table, toned_table, wrapped,
};
use super::view::{self, Tone};

/// The number of settings in the table.
const SHOWN: usize = 3;
/// The number of devices in a table that leaves room for an answer.
const DEVICES_SHOWN: usize = 4;
/// The maximum number of rows for streams and pools in the table.
const HEAPS_SHOWN: usize = 8;

/// Prints an answer on one screen. The table that compares the devices of a file comes before the first of
/// them.
pub(crate) fn write_short(answer: &Answer) -> io::Result<()> {
    let rows = write_devices(answer, DEVICES_SHOWN)?;
    short::write(answer, rows)?;
    writeln!(out())
}

/// Prints all of an answer. The table that compares the devices of a file comes before the first of them.
pub(crate) fn write(answer: &Answer, question: &Question) -> io::Result<()> {
    write_devices(answer, usize::MAX)?;
    if answer.no_history.is_some() {
        return write_dump(answer, question.compared);
    }
    write_sentences(answer)?;
    write_tried(answer)?;
    let mut out = out();
    if let Some((causes, holders)) = answer.causes.as_ref().zip(answer.holders.as_ref()) {
        write_causes(&causes.main, answer)?;
        if let Some(label) = &causes.main.failed_by {
            writeln!(out, "{}\n", wrapped(format!("The failed request came from {label}.")))?;
        }
        write_holders(holders, question.compared, answer)?;
        write_categories(answer)?;
        writeln!(out)?;
        let reserved = causes.peak_reserved.as_ref();
        if let Some(reserved) = reserved.filter(|one| one.events != causes.main.events) {
            write_causes(reserved, answer)?;
        }
    }
    if let Some(growth) = answer.growth.as_ref().filter(|growth| growth.is_growing) {
        write_growth(growth)?;
    }
    write_not_shown(answer)
}

/// Prints how the devices of a file compare, at most `most` of them, if this is the first one's answer.
/// Returns the number of rows.
fn write_devices(answer: &Answer, most: usize) -> io::Result<usize> {
    let is_first = answer.devices.first().is_some_and(|first| first.device == answer.device);
    let Some(headline) = devices_headline(&answer.devices).filter(|_| is_first) else {
        return Ok(0);
    };
    let mut out = out();
    writeln!(out, "{}", wrapped(headline))?;
    let row = |one: &DeviceFigures| {
        let (reserved, live) = (size_text(one.reserved_peak_bytes), size_text(one.live_peak_bytes));
        let failed = grouped(one.failures);
        vec![one.device.to_string(), reserved, live, failed, device_remark(one).to_owned()]
    };
    let mut rows: Vec<_> = answer.devices.iter().take(most).map(row).collect();
    let mut heading = columns("device: | reserved at most: | live at most: | failed: | known");
    if answer.devices.iter().all(|one| device_remark(one).is_empty()) {
        heading.pop();
        rows.iter_mut().for_each(|row| drop(row.pop()));
    }
    table(&mut out, &heading, &rows)?;
    let left = answer.devices.len() - rows.len();
    if left > 0 {
        writeln!(
            out,
            "and {}: --all shows them",
            counted_as(left as u64, "more device", "more devices")
        )?;
    }
    writeln!(out)?;
    Ok(rows.len() + 3 + usize::from(left > 0))
}

/// Prints the data that a recording lacks.
fn write_not_shown(answer: &Answer) -> io::Result<()> {
    let mut out = out();
    if !answer.not_shown.is_empty() {
        writeln!(out, "The recording does not show:")?;
    }
    for what in &answer.not_shown {
        let lines = view::current().wrapped(&shown(&what.to_string()), "    ");
        writeln!(out, "  - {}", lines.trim_start())?;
    }
    writeln!(out)
}

/// Prints the figures that a file states itself.
fn write_totals(totals: &Totals) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", wrapped(totals_sentence(totals)))?;
    let row = |(name, bytes): &(String, u64)| vec![name.clone(), near(*bytes)];
    let rows: Vec<_> = totals_rows(totals).iter().map(row).collect();
    table(&mut out, &[("", Left), ("MiB", Right)], &rows)?;
    writeln!(out)
}

/// Prints that a recording has no history, and how to make a better one.
pub(crate) fn write_no_history(answer: &Answer) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", shown(&answer.trace))?;
    let Some(no_history) = answer.no_history else { return Ok(()) };
    writeln!(out, "{}", emphasised(no_history.sentence()))?;
    writeln!(out, "{}", wrapped(no_history.remedy()))
}

/// Prints the memory at the moment of the dump.
fn write_dump(answer: &Answer, compared: Compared) -> io::Result<()> {
    write_no_history(answer)?;
    let mut out = out();
    let host = answer.host.as_ref().map(host_sentence);
    for line in [host, answer.failed_before_dump()].into_iter().flatten() {
        writeln!(out, "{}", wrapped(line))?;
    }
    writeln!(out)?;
    if let Some(totals) = answer.totals_alone() {
        write_totals(totals)?;
        return write_not_shown(answer);
    }
    let Some((causes, holders)) = answer.causes.as_ref().zip(answer.holders.as_ref()) else {
        return Ok(());
    };
    write_causes(&causes.main, answer)?;
    write_holders(holders, compared, answer)?;
    write_categories(answer)?;
    writeln!(out, "\n{}", wrapped(answer.free_sentence()))?;
    let free_bytes = causes.main.causes.free_bytes();
    let row = |class: &FreeClass| {
        let stream = answer.stream_numbers.name(class.stream);
        let each = format!("{} bytes on {stream}", grouped(class.each_bytes));
        share_cells(class.bytes, free_bytes, class.ranges, &[each])
    };
    let rows: Vec<_> = answer.free_ranges.iter().map(row).collect();
    if !rows.is_empty() {
        table(&mut out, &columns("MiB: | : | ranges: | each"), &rows)?;
    }
    writeln!(out)
}

fn write_sentences(answer: &Answer) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", shown(&answer.trace))?;
    let joined = |sentences: Vec<&str>| sentences.join(" ");
    writeln!(out, "{}", emphasised(joined(answer.sentence.main().collect())))?;
    let more = joined(answer.sentence.more().collect());
    if !more.is_empty() {
        writeln!(out, "{}", wrapped(more))?;
    }
    for choice in &answer.choices {
        for row in short::choice_rows(choice, view::current()) {
            writeln!(out, "{row}")?;
        }
    }
    if let Some(torch) = answer.torch_sentence.as_ref().filter(|_| !answer.choices.is_empty()) {
        writeln!(out, "{}", wrapped(torch))?;
    }
    for sentences in [&answer.memory, &answer.code].into_iter().filter(|text| !text.is_empty()) {
        writeln!(out, "{}", wrapped(sentences))?;
    }
    if let Some(platform) = answer.platform_sentence() {
        writeln!(out, "{}", wrapped(platform))?;
    }
    let host = answer.host.as_ref().map(host_sentence);
    // A file that has nothing else describes its memory by them.
    let totals = answer.totals.as_ref().filter(|_| answer.totals_alone().is_none());
    let totals = totals.map(totals_sentence);
    for line in answer.limit.limit_sentence.iter().chain(&host).chain(&totals) {
        writeln!(out, "{}", wrapped(line))?;
    }
    writeln!(out)
}

fn write_tried(answer: &Answer) -> io::Result<()> {
    let Some(recorded) = &answer.recorded.replayed else { return Ok(()) };
    let recorded_ms = answer.recorded.duration_ms;
    let row = |what: String, setting: &Setting| {
        need_cells(what, setting.needs_in_mib(), setting, recorded_ms)
    };
    let (models, searched): (Vec<_>, Vec<_>) = answer.tried.iter().partition(|one| one.is_model);
    let others = searched.iter().filter(|setting| setting.conf != recorded.conf);
    let named = answer.choice.as_ref().map(|choice| &choice.conf);
    let best = others.enumerate().filter(|(at, one)| *at < SHOWN || named == Some(&one.conf));
    let best = best.map(|(_, setting)| *setting);
    let listed =
        best.chain(&answer.asked).map(|setting| row(replayed_conf(&setting.conf), setting));
    let mut rows: Vec<_> = listed.collect();
    rows.push(row(format!("as recorded: {}", replayed_conf(&recorded.conf)), recorded));
    rows.extend(models.into_iter().map(|model| row(format!("{} (a model)", model.conf), model)));
    let mut out = out();
    table(&mut out, &columns(NEED_HEADING), &rows)?;
    let (live, searched) = (answer.live_peak(), answer.searched());
    writeln!(out, "{}", wrapped(PYTORCHS))?;
    let live = format!("live bytes alone: {} MiB{}", near(live.live_bytes), live.remark());
    writeln!(out, "{}", wrapped(format!("{searched}; {live}")))?;
    let besides = answer.besides();
    let needs =
        format!("needs: the smallest device size from which on no request fails. {besides}");
    writeln!(out, "{}", wrapped(needs))?;
    if recorded_ms.is_some() {
        let ms = "device ms: simulated; in brackets as a share of the recorded time";
        writeln!(out, "{}", wrapped(ms))?;
    }
    let mut all = answer.tried.iter().chain([recorded]);
    if all.any(|setting| setting.needs_with_luck_bytes.is_some()) {
        writeln!(out, "{}", wrapped(LUCK))?;
    }
    writeln!(out)
}

/// Prints the reserved bytes at a moment by cause, for all streams and for each.
fn write_causes(moment: &MomentCauses, answer: &Answer) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", wrapped(&moment.why))?;
    let total = moment.reserved_bytes;
    let mut heading = vec![("MiB reserved", Left), ("all", Right), ("", Right)];
    let columns = moment.columns(&answer.stream_numbers);
    let several = if columns.len() > 1 { HEAPS_SHOWN } else { 0 };
    let heaps = || columns.iter().take(several);
    heading.extend(heaps().map(|column| (column.name.as_str(), Right)));
    let (mut rows, mut tones) = (Vec::new(), Vec::new());
    for (at, (name, bytes)) in moment.causes.rows().into_iter().enumerate() {
        if bytes == 0 && name != "requested and live" {
            continue;
        }
        let mut row = vec![name.to_owned(), near(bytes), percent(bytes, total)];
        row.extend(heaps().map(|heap| near(heap.causes.rows()[at].1)));
        rows.push(row);
        tones.push(Tone::CAUSES[at]);
    }
    let mut sum = vec!["together".to_owned(), near(total), percent(total, total)];
    sum.extend(heaps().map(|heap| near(heap.reserved_bytes)));
    rows.push(sum);
    toned_table(&mut out, &heading, &rows, &tones)?;
    if let Some(handles) = answer.stream_numbers.handles_sentence()
        && several > 0
        && view::current().is_verbose()
    {
        writeln!(out, "{}", wrapped(handles))?;
    }
    writeln!(out)
}

/// Prints the growth from step to step.
fn write_growth(growth: &StepGrowth) -> io::Result<()> {
    let mut out = out();
    // A decisive growth has been printed at the top.
    if !growth.is_decisive {
        writeln!(out, "{}", wrapped(&growth.sentence))?;
    }
    writeln!(out, "{}", wrapped(growth.found_sentence()))?;
    let row = |row: &GrowthRow| {
        let per_step = match row.bytes_per_step {
            0 => UNKNOWN.to_owned(),
            bytes => near(bytes),
        };
        let (held, blocks) = (near(row.held_bytes), grouped(row.held_blocks));
        vec![per_step, held, blocks, row.course_text(), row.asked_for_by.clone()]
    };
    let rows: Vec<_> = growth.rows.iter().map(row).collect();
    if !rows.is_empty() {
        let heading = "MiB a step: | MiB at the end: | blocks: | growth | requested by (called by)";
        table(&mut out, &columns(heading), &rows)?;
    }
    writeln!(out)
}

fn write_holders(holders: &HolderList, compared: Compared, answer: &Answer) -> io::Result<()> {
    let mut out = out();
    let blocks = counted_as(holders.blocks, "block holds", "blocks hold");
    writeln!(out, "Then {blocks} {} MiB:", near(holders.requested_bytes))?;
    // Without a history no ages are known.
    let has_ages = !holders.by_age.is_empty();
    let cells = |bytes: u64, blocks: u64, more: &[String]| {
        share_cells(bytes, holders.requested_bytes, blocks, more)
    };
    if holders.has_stacks {
        let row = |CodeFigures { asked_for_by, holder, .. }: &CodeFigures| {
            let ago = match (holder.newest_requests, holder.oldest_requests) {
                (None, _) => UNKNOWN.to_owned(),
                (Some(newest), None) => format!("{} and more", grouped(newest.into())),
                (Some(newest), Some(oldest)) if newest == oldest => grouped(oldest.into()),
                (Some(newest), Some(oldest)) => {
                    format!("{} to {}", grouped(newest.into()), grouped(oldest.into()))
                }
            };
            let more = [ago, asked_for_by.clone()];
            cells(holder.requested_bytes, holder.blocks, &more[usize::from(!has_ages)..])
        };
        let heading = match has_ages {
            true => "MiB: | : | blocks: | requests ago: | requested by (called by)",
            false => "MiB: | : | blocks: | requested by (called by)",
        };
        table(&mut out, &columns(heading), &holders.by_stack.iter().map(row).collect::<Vec<_>>())?;
        if compared == Compared::AllFrames {
            write_stacks(&holders.by_stack)?;
        }
    }
    write_sizes(holders, if holders.has_stacks { SHOWN } else { usize::MAX }, answer)?;
    if !has_ages {
        return Ok(());
    }
    let ages = holders.by_age.iter().map(|class| {
        let age = match class.up_to_requests {
            _ if class.lived_before => "before the recording began".to_owned(),
            Some(end) => format!("at most {} requests ago", grouped(end.into())),
            None => "longer ago".to_owned(),
        };
        cells(class.requested_bytes, class.blocks, &[age])
    });
    table(&mut out, &columns("MiB: | : | blocks: | requested"), &ages.collect::<Vec<_>>())
}

/// Prints the live bytes at the most important moment by category, if stacks are recorded.
fn write_categories(answer: &Answer) -> io::Result<()> {
    let Some(moment) = answer.moments.first().filter(|one| !one.categories.is_empty()) else {
        return Ok(());
    };
    let row = |one: &CategoryBytes| {
        let share = format!("{:.1}%", one.share * 100.0);
        let bytes = near(one.requested_bytes);
        vec![bytes, share, grouped(one.blocks), one.category.to_owned()]
    };
    let rows: Vec<_> = moment.categories.iter().map(row).collect();
    table(&mut out(), &columns("MiB: | : | blocks: | category"), &rows)?;
    writeln!(out(), "{}", wrapped(&moment.categories_sentence))
}

/// Prints all frames of each holder's stack, innermost first.
fn write_stacks(rows: &[CodeFigures]) -> io::Result<()> {
    let mut out = out();
    for CodeFigures { asked_for_by, holder, frames, .. } in rows {
        let Some(frames) = frames else { continue };
        let held = format!("{} MiB, {asked_for_by}", near(holder.requested_bytes));
        writeln!(out, "{}", wrapped(held))?;
        for FrameFigures { filename, line, name } in frames {
            say(&mut out, format_args!("    {filename}:{line} {name}"))?;
        }
    }
    Ok(())
}

/// Prints the first `most` sizes of live blocks.
fn write_sizes(holders: &HolderList, most: usize, answer: &Answer) -> io::Result<()> {
    let sizes = holders.by_size.iter().map(|class| {
        let stream = answer.stream_numbers.name(class.stream);
        let each = format!("{} bytes on {stream}", grouped(class.each_bytes));
        share_cells(class.requested_bytes, holders.requested_bytes, class.blocks, &[each])
    });
    table(&mut out(), &columns("MiB: | : | blocks: | each"), &sizes.take(most).collect::<Vec<_>>())
}

/// Returns the table cells for blocks or ranges: their bytes, the share of `of`, their number, and `more`.
fn share_cells(bytes: u64, of: u64, count: u64, more: &[String]) -> Vec<String> {
    [&[near(bytes), percent(bytes, of), grouped(count)], more].concat()
}

fn percent(bytes: u64, of: u64) -> String {
    if of == 0 { UNKNOWN.to_owned() } else { format!("{:.1}%", bytes as f64 * 100.0 / of as f64) }
}
