//! The values of a file (numbers, words and references, of eight bytes each) and their containers.
//!
//! All data of variable length is in one array of bytes: texts, tuples, pieces of lists and the records of
//! dictionaries. In that array each value takes one to ten bytes, as a variable-length integer with the low
//! seven bits first. A dictionary keeps only keys that are [`Word`]s, each with its last value, in the
//! order of the keys. Containers are referred to by number; there are no pointers.

use super::budget::{Budget, OverBudget};
use super::words::{KEYS, WORD_MAX_BYTES, Word};

/// A value: its kind in the low three bits, its content in the other 61.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Value(u64);

/// A value, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Constant(Constant),
    Int(u64),
    /// A negative number, as its magnitude.
    Negative(u64),
    Word(Word),
    /// The offset of a text in the array of bytes.
    Text(usize),
    List(usize),
    Dict(usize),
    /// The offset of a tuple in the array of bytes.
    Tuple(usize),
}

/// Values without content. The contents of floats and of byte strings are not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Constant {
    None,
    False,
    True,
    Float,
    Bytes,
    /// An integer too large for any field.
    Huge,
}

const CONSTANTS: [Constant; 6] = [
    Constant::None,
    Constant::False,
    Constant::True,
    Constant::Float,
    Constant::Bytes,
    Constant::Huge,
];

const KIND_BITS: u32 = 3;
const CONSTANT: u64 = 0;
const INT: u64 = 1;
/// An integer that `INT` cannot represent. If the low bit of the content is 0, the other bits are the
/// magnitude of a negative number. If it is 1, they are the offset of a number of more than 61 bits.
const OTHER_INT: u64 = 2;
const WORD: u64 = 3;
const TEXT: u64 = 4;
const LIST: u64 = 5;
const DICT: u64 = 6;
const TUPLE: u64 = 7;
const CONTENT_MAX: u64 = u64::MAX >> KIND_BITS;
/// The value for "no piece" and "no record".
const NOWHERE: u32 = u32::MAX;

impl Value {
    pub(super) const EMPTY_TUPLE: Self = Self::of(TUPLE, 0);

    const fn of(kind: u64, content: u64) -> Self {
        Self(content << KIND_BITS | kind)
    }

    pub(super) const fn constant(constant: Constant) -> Self {
        Self::of(CONSTANT, constant as u64)
    }

    pub(super) const fn word(word: Word) -> Self {
        Self::of(WORD, word as u64)
    }

    pub(super) const fn negative(magnitude: u64) -> Self {
        if magnitude > CONTENT_MAX >> 1 {
            Self::constant(Constant::Huge)
        } else {
            Self::of(OTHER_INT, magnitude << 1)
        }
    }

    /// Returns the offset in the array of bytes, or the number of the container, that a reference contains.
    fn place(self) -> usize {
        // Offsets and numbers of containers have at most 32 bits, so they fit.
        usize::try_from(self.0 >> KIND_BITS).unwrap_or(usize::MAX)
    }

    fn as_word(self) -> Option<Word> {
        (self.0 & ((1 << KIND_BITS) - 1) == WORD).then(|| Word::at(self.0 >> KIND_BITS))?
    }
}

/// The pieces of a list as a linked list, or the record of a dictionary.
#[derive(Clone, Copy, Debug)]
struct Container {
    head: u32,
    tail: u32,
    /// The number of items of a list.
    len: u32,
}

/// All values of one file.
#[derive(Debug)]
pub(super) struct Heap {
    bytes: Vec<u8>,
    containers: Vec<Container>,
    pub(super) root: Value,
    pub(super) budget: Budget,
    pub(super) decoded_bytes: u64,
}

/// The values of a dictionary, indexed by key.
pub(super) type Record = [Option<Value>; KEYS];

impl Heap {
    pub(super) fn new() -> Self {
        Self {
            // The empty tuple is at offset 0 and consists of its length, 0.
            bytes: vec![0],
            containers: Vec::new(),
            root: Value::constant(Constant::None),
            budget: Budget::new(),
            decoded_bytes: 0,
        }
    }

    pub(super) fn int(&mut self, number: u64) -> Result<Value, OverBudget> {
        if number <= CONTENT_MAX {
            return Ok(Value::of(INT, number));
        }
        let at = self.here()?;
        self.push_bytes(&number.to_le_bytes())?;
        Ok(Value::of(OTHER_INT, u64::from(at) << 1 | 1))
    }

