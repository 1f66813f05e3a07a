//! The call stacks of a recording, each stored once.
//!
//! Texts, frames and stacks are interned: equal ones have the same number. Of a stack with more than
//! [`FRAMES_MAX`] frames, the innermost and the outermost ones are kept. Of a file's path the last
//! [`TEXT_MAX_BYTES`] bytes are kept, of a function's name the first ones.
//!
//! The reader limits the memory of stacks. A stack that exceeds the limit is left out and counted. Texts
//! may contain control characters; the code that prints them removes these.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use hashbrown::HashTable;

use super::paths::with_slashes;

/// The maximum number of frames kept of one stack: half of them from the inner end, half from the outer
/// end.
pub(super) const FRAMES_MAX: usize = 512;

/// The maximum number of bytes kept of one text.
pub(super) const TEXT_MAX_BYTES: usize = 256;

/// Identifies a stack of one recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(NonZeroU32);

impl StackId {
    /// Returns the index of this stack among the stacks of the recording, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// One frame of a recorded stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame<'a> {
    /// The file, as recorded, with `/` between folders.
    pub file: &'a str,
    /// The line in the file; 0 if unknown.
    pub line: u32,
    /// The function.
    pub function: &'a str,
}

/// All stacks of one recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stacks {
    text: String,
    /// The end of each text in `text`. A text begins at the end of the previous one.
    text_ends: Vec<u32>,
    frames: Vec<Numbers>,
    /// The frames of all stacks, one stack after the other.
    stack_frames: Vec<u32>,
    stack_ends: Vec<u32>,
    left_out: u64,
}

/// A frame: the numbers of its texts, and its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Numbers {
    file: u32,
    line: u32,
    function: u32,
}

/// Returns the range of item `index`, which extends from the previous item's end to its own.
fn span(ends: &[u32], index: u32) -> std::ops::Range<usize> {
    let at = index as usize;
    let from = at.checked_sub(1).map_or(0, |before| ends[before]);
    from as usize..ends[at] as usize
}

impl Stacks {
    /// Returns the number of different stacks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stack_ends.len()
    }

    /// Returns the ids of all stacks.
    pub fn ids(&self) -> impl Iterator<Item = StackId> + use<> {
        let count = u32::try_from(self.len()).unwrap_or(u32::MAX);
        (1..=count).filter_map(|number| NonZeroU32::new(number).map(StackId))
    }

    /// Returns true if there are no stacks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stack_ends.is_empty()
    }

    /// Returns how many stacks were left out because they exceeded the reader's memory limit. A stack to
    /// which several events refer is counted once.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Returns the frames of a stack, innermost first. Returns no frames if this recording has no stack
    /// with the id.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = Frame<'_>> {
        self.frame_numbers(stack).iter().map(|&number| self.frame(number))
    }

    /// Returns the frames of a stack, innermost first, as numbers.
    pub fn frame_numbers(&self, stack: StackId) -> &[u32] {
        let index = stack.0.get() - 1;
        let known = (index as usize) < self.stack_ends.len();
        let range = if known { span(&self.stack_ends, index) } else { 0..0 };
        &self.stack_frames[range]
    }

    /// Returns the number of different frames. All frame numbers are below it.
    pub fn frame_count(&self) -> u32 {
        u32::try_from(self.frames.len()).unwrap_or(u32::MAX)
    }

    /// Returns the frame with this number, which comes from [`Self::frame_numbers`].
    pub fn frame(&self, number: u32) -> Frame<'_> {
        let Numbers { file, line, function } = self.frames[number as usize];
        Frame { file: self.text(file), line, function: self.text(function) }
    }

    fn text(&self, index: u32) -> &str {
        &self.text[span(&self.text_ends, index)]
    }
}

/// Collects stacks while a recording is read.
#[derive(Default)]
pub(super) struct StackBuilder {
    stacks: Stacks,
    hasher: RandomState,
    texts: HashTable<u32>,
    frames: HashTable<u32>,
    known: HashTable<u32>,
    /// The frames of the stack being read.
    open: Vec<u32>,
    /// Whether a frame of the stack being read exceeded the memory limit.
    is_short: bool,
}

/// The bytes that a new item takes in a hash table, in addition to those in its vector. Both the old and
/// the new table are counted while the table grows.
const TABLE_BYTES: u64 = 20;

/// The bytes that a vector takes, at most, for each of its bytes while it grows by half and is moved.
const MOVING: u64 = 3;

/// Reserves this many more bytes. Returns false if that would exceed the memory limit.
pub(super) type MayGrow<'a> = &'a mut dyn FnMut(u64) -> bool;

