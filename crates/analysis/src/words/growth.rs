//! The sentences about growth from step to step.

use super::{Sentences, counted_as, grouped, near};
use crate::growth::{GrowthCourse, GrowthRow, StepGrowth, StepsEnd};
use stratalloc::size::MIB;

/// The number of rows that the sentence names.
const NAMED: usize = 3;

/// The reasons why no steps are found.
pub(crate) mod no_steps {
    pub(crate) const NO_HISTORY: &str = "the recording has no history";
    pub(crate) const LEFT_OUT: &str =
        "requests or frees were left out when it was made (skip_actions)";
    pub(crate) const NO_SEQUENCE: &str =
        "no sequence of requests repeats at even distances until its end";
    pub(crate) const FEW_STEPS: &str = "it has fewer than 4 complete steps";
    pub(crate) const FREES_NOTHING: &str =
        "what repeats in it frees hardly any block, so it is no step";
}

impl StepGrowth {
    /// Returns the result as sentences.
    pub(crate) fn text(&self, end: StepsEnd) -> Sentences {
        let steps = counted_as(self.steps, "step", "steps");
        if !self.is_growing {
            return Sentences::one(format!("Live memory does not grow steadily over {steps}."));
        }
        let until = match end {
            StepsEnd::Recording => "",
            StepsEnd::Failure => " before a request failed",
            StepsEnd::FailedReplay => " before a request fails under the limit",
        };
        let mut text = format!(
            "Live memory grows by {} a step, {} MiB over {steps}{until}",
            small(self.bytes_per_step),
            near(self.grown_bytes)
        );
        let growing: Vec<&GrowthRow> = self.growing().collect();
        let named = || growing.iter().take(NAMED);
        // The line is left out if the labels contain it.
        let is_new = |line: &&String| !named().all(|row| row.asked_for_by.contains(line.as_str()));
        let line = self.line.as_ref().filter(is_new);
        if let Some(line) = line {
            let share = if growing.len() > 1 { "nearly all of it" } else { "all of it" };
            text += &format!(", {share} from {line}");
        }
        if growing.is_empty() {
            text += "; no single caller grows steadily.";
        } else {
            let rows: Vec<_> = named().map(|row| row.growth(growing.len() > 1)).collect();
            text += &format!(": {}", rows.join("; "));
            text += if growing.len() > NAMED { "; and others." } else { "." };
        }
        let more = growing.iter().filter(|row| row.course == GrowthCourse::MoreBlocks).count();
        let kept = "The program keeps a reference to each of these blocks.";
        let graphs = "Several lines that grow together are usually the graphs of results that are kept: keep \
             loss.item() or loss.detach(), not loss.";
        let all = Sentences::one(text);
        let all = all.and_more(if more > 0 { kept } else { "" });
        let all = all.and(if more > 1 { graphs } else { "" });
        let without = format!(
            "Without everything that grows, the last steps would need about {} MiB of live memory.",
            near(self.without_growth_bytes)
        );
        let left = self.steps_left.map(|left| {
            let steps = counted_as(left, "more step", "more steps");
            format!("At this rate, at most {steps} fit under the limit.")
        });
        all.and(without).and_more(left.unwrap_or_default())
    }

    /// Returns the rows that grow, the largest growth first.
    pub fn growing(&self) -> impl Iterator<Item = &GrowthRow> {
        self.rows.iter().filter(|row| row.course != GrowthCourse::FilledOnce)
    }

    /// Returns a sentence about the steps.
    #[must_use]
    pub fn found_sentence(&self) -> String {
        let begin = match (&self.mark, &self.begins_with) {
            (Some(mark), _) => format!(", each beginning at the mark {mark:?}"),
            (None, Some(code)) => format!(", each beginning in {code}"),
            (None, None) => String::new(),
        };
        let found = if self.mark.is_some() { "marks" } else { "repeated requests" };
        format!(
            "Found from {found}: {} of about {}{begin}.",
            counted_as(self.steps, "step", "steps"),
            counted_as(self.requests_per_step.into(), "request", "requests")
        )
    }
}

impl GrowthRow {
    fn growth(&self, with_bytes: bool) -> String {
        let how = match (self.course, with_bytes) {
            (GrowthCourse::LargerBlocks, _) => "which replaces a block by a larger one".to_owned(),
            (_, true) => small(self.bytes_per_step),
            (_, false) => self.blocks_text(),
        };
        format!("{}, {how}", self.asked_for_by)
    }

    /// Formats the blocks of a step: "1 block a step", "1.8 blocks a step", "1 block in 3 steps".
    fn blocks_text(&self) -> String {
        let tenths = (self.blocks_per_step * 10.0).round() / 10.0;
        let steps_each = 1.0 / self.blocks_per_step;
        let is_whole = (steps_each - steps_each.round()).abs() < steps_each / 20.0;
        if tenths == 1.0 {
            "1 block a step".to_owned()
        } else if tenths > 0.5 || tenths > 0.2 && !is_whole {
            format!("{tenths} blocks a step")
        } else {
            format!("1 block in {steps_each:.0} steps")
        }
    }

    /// Returns how the row grows, for a table.
    #[must_use]
    pub fn course_text(&self) -> String {
        match self.course {
            GrowthCourse::MoreBlocks => self.blocks_text(),
            GrowthCourse::LargerBlocks => "a larger block each step".to_owned(),
            GrowthCourse::FilledOnce => {
                format!("no more since step {}", grouped(self.last_step))
            }
        }
    }
}

/// Formats bytes in MiB, or as they are if they are few.
fn small(bytes: u64) -> String {
    match bytes < MIB / 10 {
        true => format!("{} bytes", grouped(bytes)),
        false => format!("{} MiB", near(bytes)),
    }
}

/// Returns the label of blocks of one size. `stream` is the name of their stream.
pub(crate) fn size_label(each_bytes: u64, stream: &str) -> String {
    format!("blocks of {} bytes on {stream}", grouped(each_bytes))
}
