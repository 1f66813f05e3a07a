//! The stacks that a page holds, each frame and each text once, within a bound.

use std::collections::HashMap;

use serde::Serialize;

use crate::analysis::told_stack;
use crate::replay::{self, Frame, StackId};

/// Stacks by the places of their frames, the innermost first.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Stacks {
    texts: Vec<String>,
    /// Places of the file and the function among the texts, the line, and whether it is the user's own.
    frames: Vec<(u32, u32, u32, u8)>,
    stacks: Vec<Vec<u32>>,
    /// Who asked, in a line.
    told: Vec<String>,
}

/// The stacks of a page and where each is.
#[derive(Debug, Default)]
pub(crate) struct StackTable {
    pub(crate) data: Stacks,
    places: HashMap<StackId, i64>,
}

/// More frames of one stack are not shown.
const FRAMES: usize = 64;
/// What a number takes in the page.
const NUMBER_BYTES: usize = 6;

impl StackTable {
    /// The first of `wanted` that together take at most `most` bytes.
    pub(crate) fn of(
        stacks: &replay::Stacks,
        wanted: impl Iterator<Item = StackId>,
        most: usize,
    ) -> Self {
        let mut table = Self::default();
        let mut texts: HashMap<String, u32> = HashMap::new();
        let mut frames: HashMap<(u32, u32, u32, u8), u32> = HashMap::new();
        let mut bytes = 0;
        for id in wanted {
            let told = told_stack(stacks, Some(id));
            bytes += told.len() + 4;
            let mut text = |text: &str, bytes: &mut usize, all: &mut Vec<String>| -> u32 {
                if let Some(known) = texts.get(text) {
                    return *known;
                }
                *bytes += text.len() + 4;
                let place = u32::try_from(all.len()).unwrap_or(0);
                all.push(text.to_owned());
                texts.insert(text.to_owned(), place);
                place
            };
            let mut stack = Vec::new();
            for frame in stacks.frames(id).take(FRAMES) {
                let Frame { file, line, function } = frame;
                let file = text(file, &mut bytes, &mut table.data.texts);
                let function = text(function, &mut bytes, &mut table.data.texts);
                let row = (file, function, line, u8::from(frame.is_of_user()));
                let place = *frames.entry(row).or_insert_with(|| {
                    bytes += 4 * NUMBER_BYTES;
                    table.data.frames.push(row);
                    u32::try_from(table.data.frames.len() - 1).unwrap_or(0)
                });
                bytes += NUMBER_BYTES;
                stack.push(place);
            }
            let place = i64::try_from(table.data.stacks.len()).unwrap_or(-1);
            table.data.stacks.push(stack);
            table.data.told.push(told);
            table.places.insert(id, place);
            if bytes > most {
                break;
            }
        }
        table
    }

    /// Where a stack is; -1 where there is none, -2 where it found no room.
    pub(crate) fn place(&self, stack: Option<StackId>) -> i64 {
        stack.map_or(-1, |stack| self.places.get(&stack).copied().unwrap_or(-2))
    }
}