    pub(super) fn signed(&mut self, number: i64) -> Result<Value, OverBudget> {
        match u64::try_from(number) {
            Ok(number) => self.int(number),
            Err(_) => Ok(Value::negative(number.unsigned_abs())),
        }
    }

    /// Returns the word that equals the text, or else stores the text.
    pub(super) fn text_or_word(&mut self, text: &[u8]) -> Result<Value, OverBudget> {
        let short = Some(text).filter(|text| text.len() <= WORD_MAX_BYTES);
        let short = short.and_then(|text| str::from_utf8(text).ok());
        if let Some(word) = short.and_then(Word::from_text) {
            return Ok(Value::word(word));
        }
        let value = self.start_text(text.len() as u64)?;
        self.push_bytes(text)?;
        Ok(value)
    }

    /// Starts a text of `len` bytes, which the caller adds by [`Self::push_bytes`].
    pub(super) fn start_text(&mut self, len: u64) -> Result<Value, OverBudget> {
        let at = self.here()?;
        self.push_number(len)?;
        Ok(Value::of(TEXT, at.into()))
    }

    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Result<(), OverBudget> {
        self.budget.reserve(&mut self.bytes, bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn tuple(&mut self, items: &[Value]) -> Result<Value, OverBudget> {
        if items.is_empty() {
            return Ok(Value::EMPTY_TUPLE);
        }
        let at = self.here()?;
        self.push_items(items)?;
        Ok(Value::of(TUPLE, at.into()))
    }

    pub(super) fn list(&mut self) -> Result<Value, OverBudget> {
        self.container(LIST)
    }

    pub(super) fn dict(&mut self) -> Result<Value, OverBudget> {
        self.container(DICT)
    }

    fn container(&mut self, kind: u64) -> Result<Value, OverBudget> {
        let id = u32::try_from(self.containers.len()).map_err(|_| OverBudget)?;
        self.budget.reserve(&mut self.containers, 1)?;
        self.containers.push(Container { head: NOWHERE, tail: NOWHERE, len: 0 });
        Ok(Value::of(kind, id.into()))
    }

    /// Appends items to a list, as a new piece.
    pub(super) fn append(&mut self, list: Value, items: &[Value]) -> Result<(), OverBudget> {
        if items.is_empty() {
            return Ok(());
        }
        let at = self.here()?;
        let count = u32::try_from(items.len()).map_err(|_| OverBudget)?;
        self.push_bytes(&NOWHERE.to_le_bytes())?;
        self.push_items(items)?;
        let container = &mut self.containers[list.place()];
        container.len = container.len.checked_add(count).ok_or(OverBudget)?;
        let last = std::mem::replace(&mut container.tail, at);
        if last == NOWHERE {
            container.head = at;
        } else {
            let last = last as usize;
            self.bytes[last..last + 4].copy_from_slice(&at.to_le_bytes());
        }
        Ok(())
    }

    /// Sets items of a dictionary. `pairs` contains keys and values in turn. Only keys that are read
    /// ([`Word::is_key`]) are kept. The whole record is rewritten, with one value per key.
    pub(super) fn set_items(&mut self, dict: Value, pairs: &[Value]) -> Result<(), OverBudget> {
        let mut record = self.record(dict.place());
        let mut changed = false;
        for pair in pairs.chunks_exact(2) {
            if let Some(key) = pair[0].as_word().filter(|w| w.is_key()) {
                record[key as usize] = Some(pair[1]);
                changed = true;
            }
        }
        if !changed {
            return Ok(());
        }
        let at = self.here()?;
        let mut keys = 0_u64;
        for (i, value) in record.iter().enumerate() {
            keys |= u64::from(value.is_some()) << i;
        }
        self.push_number(keys)?;
        for value in record.into_iter().flatten() {
            self.push_number(value.0)?;
        }
        self.containers[dict.place()].head = at;
        Ok(())
    }

    /// Returns the record of `value`, or `None` if it is not a dictionary.
    pub(super) fn record_of(&self, value: Value) -> Option<Record> {
        match self.view(value) {
            View::Dict(dict) => Some(self.record(dict)),
            _ => None,
        }
    }

    /// Returns the number of lists and dictionaries. They are numbered from 0.
    pub(super) fn container_count(&self) -> usize {
        self.containers.len()
    }

    /// Returns the record of a dictionary.
    pub(super) fn record(&self, dict: usize) -> Record {
        let mut record = [None; KEYS];
        let head = self.containers[dict].head;
        if head == NOWHERE {
            return record;
        }
        let mut at = head as usize;
        let keys = self.number_at(&mut at);
        for (i, value) in record.iter_mut().enumerate() {
            if keys >> i & 1 == 1 {
                *value = Some(Value(self.number_at(&mut at)));
            }
        }
        record
    }

    /// Returns the items of a list or tuple, or `None` for any other value.
    pub(super) fn items(&self, of: Value) -> Option<Items<'_>> {
        let none = Items { heap: self, at: 0, in_piece: 0, next: NOWHERE, left: 0 };
        match self.view(of) {
            View::List(list) => Some(Items {
                next: self.containers[list].head,
                left: self.containers[list].len as usize,
                ..none
            }),
            View::Tuple(mut at) => {
                let len = self.number_at(&mut at);
                Some(Items {
                    at,
                    in_piece: len,
                    left: usize::try_from(len).unwrap_or(usize::MAX),
                    ..none
                })
            }
            _ => None,
        }
    }

    /// Returns the bytes of the text at offset `at`.
    pub(super) fn text(&self, mut at: usize) -> &[u8] {
        let len = usize::try_from(self.number_at(&mut at)).unwrap_or(usize::MAX);
        let end = at.saturating_add(len).min(self.bytes.len());
        &self.bytes[at..end]
    }

    pub(super) fn view(&self, value: Value) -> View {
        let content = value.0 >> KIND_BITS;
        let place = value.place();
        match value.0 & ((1 << KIND_BITS) - 1) {
            INT => View::Int(content),
            OTHER_INT if content & 1 == 0 => View::Negative(content >> 1),
            OTHER_INT => {
                let mut wide = [0; 8];
                let at = place >> 1;
                wide.copy_from_slice(&self.bytes[at..at + 8]);
                View::Int(u64::from_le_bytes(wide))
            }
            TEXT => View::Text(place),
            LIST => View::List(place),
            DICT => View::Dict(place),
            TUPLE => View::Tuple(place),
            WORD => match Word::at(content) {
                Some(word) => View::Word(word),
                None => View::Constant(Constant::None),
            },
            _ => View::Constant(CONSTANTS.get(place).copied().unwrap_or(Constant::None)),
        }
    }

    fn here(&self) -> Result<u32, OverBudget> {
        u32::try_from(self.bytes.len()).ok().filter(|&at| at != NOWHERE).ok_or(OverBudget)
    }

    fn push_items(&mut self, items: &[Value]) -> Result<(), OverBudget> {
        self.push_number(items.len() as u64)?;
        items.iter().try_for_each(|item| self.push_number(item.0))
    }

    #[expect(clippy::cast_possible_truncation, reason = "seven bits at a time")]
    fn push_number(&mut self, mut number: u64) -> Result<(), OverBudget> {
        self.budget.reserve(&mut self.bytes, 10)?;
        while number >= 0x80 {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
        Ok(())
    }

    fn number_at(&self, at: &mut usize) -> u64 {
        let mut number = 0;
        let mut shift = 0;
        while let Some(&byte) = self.bytes.get(*at) {
            *at += 1;
            number |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 || shift > 63 {
                break;
            }
        }
        number
    }
}

/// Iterates over the items of a list or tuple.
#[derive(Debug)]
pub(super) struct Items<'h> {
    heap: &'h Heap,
    at: usize,
    in_piece: u64,
    next: u32,
    left: usize,
}

impl Items<'_> {
    /// Returns how many items remain.
    pub(super) fn len(&self) -> usize {
        self.left
    }
}

impl Iterator for Items<'_> {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.left = self.left.checked_sub(1)?;
        if self.in_piece == 0 {
            let start = self.next as usize;
            let mut next = [0; 4];
            next.copy_from_slice(self.heap.bytes.get(start..start + 4)?);
            self.next = u32::from_le_bytes(next);
            self.at = start + 4;
            self.in_piece = self.heap.number_at(&mut self.at);
        }
        self.in_piece = self.in_piece.checked_sub(1)?;
        Some(Value(self.heap.number_at(&mut self.at)))
    }
}
