//! The JSON form of a snapshot, read as a stream: no tree of values is built.
//!
//! Nesting is limited by `serde_json` (128 levels). What is wrong in the content is kept beside
//! the parser, because its errors are texts; a path is kept for both kinds of error. Each entry
//! of the trace needs more text than a sixth of its memory, so the bound on memory holds by itself.

use std::cell::RefCell;
use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor,
};

use super::Limits;
use super::error::{Failure, Mismatch};
use super::fields::{
    BlockFields, EventFields, Fields, SHOWN_CHARS, Scalar, SegmentFields, SettingsFields,
};
use super::input::Input;
use super::parts::{Beside, Parts, push_sparingly};
use super::path::Path;
use super::stack_reader::{StackRoom, StackSeed};
use super::words::Word;
use crate::config::TorchVersion;
use crate::replay::{Trace, TraceEvent};

/// Reads a snapshot.
pub(super) fn parse(input: &mut Input<'_>, limits: &Limits) -> Result<Trace, Failure> {
    let (path, mismatch, stacks, beside) = Default::default();
    let place = Place { limits, path, mismatch, stacks, beside };
    let mut parser = serde_json::Deserializer::from_reader(&mut *input);
    let result =
        Snapshot(&place).deserialize(&mut parser).and_then(|parts| parser.end().map(|()| parts));
    drop(parser);
    let stacks = place.stacks.take().finish();
    result.map(|parts| Parts { stacks, ..parts }.into_trace(limits)).map_err(|e| {
        let path = place.path.borrow().to_string();
        if let Some(failure) = input.take_failure() {
            failure
        } else if let Some(mismatch) = place.mismatch.take() {
            Failure::Content { path, mismatch }
        } else {
            Failure::Json { at: input.offset(), path, problem: e.to_string() }
        }
    })
}

/// Where the parser stands and what it disliked.
struct Place<'l> {
    limits: &'l Limits,
    path: RefCell<Path>,
    mismatch: RefCell<Option<Mismatch>>,
    stacks: RefCell<StackRoom>,
    /// Of the list that is read.
    beside: RefCell<Beside>,
}

impl Place<'_> {
    fn refuse<E: Error>(&self, mismatch: Mismatch) -> E {
        self.mismatch.replace(Some(mismatch));
        E::custom("not a snapshot")
    }

    fn at_key<T, E>(&self, key: Word, read: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.path.borrow_mut().enter_key(key.text());
        let value = read()?;
        self.path.borrow_mut().leave();
        Ok(value)
    }
}

/// Refuses a text where something else is expected, without repeating it: it may be all of the file.
macro_rules! refuse_text {
    () => {
        fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
            Err(E::invalid_type(Unexpected::Other("a text"), &self))
        }
    };
}

/// A key that is read, or `None`.
pub(super) struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Option<Word>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for Key {
    type Value = Option<Word>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Word::from_text(text).filter(|w| w.is_key()))
    }
}

/// A value of a field. Texts that are no word are cut to `text_chars`.
pub(super) struct Value {
    pub(super) text_chars: usize,
}

