//! The steps, the growth from step to step and the temporary blocks, in the format of the page.

use serde::Serialize;

use super::Drawn;
use super::tables::Table;
use stratalloc_analysis::lives::differences;
use stratalloc_analysis::{Answer, GrowthRow, Sentences, StepBytes, Temporary, TemporaryRow};

/// The growth from step to step.
#[derive(Serialize)]
pub(crate) struct GrowthData<'a> {
    sentence: &'a Sentences,
    found: String,
    /// The live bytes at the ends of steps.
    live: &'a [u64],
    /// For each row: the bytes of a step, the bytes and blocks at the end, the course, and the code.
    rows: Vec<(u64, u64, u64, String, &'a str)>,
}

impl<'a> GrowthData<'a> {
    /// Returns the data if live bytes grow.
    pub(crate) fn of(answer: &'a Answer) -> Option<Self> {
        let growth = answer.growth.as_ref().filter(|growth| growth.is_growing)?;
        let row = |row: &'a GrowthRow| {
            let (each, held) = (row.bytes_per_step, row.held_bytes);
            (each, held, row.held_blocks, row.course_text(), row.asked_for_by.as_str())
        };
        Some(Self {
            sentence: &growth.sentence,
            found: growth.found_sentence(),
            live: &growth.live_at_ends,
            rows: growth.rows.iter().map(row).collect(),
        })
    }
}

/// The steps of the program, whether live bytes grow or not.
#[derive(Serialize)]
pub(crate) struct StepsData<'a> {
    sentence: &'a Sentences,
    found: String,
    /// Whether the moments are those of the page, not of a replay with the memory that is set.
    is_drawn: bool,
    /// The begin of the first step and the end of each: its moment, the live bytes then, and their peak in
    /// the step; as differences.
    ends: Table,
}

impl<'a> StepsData<'a> {
    /// Returns the data if steps were found.
    pub(crate) fn of(drawn: &Drawn<'a>) -> Option<Self> {
        let growth = drawn.answer.growth.as_ref()?;
        let column = |of: fn(&StepBytes) -> u64| differences(growth.step_bytes.iter().map(of));
        Some(Self {
            sentence: &growth.sentence,
            found: growth.found_sentence(),
            is_drawn: growth.is_of_replay == drawn.timeline.is_replay,
            ends: Table(vec![
                ("moment", differences(growth.step_ends.iter().map(|&end| end.into()))),
                ("live", column(|end| end.live_bytes)),
                ("peak", column(|end| end.peak_bytes)),
            ]),
        })
    }
}

/// Returns the temporary blocks with at most `most` rows, whose labels `cut` shortens.
pub(crate) fn temporary(
    answer: &Answer,
    most: usize,
    cut: impl Fn(&str) -> String,
) -> Option<Temporary> {
    let all = answer.temporary.as_ref()?;
    let (listed, others) = all.rows.split_at(all.rows.len().min(most));
    let row =
        |row: &TemporaryRow| TemporaryRow { asked_for_by: cut(&row.asked_for_by), ..row.clone() };
    let sum = |of: fn(&TemporaryRow) -> u64| others.iter().map(of).fold(0, u64::saturating_add);
    Some(Temporary {
        rows: listed.iter().map(row).collect(),
        others_blocks: all.others_blocks + sum(|row| row.blocks),
        others_bytes: all.others_bytes.saturating_add(sum(|row| row.requested_bytes)),
        sentence: all.sentence.clone(),
        ..*all
    })
}