fn check_growth(may_grow: MayGrow<'_>, bytes: usize) -> Option<()> {
    may_grow(bytes as u64 * MOVING + TABLE_BYTES).then_some(())
}

/// Returns the number of the next item, or `None` if the numbers have run out.
fn next<T>(items: &[T]) -> Option<u32> {
    u32::try_from(items.len()).ok().filter(|&index| index < u32::MAX)
}

/// Pushes an item, and grows by half if needed. During the move the old and the new memory are 2.5 times
/// the content, for which [`MOVING`] reserves three.
fn push<T>(into: &mut Vec<T>, item: T) {
    if into.len() == into.capacity() {
        into.reserve_exact((into.len() / 2).max(1));
    }
    into.push(item);
}

/// Returns the first [`TEXT_MAX_BYTES`] bytes of a text, cut at a character.
fn head(text: &str) -> &str {
    let mut to = text.len().min(TEXT_MAX_BYTES);
    while !text.is_char_boundary(to) {
        to -= 1;
    }
    &text[..to]
}

/// Returns the last [`TEXT_MAX_BYTES`] bytes of a text, cut at a character.
fn tail(text: &str) -> &str {
    let mut from = text.len().saturating_sub(TEXT_MAX_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

impl StackBuilder {
    /// Returns the number of a frame, for [`Self::add`], or `None` if it exceeds the memory limit.
    pub(super) fn frame(&mut self, frame: Frame<'_>, may_grow: MayGrow<'_>) -> Option<u32> {
        let file = self.text(tail(&with_slashes(frame.file)), may_grow)?;
        let function = self.text(head(frame.function), may_grow)?;
        self.intern_frame(Numbers { file, line: frame.line, function }, may_grow)
    }

    /// Returns the number of frame `number` with the line of frame `line_of`, if both are in one file.
    /// Otherwise returns `number`. `None` if the new frame exceeds the memory limit.
    pub(super) fn frame_at_line_of(
        &mut self,
        number: u32,
        line_of: u32,
        may_grow: MayGrow<'_>,
    ) -> Option<u32> {
        let frames = &self.stacks.frames;
        let (numbers, place) = (frames[number as usize], frames[line_of as usize]);
        match numbers.file == place.file {
            true => self.intern_frame(Numbers { line: place.line, ..numbers }, may_grow),
            false => Some(number),
        }
    }

    fn intern_frame(&mut self, numbers: Numbers, may_grow: MayGrow<'_>) -> Option<u32> {
        let (frames, hasher) = (&self.stacks.frames, &self.hasher);
        let hash = hasher.hash_one(numbers);
        if let Some(&known) = self.frames.find(hash, |&at| frames[at as usize] == numbers) {
            return Some(known);
        }
        check_growth(may_grow, size_of::<Numbers>())?;
        let index = next(frames)?;
        self.frames.insert_unique(hash, index, |&at| hasher.hash_one(frames[at as usize]));
        push(&mut self.stacks.frames, numbers);
        Some(index)
    }

    fn text(&mut self, text: &str, may_grow: MayGrow<'_>) -> Option<u32> {
        let (stacks, hasher) = (&self.stacks, &self.hasher);
        let hash = hasher.hash_one(text);
        if let Some(&known) = self.texts.find(hash, |&at| stacks.text(at) == text) {
            return Some(known);
        }
        check_growth(may_grow, text.len() + size_of::<u32>())?;
        let index = next(&stacks.text_ends)?;
        let end = u32::try_from(stacks.text.len() + text.len()).ok()?;
        self.texts.insert_unique(hash, index, |&at| hasher.hash_one(stacks.text(at)));
        let stored = &mut self.stacks.text;
        if stored.capacity() - stored.len() < text.len() {
            stored.reserve_exact(text.len().max(stored.len() / 2));
        }
        stored.push_str(text);
        push(&mut self.stacks.text_ends, end);
        Some(index)
    }

    /// Adds the next outer frame to the stack being read. Returns false if the stack cannot be stored,
    /// so that the caller need not read the remaining frames.
    pub(super) fn add(&mut self, frame: Option<u32>) -> bool {
        match frame {
            Some(frame) => self.open.push(frame),
            None => self.is_short = true,
        }
        if self.open.len() > FRAMES_MAX {
            self.open.remove(FRAMES_MAX / 2);
        }
        !self.is_short
    }

    /// Ends the stack being read. Returns `None` if it has no frames or exceeds the memory limit.
    pub(super) fn end(&mut self, may_grow: MayGrow<'_>) -> Option<StackId> {
        let is_short = std::mem::take(&mut self.is_short);
        let has_frames = is_short || !self.open.is_empty();
        let found = if is_short { None } else { self.intern(may_grow) };
        self.open.clear();
        self.stacks.left_out += u64::from(has_frames && found.is_none());
        found
    }

    fn intern(&mut self, may_grow: MayGrow<'_>) -> Option<StackId> {
        let (stacks, hasher) = (&self.stacks, &self.hasher);
        let open = self.open.as_slice();
        if open.is_empty() {
            return None;
        }
        let hash = hasher.hash_one(open);
        let of = |at: u32| &stacks.stack_frames[span(&stacks.stack_ends, at)];
        let id = |index: u32| NonZeroU32::new(index + 1).map(StackId);
        if let Some(&known) = self.known.find(hash, |&at| of(at) == open) {
            return id(known);
        }
        check_growth(may_grow, size_of_val(open) + size_of::<u32>())?;
        let index = next(&stacks.stack_ends)?;
        let end = u32::try_from(stacks.stack_frames.len() + open.len()).ok()?;
        self.known.insert_unique(hash, index, |&at| hasher.hash_one(of(at)));
        open.iter().for_each(|&frame| push(&mut self.stacks.stack_frames, frame));
        push(&mut self.stacks.stack_ends, end);
        id(index)
    }

    /// Returns all stacks.
    pub(super) fn finish(self) -> Stacks {
        self.stacks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(function: &str) -> Frame<'_> {
        Frame { file: "train.py", line: 7, function }
    }

    fn add(
        builder: &mut StackBuilder,
        functions: &[&str],
        may_grow: MayGrow<'_>,
    ) -> Option<StackId> {
        for function in functions {
            let number = builder.frame(frame(function), may_grow);
            if !builder.add(number) {
                break;
            }
        }
        builder.end(may_grow)
    }

    #[test]
    fn equal_stacks_are_one_and_frames_come_back_in_their_order() {
        let mut builder = StackBuilder::default();
        let may_grow: MayGrow<'_> = &mut |_| true;
        let first = add(&mut builder, &["step", "main"], may_grow).unwrap();
        let other = add(&mut builder, &["main", "step"], may_grow).unwrap();
        assert_eq!(add(&mut builder, &["step", "main"], may_grow), Some(first));
        assert_eq!(add(&mut builder, &[], may_grow), None);
        let stacks = builder.finish();
        assert_eq!((stacks.len(), stacks.left_out()), (2, 0));
        assert!(stacks.frames(first).eq([frame("step"), frame("main")]));
        assert!(stacks.frames(other).eq([frame("main"), frame("step")]));
    }

    #[test]
    fn what_finds_no_room_is_left_out_and_the_rest_stays() {
        let mut builder = StackBuilder::default();
        let first = add(&mut builder, &["step"], &mut |_| true);
        let mut left = 100;
        let may_grow: MayGrow<'_> = &mut |bytes| {
            let fits = bytes <= left;
            left -= bytes.min(left);
            fits
        };
        assert_eq!(add(&mut builder, &["a", "b", "c", "d"], may_grow), None);
        assert_eq!(add(&mut builder, &["step"], &mut |_| false), first);
        let stacks = builder.finish();
        assert_eq!((stacks.len(), stacks.left_out()), (1, 1));
    }

    #[test]
    fn long_paths_keep_their_ends_and_long_functions_their_beginnings() {
        let mut builder = StackBuilder::default();
        let (file, function) =
            ("é".repeat(1000) + "/end.py", "begin".to_owned() + &"é".repeat(1000));
        let number =
            builder.frame(Frame { file: &file, line: 1, function: &function }, &mut |_| true);
        builder.add(number);
        let stack = builder.end(&mut |_| true).unwrap();
        let stacks = builder.finish();
        let frame = stacks.frames(stack).next().unwrap();
        assert!(
            frame.file.ends_with("é/end.py") && frame.file.len() <= TEXT_MAX_BYTES,
            "{frame:?}"
        );
        assert!(frame.function.starts_with("beginé") && frame.function.len() <= TEXT_MAX_BYTES);
    }

    #[test]
    fn a_deep_stack_keeps_both_ends() {
        let mut builder = StackBuilder::default();
        let names: Vec<String> = (0..3 * FRAMES_MAX).map(|at| format!("f{at}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let stack = add(&mut builder, &names, &mut |_| true).unwrap();
        let stacks = builder.finish();
        let kept: Vec<&str> = stacks.frames(stack).map(|frame| frame.function).collect();
        let half = FRAMES_MAX / 2;
        assert_eq!(kept[..half], names[..half]);
        assert_eq!(kept[half..], names[names.len() - half..]);
    }
}