impl<'de> DeserializeSeed<'de> for Value {
    type Value = Scalar;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Scalar, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, b: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(b))
    }

    fn visit_i64<E: Error>(self, i: i64) -> Result<Scalar, E> {
        Ok(Scalar::Int(i.into()))
    }

    fn visit_u64<E: Error>(self, i: u64) -> Result<Scalar, E> {
        Ok(Scalar::Int(i.into()))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Scalar, E> {
        Ok(Scalar::Other("a number that is not whole or beyond 64 bits"))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Scalar, E> {
        Ok(match Word::from_text(text) {
            Some(word) => Scalar::Word(word),
            None if text.len() <= self.text_chars => Scalar::Text(text.to_owned()),
            None => Scalar::Text(text.chars().take(self.text_chars).collect()),
        })
    }

    fn visit_unit<E: Error>(self) -> Result<Scalar, E> {
        Ok(Scalar::None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Scalar, A::Error> {
        let mut numbers = [0_u64; 2];
        let mut count = 0;
        let mut whole = true;
        while let Some(number) = items.next_element_seed(Number)? {
            match (number, numbers.get_mut(count)) {
                (Some(number), Some(place)) => *place = number,
                _ => whole = false,
            }
            count += 1;
        }
        Ok(if whole && count == numbers.len() {
            Scalar::Pair(numbers[0], numbers[1])
        } else {
            Scalar::Other("a list")
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Scalar, A::Error> {
        while items.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a dictionary"))
    }
}

/// A whole number of 64 bits, or `None` for anything else.
struct Number;

impl<'de> DeserializeSeed<'de> for Number {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        let value = Value { text_chars: 0 }.deserialize(d)?;
        Ok(match value {
            Scalar::Int(i) => u64::try_from(i).ok(),
            _ => None,
        })
    }
}

/// One entry, field by field.
struct Entry<'p, 'l, F> {
    place: &'p Place<'l>,
    fields: F,
}

impl<'de, F: Fields> DeserializeSeed<'de> for Entry<'_, '_, F> {
    type Value = Option<F::Entry>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de, F: Fields> Visitor<'de> for Entry<'_, '_, F> {
    type Value = Option<F::Entry>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(F::WHAT)
    }

    refuse_text!();

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        let place = self.place;
        while let Some(key) = map.next_key_seed(Key)? {
            match key {
                Some(Word::Blocks) if F::HAS_BLOCKS => {
                    let mut blocks = place.at_key(Word::Blocks, || {
                        map.next_value_seed(Entries::<BlockFields>::new(place))
                    })?;
                    blocks.shrink_to_fit();
                    self.fields.set_blocks(blocks);
                }
                Some(Word::Frames) if F::HAS_STACK => {
                    let seed = StackSeed(&place.stacks);
                    self.fields.set_stack(map.next_value_seed(seed)?);
                }
                Some(key) if F::wants(key) => place.at_key(key, || {
                    let seed = Value { text_chars: SHOWN_CHARS };
                    let value = map.next_value_seed(seed)?;
                    let set = self.fields.set(key, &value);
                    set.map_err(|e| place.refuse(e))
                })?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        self.fields.finish(&mut place.beside.borrow_mut()).map_err(|e| place.refuse(e))
    }
}

/// A list of entries.
struct Entries<'p, 'l, F> {
    place: &'p Place<'l>,
    of: std::marker::PhantomData<F>,
}

impl<'p, 'l, F: Fields> Entries<'p, 'l, F> {
    fn new(place: &'p Place<'l>) -> Self {
        Self { place, of: std::marker::PhantomData }
    }
}

impl<'de, F: Fields> DeserializeSeed<'de> for Entries<'_, '_, F> {
    type Value = Vec<F::Entry>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de, F: Fields> Visitor<'de> for Entries<'_, '_, F> {
    type Value = Vec<F::Entry>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list, each item {}", F::WHAT)
    }

    refuse_text!();

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        for index in 0.. {
            self.place.path.borrow_mut().enter_index(index);
            let seed = Entry { place: self.place, fields: F::default() };
            let item = items.next_element_seed(seed)?;
            self.place.path.borrow_mut().leave();
            match item {
                Some(Some(entry)) => push_sparingly(&mut entries, entry),
                Some(None) => {}
                None => break,
            }
        }
        Ok(entries)
    }
}

/// The events of each device: the wanted one is kept, or the one with the most.
struct Devices<'p, 'l>(&'p Place<'l>);

/// A device and what happened on it.
#[derive(Default)]
struct DeviceEvents {
    device: Option<u32>,
    events: Vec<TraceEvent>,
    /// Devices that have events.
    devices: u32,
    beside: Beside,
}

impl<'de> DeserializeSeed<'de> for Devices<'_, '_> {
    type Value = DeviceEvents;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Devices<'_, '_> {
    type Value = DeviceEvents;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list with a list of trace entries per device")
    }

    refuse_text!();

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(DeviceEvents::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let place = self.0;
        let mut kept = DeviceEvents::default();
        let mut count = 0_u32;
        loop {
            let present = if place.limits.device.is_none_or(|wanted| wanted == count) {
                place.path.borrow_mut().enter_index(count as usize);
                place.beside.take();
                let entries = items.next_element_seed(Entries::<EventFields>::new(place))?;
                place.path.borrow_mut().leave();
                let present = entries.is_some();
                kept.devices += u32::from(entries.as_ref().is_some_and(|e| !e.is_empty()));
                if let Some(events) = entries.filter(|e| e.len() > kept.events.len()) {
                    kept.events = events;
                    kept.device = Some(count);
                    kept.beside = place.beside.take();
                }
                present
            } else {
                items.next_element::<IgnoredAny>()?.is_some()
            };
            if !present {
                break;
            }
            count = count.saturating_add(1);
        }
        match place.limits.device {
            Some(wanted) if wanted >= count => Err(place.refuse(Mismatch::new(
                "events of the device that was asked for",
                format!("{count} devices and no device {wanted}"),
            ))),
            _ => Ok(kept),
        }
    }
}

/// The settings; only the configuration string is read.
struct Settings<'p, 'l>(&'p Place<'l>);

impl<'de> DeserializeSeed<'de> for Settings<'_, '_> {
    type Value = SettingsFields;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<SettingsFields, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Settings<'_, '_> {
    type Value = SettingsFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a dictionary of settings")
    }

    refuse_text!();

    fn visit_unit<E: Error>(self) -> Result<SettingsFields, E> {
        Ok(SettingsFields::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SettingsFields, A::Error> {
        let mut fields = SettingsFields::default();
        while let Some(key) = map.next_key_seed(Key)? {
            match key.filter(|key| SettingsFields::KEYS.contains(key)) {
                Some(key) => self.0.at_key(key, || {
                    let value = map.next_value_seed(Value { text_chars: usize::MAX })?;
                    fields.set(key, value).map_err(|e| self.0.refuse(e))
                })?,
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(fields)
    }
}

/// The whole file.
struct Snapshot<'p, 'l>(&'p Place<'l>);

impl<'de> DeserializeSeed<'de> for Snapshot<'_, '_> {
    type Value = Parts;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Parts, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Snapshot<'_, '_> {
    type Value = Parts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a snapshot: a dictionary, or a list of segments")
    }

    refuse_text!();

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Parts, A::Error> {
        Ok(Parts {
            segments: Entries::<SegmentFields>::new(self.0).visit_seq(items)?,
            ..Parts::default()
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parts, A::Error> {
        let place = self.0;
        let mut parts = Parts::default();
        let mut has_segments = false;
        while let Some(key) = map.next_key_seed(Key)? {
            match key {
                Some(key @ Word::Segments) => {
                    has_segments = true;
                    parts.segments = Vec::new();
                    parts.segments = place.at_key(key, || {
                        map.next_value_seed(Entries::<SegmentFields>::new(place))
                    })?;
                }
                Some(key @ Word::DeviceTraces) => {
                    parts.events = Vec::new();
                    let kept = place.at_key(key, || map.next_value_seed(Devices(place)))?;
                    parts.events = kept.events;
                    parts.device = kept.device;
                    parts.beside = kept.beside;
                    parts.other_devices = kept.devices.saturating_sub(1);
                }
                Some(key @ Word::HostSegments) => {
                    parts.host_segments = place.at_key(key, || {
                        map.next_value_seed(Entries::<SegmentFields>::new(place))
                    })?;
                }
                Some(key @ Word::HostTraces) => {
                    parts.torch = parts.torch.max(Some(TorchVersion::V2_14));
                    parts.host_events = place
                        .at_key(key, || map.next_value_seed(Entries::<EventFields>::new(place)))?;
                }
                Some(key @ Word::AllocatorSettings) => {
                    let fields = place.at_key(key, || map.next_value_seed(Settings(place)))?;
                    fields.finish(&mut parts);
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if has_segments {
            Ok(parts)
        } else {
            Err(place.refuse(Mismatch::new("the key segments", "no such key")))
        }
    }
}
