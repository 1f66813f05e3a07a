//! Reads stacks from the values of a file.
//!
//! Many entries may refer to the same list of frames, or to the same frame. So each list and frame is read
//! once, and the result is cached by the number of its container. A stack that is malformed, or that
//! exceeds the memory limit, is left out. A recording is never refused because of its stacks.
//!
//! A frame of code that PyTorch's compiler generated may have the field `fx_original_trace`: the traceback of
//! the program's lines from which the code was generated. These lines take the place of the frame. Source:
//! `_augment_frames` in `torch/cuda/memory.py`.

use std::borrow::Cow;
use std::collections::HashMap;

use super::budget::Budget;
use super::heap::{Heap, Record, Value, View};
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
    /// The index of the lines in [`StackReader::originals`].
    Original(u32),
    Stack(Option<StackId>),
}

/// Reads and stores stacks.
#[derive(Default)]
pub(super) struct StackReader {
    builder: StackBuilder,
    /// The result for each container, by its number. Allocated for all containers when the first stack
    /// is read.
    seen: Vec<SeenStack>,
    originals: Originals,
    held_bytes: u64,
}

/// The lines from which the compiler generated frames.
#[derive(Default)]
struct Originals {
    /// The lines, innermost first, as frame numbers.
    lines: Vec<Vec<u32>>,
    /// The index of the lines for each text; `None` if it has none. Many frames may refer to one text.
    of_texts: HashMap<usize, Option<u32>>,
}

/// The maximum number of lines that are read of the traceback in a frame, beginning with the innermost.
const ORIGINALS_MAX: usize = 16;
/// The maximum number of bytes that are read of such a traceback, at its end.
const ORIGINAL_MAX_BYTES: usize = 16 * 1024;
/// The memory that each such text takes in [`Originals`], without its lines.
const ORIGINAL_BYTES: usize = size_of::<Vec<u32>>() + 48;

impl StackReader {
    /// Returns the stack that `value`, a list of frames, describes, or `None` if it is left out.
    pub(super) fn read(
        &mut self,
        heap: &Heap,
        value: Value,
        budget: &mut Budget,
    ) -> Option<StackId> {
        let View::List(list) = heap.view(value) else { return None };
        let Self { builder, seen, originals, held_bytes } = self;
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
        let mut inner = None;
        for frame in heap.items(value)? {
            let View::Dict(dict) = heap.view(frame) else { continue };
            if matches!(seen[dict], SeenStack::Nothing) {
                seen[dict] = read_frame(heap, dict, builder, originals, may_grow);
            }
            let is_stored = match seen[dict] {
                // Generated code that calls generated code: the inner traceback contains the outer lines.
                SeenStack::Original(at) if originals.is_outer_part(inner, at) => true,
                SeenStack::Original(at) => {
                    inner = Some(at);
                    originals.lines[at as usize].iter().all(|&number| builder.add(Some(number)))
                }
                SeenStack::Frame(number) => builder.add(number),
                SeenStack::Nothing | SeenStack::Stack(_) => true,
            };
            if !is_stored {
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

/// Reads a frame, or the lines that it was generated from.
fn read_frame(
    heap: &Heap,
    dict: usize,
    builder: &mut StackBuilder,
    originals: &mut Originals,
    may_grow: MayGrow<'_>,
) -> SeenStack {
    let record = heap.record(dict);
    if let Some(View::Text(at)) = record[Word::FxOriginalTrace as usize].map(|v| heap.view(v))
        && let Some(found) = originals.of_text(heap, at, builder, may_grow)
    {
        return SeenStack::Original(found);
    }
    let (file, line, function) = &frame_of(heap, &record);
    SeenStack::Frame(builder.frame(Frame { file, line: *line, function }, may_grow))
}

impl Originals {
    /// Returns the index of the lines in the text of a traceback; `None` if it has none, or if they exceed
    /// the memory limit.
    fn of_text(
        &mut self,
        heap: &Heap,
        at: usize,
        builder: &mut StackBuilder,
        may_grow: MayGrow<'_>,
    ) -> Option<u32> {
        if let Some(known) = self.of_texts.get(&at) {
            return *known;
        }
        let text = heap.text(at);
        let text = String::from_utf8_lossy(&text[text.len().saturating_sub(ORIGINAL_MAX_BYTES)..]);
        let frames = text.lines().rev().filter_map(frame_of_traceback).take(ORIGINALS_MAX);
        let lines: Vec<u32> =
            frames.map_while(|frame| builder.frame(frame, &mut *may_grow)).collect();
        if !may_grow((ORIGINAL_BYTES + size_of_val(&*lines)) as u64) {
            return None;
        }
        let found = u32::try_from(self.lines.len()).ok().filter(|_| !lines.is_empty());
        if found.is_some() {
            self.lines.push(lines);
        }
        self.of_texts.insert(at, found);
        found
    }

    /// Returns true if the lines of a frame end with those of a frame that called it.
    fn is_outer_part(&self, inner: Option<u32>, outer: u32) -> bool {
        let lines = |at: u32| &self.lines[at as usize];
        inner.is_some_and(|inner| lines(inner).ends_with(lines(outer)))
    }
}

/// Returns the frame that a line of a Python traceback names: `File "model.py", line 44, in forward`.
fn frame_of_traceback(line: &str) -> Option<Frame<'_>> {
    let (file, rest) = line.trim_start().strip_prefix("File \"")?.rsplit_once("\", line ")?;
    let (line, function) = rest.split_once(", in ").unwrap_or((rest, ""));
    Some(Frame { file, line: line.trim_end().parse().ok()?, function: function.trim_end() })
}

/// Returns the file, line and function of a frame. Texts are copied only if they are not valid UTF-8.
fn frame_of<'h>(heap: &'h Heap, record: &Record) -> (Cow<'h, str>, u32, Cow<'h, str>) {
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
