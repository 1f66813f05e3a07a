//! Stacks out of a stream of JSON.
//!
//! What is no list of frames is passed over, and so is a stack without room: no recording is refused for
//! its stacks. They may hold a multiple of the text that frames took in the file.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::fields::Scalar;
use super::json::{Key, Value};
use super::words::Word;
use crate::replay::stacks::{Frame, Room, StackBuilder, StackId, Stacks, TEXT_MAX_BYTES};

/// What stacks may hold for each byte that their frames took at least.
const STACKS_FACTOR: u64 = 2;
/// What they may hold however short the frames are.
const FREE_BYTES: u64 = 64 * 1024;

/// Stacks, and how much they may hold.
#[derive(Default)]
pub(super) struct StackRoom {
    builder: StackBuilder,
    held_bytes: u64,
    seen_bytes: u64,
}

impl StackRoom {
    pub(super) fn finish(self) -> Stacks {
        self.builder.finish()
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut StackBuilder, Room<'_>) -> T) -> T {
        let Self { builder, held_bytes, seen_bytes } = self;
        let allowed_bytes = *seen_bytes * STACKS_FACTOR + FREE_BYTES;
        act(builder, &mut |bytes| {
            let held = *held_bytes + bytes;
            let fits = held <= allowed_bytes;
            *held_bytes = if fits { held } else { *held_bytes };
            fits
        })
    }

    /// Adds a frame to the stack that is being read. Whether more are wanted.
    fn add(&mut self, frame: Frame<'_>) -> bool {
        self.seen_bytes += (frame.file.len() + frame.function.len()) as u64;
        self.with(|builder, room| {
            let number = builder.frame(frame, room);
            builder.add(number)
        })
    }
}

/// Passes over every value that is not of the awaited kind.
macro_rules! pass_over {
    ($($visit:ident: $kind:ty,)*) => {
        $(fn $visit<E: Error>(self, _: $kind) -> Result<Self::Value, E> { Ok(None) })*

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }
    };
}

/// The list of an event's frames.
pub(super) struct StackSeed<'s>(pub(super) &'s RefCell<StackRoom>);

impl<'de> DeserializeSeed<'de> for StackSeed<'_> {
    type Value = Option<StackId>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StackSeed<'_> {
    type Value = Option<StackId>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of frames")
    }

    pass_over!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str,);

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while let Some(frame) = items.next_element_seed(FrameSeed)? {
            let Some(OwnFrame { file, line, function }) = frame else { continue };
            let frame = Frame { file: &file, line, function: &function };
            if !self.0.borrow_mut().add(frame) {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                break;
            }
        }
        Ok(self.0.borrow_mut().with(|builder, room| builder.end(room)))
    }
}

#[derive(Default)]
struct OwnFrame {
    file: String,
    line: u32,
    function: String,
}

/// One frame.
struct FrameSeed;

impl<'de> DeserializeSeed<'de> for FrameSeed {
    type Value = Option<OwnFrame>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FrameSeed {
    type Value = Option<OwnFrame>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a frame (a dictionary)")
    }

    pass_over!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str,);

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut frame = OwnFrame::default();
        while let Some(key) = map.next_key_seed(Key)? {
            let Some(key @ (Word::Filename | Word::Line | Word::Name)) = key else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = map.next_value_seed(Value { text_chars: TEXT_CHARS_MAX })?;
            let text = || value.text().unwrap_or_default().to_owned();
            match (key, &value) {
                (Word::Filename, _) => frame.file = text(),
                (Word::Name, _) => frame.function = text(),
                (_, Scalar::Int(line)) => frame.line = u32::try_from(*line).unwrap_or(0),
                _ => {}
            }
        }
        Ok(Some(frame))
    }
}

/// How much of a text is looked at for its end: longer paths than this no system has.
const TEXT_CHARS_MAX: usize = 16 * TEXT_MAX_BYTES;
