//! Parses the JSON form of a snapshot into a [`Heap`] of values, as `pickle` does with the pickle form.
//!
//! Values under keys that are not read are skipped. `serde_json` limits the others to 128 levels of
//! nesting.

use std::cell::Cell;
use std::{fmt, io};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::Failure;
use super::heap::{Constant, Heap, Value};
use super::input::Input;
use super::path::Path;
use super::words::Word;

/// The number of items of a list that are collected before they are moved to the heap.
const PIECE_ITEMS: usize = 1024;

/// 2^63. The parser returns a whole number as a float only if its magnitude is at least this large. So
/// floats of that magnitude become [`Constant::Huge`](super::heap::Constant::Huge).
const HUGE: f64 = 9_223_372_036_854_775_808.0;

/// Parses a file and returns its values.
pub(super) fn parse(input: &mut Input<'_>) -> Result<Heap, Failure> {
    let decoded_bytes = Cell::new(input.offset());
    let source = Source { input, decoded_bytes: &decoded_bytes };
    let mut builder = Builder {
        heap: Heap::new(),
        stack: Vec::new(),
        path: Path::default(),
        decoded_bytes: &decoded_bytes,
    };
    let mut parser = serde_json::Deserializer::from_reader(source);
    let root = builder.deserialize(&mut parser).and_then(|root| parser.end().map(|()| root));
    let Builder { mut heap, path, .. } = builder;
    heap.decoded_bytes = decoded_bytes.get();
    heap.root = root.map_err(|error| failure(error, heap.decoded_bytes, path.to_string()))?;
    Ok(heap)
}

/// Parses a file whose values become no heap. Updates `decoded_bytes` as it reads. Errors use `place` as the
/// position.
pub(super) fn parse_as<S: DeserializeSeed<'static>>(
    input: &mut Input<'_>,
    decoded_bytes: &Cell<u64>,
    place: &'static str,
    seed: S,
) -> Result<S::Value, Failure> {
    decoded_bytes.set(input.offset());
    let mut parser = serde_json::Deserializer::from_reader(Source { input, decoded_bytes });
    let found = seed.deserialize(&mut parser).and_then(|found| parser.end().map(|()| found));
    found.map_err(|error| failure(error, decoded_bytes.get(), place.to_owned()))
}

/// Returns the failure of the source, or the parser's own.
fn failure(error: serde_json::Error, at: u64, path: String) -> Failure {
    let json = |error: io::Error| Failure::Json { at, path, problem: error.to_string() };
    io::Error::from(error).downcast::<Failure>().unwrap_or_else(json)
}

/// The source of bytes for the parser. A source can report only an `io::Error`, so a [`Failure`] is wrapped
/// in one.
struct Source<'s, 'i> {
    input: &'s mut Input<'i>,
    decoded_bytes: &'s Cell<u64>,
}

impl io::Read for Source<'_, '_> {
    #[inline]
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let at_hand = self.input.peek().map_err(io::Error::other)?;
        let count = at_hand.len().min(into.len());
        into[..count].copy_from_slice(&at_hand[..count]);
        self.input.consume(count);
        self.decoded_bytes.set(self.input.offset());
        Ok(count)
    }
}

/// Builds the values that the parser reports.
struct Builder<'b> {
    heap: Heap,
    /// The items, or keys and values, of open containers that are not in the heap yet.
    stack: Vec<Value>,
    /// The parser's position.
    path: Path,
    decoded_bytes: &'b Cell<u64>,
}

impl Builder<'_> {
    fn push<E: Error>(&mut self, value: Value) -> Result<(), E> {
        self.heap.budget.reserve(&mut self.stack, 1).map_err(E::custom)?;
        self.stack.push(value);
        Ok(())
    }

    /// Moves the items at index `from` and above from the stack to `list`.
    fn append<E: Error>(&mut self, list: Value, from: usize) -> Result<(), E> {
        self.heap.append(list, &self.stack[from..]).map_err(E::custom)?;
        self.stack.truncate(from);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Builder<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        self.heap.budget.decoded(self.decoded_bytes.get());
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Builder<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, b: bool) -> Result<Value, E> {
        Ok(Value::constant(if b { Constant::True } else { Constant::False }))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        self.heap.signed(number).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        self.heap.int(number).map_err(E::custom)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        let is_huge = number.abs() >= HUGE;
        Ok(Value::constant(if is_huge { Constant::Huge } else { Constant::Float }))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.heap.budget.decoded(self.decoded_bytes.get());
        self.heap.text_or_word(text.as_bytes()).map_err(E::custom)
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::constant(Constant::None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let list = self.heap.list().map_err(A::Error::custom)?;
        let from = self.stack.len();
        for index in 0.. {
            self.path.enter_index(index);
            let item = items.next_element_seed(&mut *self)?;
            self.path.leave();
            let Some(item) = item else { break };
            self.push(item)?;
            if self.stack.len() - from == PIECE_ITEMS {
                self.append(list, from)?;
            }
        }
        self.append(list, from)?;
        Ok(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let dict = self.heap.dict().map_err(A::Error::custom)?;
        let from = self.stack.len();
        while let Some(key) = map.next_key_seed(Key)? {
            let Some(key) = key else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            self.path.enter_key(key.text());
            let value = map.next_value_seed(&mut *self)?;
            self.path.leave();
            self.push(Value::word(key))?;
            self.push(value)?;
        }
        self.heap.set_items(dict, &self.stack[from..]).map_err(A::Error::custom)?;
        self.stack.truncate(from);
        Ok(dict)
    }
}

/// Reads a key. The result is `None` for keys that are not read.
struct Key;

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
