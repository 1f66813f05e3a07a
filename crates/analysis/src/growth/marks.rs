//! Finds the steps of a program from marks in the file.

use std::collections::{BTreeMap, HashMap};

use super::steps::{STEPS_MIN, Steps, common_path, even_distance, quietest, requests_each};
use crate::callers::Callers;
use crate::lives::{LiveBytes, Lives};
use stratalloc_recording::{Mark, StackId};

/// The words of texts that mark steps, the best first.
const NAMES: [&str; 3] = ["ProfilerStep", "step", "Step"];

/// Finds the steps from marks up to a moment: from texts with a number such as `ProfilerStep#3`, or else
/// (`numbered` is false) from texts without one, which must recur at even distances until the end. The rarest
/// text is used, but first those with the word *step*.
pub(super) fn marked(
    lives: &Lives,
    marks: &[Mark],
    callers: &Callers<'_>,
    until: u32,
    live_bytes: &LiveBytes,
    numbered: bool,
) -> Option<Steps> {
    let mut places: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let is_wanted = |mark: &&Mark| {
        let has_number = mark.text.contains(|sign: char| sign.is_ascii_digit());
        mark.events_before < until && has_number == numbered
    };
    for mark in marks.iter().filter(is_wanted) {
        places.entry(without_numbers(&mark.text)).or_default().push(mark.events_before);
    }
    let mut distances = Vec::new();
    places.retain(|_, at| {
        let is_even = even_distance(at, until as usize, &mut distances).is_some();
        at.len() > STEPS_MIN && (numbered || is_even)
    });
    let order = |text: &str| NAMES.iter().position(|name| text.contains(name)).unwrap_or(3);
    let (text, at) = places.into_iter().min_by_key(|(text, at)| (order(text), at.len()))?;
    // The last step is complete if about as many events follow as a step has.
    let each = u64::from(at[at.len() - 1] - at[0]) / (at.len() as u64 - 1);
    let rest = u64::from(until - at[at.len() - 1]);
    let is_complete = until == lives.events && rest * 10 >= each * 9 && rest * 2 <= each * 3;
    let ends = quietest(&at, is_complete.then_some(until), live_bytes);
    let range = ends.first().copied()?..ends.last().copied()?;
    let inside = lives.blocks.iter().filter(|block| range.contains(&block.born));
    let stacks: HashMap<u32, StackId> =
        inside.filter_map(|block| block.stack).map(|s| (callers.of_stack(s), s)).collect();
    let path = common_path(stacks.into_values(), callers).unwrap_or_default();
    let requests = requests_each(lives, &ends);
    Some(Steps { ends, mark: Some(text), begins_with: None, path, requests })
}

/// Returns a text with `#` in place of each number.
fn without_numbers(text: &str) -> String {
    let mut found = String::new();
    for sign in text.chars().map(|sign| if sign.is_ascii_digit() { '#' } else { sign }) {
        if sign != '#' || !found.ends_with('#') {
            found.push(sign);
        }
    }
    found
}
