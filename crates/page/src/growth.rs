//! The growth from step to step, in the format of the page.

use serde::Serialize;

use stratalloc_analysis::{Answer, GrowthRow};

/// The growth from step to step.
#[derive(Serialize)]
pub(crate) struct GrowthData<'a> {
    sentence: &'a str,
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
