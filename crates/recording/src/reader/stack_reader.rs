//! Reads stacks from the values of a file.
//!
//! Many entries may refer to the same list of frames, or to the same frame. So each list and frame is read
//! once, and the result is cached by the number of its container. A stack that is malformed, or that
//! exceeds the memory limit, is left out. A recording is never refused because of its stacks.

use std::borrow::Cow;

use super::budget::Budget;
use super::heap::{Heap, Value, View};
use super::words::Word;
use crate::stacks::{Frame, MayGrow, StackBuilder, StackId, Stacks, TEXT_MAX_BYTES};

/// The bytes that stacks may hold for each decoded byte. The rest of the budget is for everything else.
const STACKS_FACTOR: u64 = 2;
/// The bytes that stacks may hold even for the smallest file.
const FREE_BYTES: u64 = 64 * 1024;

/// The cached result for a container. `Nothing`: it was not read yet.
#[derive(Clone, Copy, Default)]
enum SeenStack {
    #[default]
    Nothing,
    Frame(Option<u32>),
    Stack(Option<StackId>),
}

/// Reads and stores stacks.
#[derive(Default)]
pub(super) struct StackReader {
    builder: StackBuilder,
    /// The result for each container, by its number. Allocated for all containers when the first stack
    /// is read.
    seen: Vec<SeenStack>,
    held_bytes: u64,
}

impl StackReader {
    /// Returns the stack that `value`, a list of frames, describes, or `None` if it is left out.
    pub(super) fn read(
        &mut self,
        heap: &Heap,
        value: Value,
        budget: &mut Budget,
    ) -> Option<StackId> {
        let View::List(list) = heap.view(value) else { return None };
        let Self { builder, seen, held_bytes } = self;
        let may_grow: MayGrow<'_> = &mut |bytes| {
            let held = *held_bytes + bytes;
            let allowed = heap.decoded_bytes * STACKS_FACTOR + FREE_BYTES;
            let fits = held <= allowed && budget.charge(bytes).is_ok();
            *held_bytes = if fits { held } else { *held_bytes };
            fits
        };
        if seen.is_empty() {
            let count = heap.container_count();
            if !may_grow((count * size_of::<SeenStack>()) as u64) {
                return None;
            }
            seen.resize(count, SeenStack::Nothing);
        }
        if let SeenStack::Stack(known) = seen[list] {
            return known;
        }
        for frame in heap.items(value)? {
            let View::Dict(dict) = heap.view(frame) else { continue };
            let number = match seen[dict] {
                SeenStack::Frame(known) => known,
                _ => {
                    let (file, line, function) = &frame_of(heap, dict);
                    builder.frame(Frame { file, line: *line, function }, may_grow)
                }
            };
            seen[dict] = SeenStack::Frame(number);
            if !builder.add(number) {
                break;
            }
        }
        let stack = builder.end(may_grow);
        seen[list] = SeenStack::Stack(stack);
        stack
    }

    pub(super) fn finish(self) -> Stacks {
        self.builder.finish()
    }
}

/// Returns the file, line and function of a frame. Texts are copied only if they are not valid UTF-8.
fn frame_of(heap: &Heap, dict: usize) -> (Cow<'_, str>, u32, Cow<'_, str>) {
    let record = heap.record(dict);
    // Of a long path the end is kept, of a long function name the beginning.
    let text = |key: Word, cut: fn(&[u8]) -> &[u8]| match record[key as usize] {
        None => Cow::Borrowed(""),
        Some(value) => match heap.view(value) {
            View::Word(word) => Cow::Borrowed(word.text()),
            View::Text(at) => String::from_utf8_lossy(cut(heap.text(at))),
            _ => Cow::Borrowed(""),
        },
    };
    let line = match record[Word::Line as usize].map(|value| heap.view(value)) {
        Some(View::Int(line)) => u32::try_from(line).unwrap_or(0),
        _ => 0,
    };
    (text(Word::Filename, tail), line, text(Word::Name, head))
}

fn head(text: &[u8]) -> &[u8] {
    &text[..text.len().min(TEXT_MAX_BYTES)]
}

fn tail(text: &[u8]) -> &[u8] {
    &text[text.len().saturating_sub(TEXT_MAX_BYTES)..]
}
