//! The stacks of a page. Each frame and each text is stored once, within a limit on bytes.

use std::collections::HashMap;

use serde::Serialize;

use stratalloc_analysis::Callers;
use stratalloc_recording::{self, Frame, FrameKind, StackId};

/// Stacks as frame indices, innermost first.
#[derive(Debug, Default, Serialize)]
pub(crate) struct StackData {
    texts: Vec<String>,
    /// For each frame: index of the file's text, index of the function's text, line, and kind (0 is left
    /// out of callers, 1 is the program's own, 2 a library's, 3 compiled code).
    frames: Vec<(u32, u32, u32, u8)>,
    /// The frames of each stack, all of them.
    stacks: Vec<Vec<u32>>,
    /// The index of each stack's caller.
    caller: Vec<u32>,
    /// The label of each caller, and the frames that identify it.
    callers: Vec<(String, Vec<u32>)>,
}

/// The stacks of a page, and the index of each.
#[derive(Debug, Default)]
pub(crate) struct StackTable {
    pub data: StackData,
    places: HashMap<StackId, i64>,
}

/// The maximum number of frames of one stack: half from the inner end, half from the outer end.
const FRAMES: usize = 256;
/// The estimated bytes of a number in the page.
const NUMBER_BYTES: usize = 6;
/// The estimated bytes of a caller's label in the page.
const LINE_BYTES: usize = 120;

/// Writes frames and texts into the data, each only once, and counts their bytes.
struct Writer<'a> {
    stacks: &'a stratalloc_recording::Stacks,
    callers: &'a Callers<'a>,
    data: StackData,
    texts: HashMap<&'a str, u32>,
    frames: HashMap<u32, u32>,
    bytes: usize,
}

/// Returns the index of the next item.
fn next<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).unwrap_or(0)
}

impl<'a> Writer<'a> {
    fn text(&mut self, text: &'a str) -> u32 {
        let Self { texts, data, bytes, .. } = self;
        *texts.entry(text).or_insert_with(|| {
            *bytes += text.len() + 4;
            data.texts.push(text.to_owned());
            next(&data.texts) - 1
        })
    }

    fn frame(&mut self, number: u32) -> u32 {
        self.bytes += NUMBER_BYTES;
        if let Some(known) = self.frames.get(&number) {
            return *known;
        }
        let Frame { file, line, function } = self.stacks.frame(number);
        let kind = match self.callers.kind(number) {
            FrameKind::Runtime(_) => 0,
            FrameKind::Program => 1,
            FrameKind::Library => 2,
            FrameKind::Compiled => 3,
        };
        let row = (self.text(file), self.text(function), line, kind);
        self.bytes += 4 * NUMBER_BYTES;
        let place = next(&self.data.frames);
        self.data.frames.push(row);
        self.frames.insert(number, place);
        place
    }
}

impl StackTable {
    /// Collects the first of the `wanted` stacks, as many as fit into about `most` bytes.
    pub(crate) fn of(
        stacks: &stratalloc_recording::Stacks,
        callers: &Callers<'_>,
        wanted: impl Iterator<Item = StackId>,
        most: usize,
    ) -> Self {
        let (data, texts, frames) = (StackData::default(), HashMap::new(), HashMap::new());
        let mut writer = Writer { stacks, callers, data, texts, frames, bytes: 0 };
        let mut places = HashMap::new();
        let mut shown: Vec<u32> = Vec::new();
        let mut place_of_caller: HashMap<u32, u32> = HashMap::new();
        for id in wanted {
            let caller = callers.of_stack(id);
            let place = *place_of_caller.entry(caller).or_insert_with(|| {
                let frames = callers.frames(caller).map(|number| writer.frame(number)).collect();
                writer.bytes += LINE_BYTES;
                writer.data.callers.push((String::new(), frames));
                shown.push(caller);
                next(&shown) - 1
            });
            let numbers = stacks.frame_numbers(id);
            let half = numbers.len().min(FRAMES).div_ceil(2);
            let outer = numbers.len() - (numbers.len().min(FRAMES) - half);
            let kept = numbers[..half].iter().chain(&numbers[outer..]);
            let stack = kept.map(|&number| writer.frame(number)).collect();
            places.insert(id, i64::from(next(&writer.data.stacks)));
            writer.data.stacks.push(stack);
            writer.data.caller.push(place);
            if writer.bytes > most {
                break;
            }
        }
        let mut data = writer.data;
        for (caller, label) in data.callers.iter_mut().zip(callers.labels(&shown)) {
            caller.0 = label;
        }
        Self { data, places }
    }

    /// Returns the index of a stack, or -1 if there is no stack, or -2 if the stack did not fit.
    pub(crate) fn place(&self, stack: Option<StackId>) -> i64 {
        stack.map_or(-1, |stack| self.places.get(&stack).copied().unwrap_or(-2))
    }
}

/// The value for the stack of a block from before the recording.
pub(crate) const LIVED_BEFORE: i64 = -3;
