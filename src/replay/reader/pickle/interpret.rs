//! Reads the snapshot out of the values of a pickle.
//!
//! Goes only as deep as a snapshot is, so cycles end as a mismatch. A value that many places share
//! is read once per place; since each reading is charged to the budget first, a small file cannot
//! unfold into a large trace.

use std::cmp::Reverse;

use super::budget::{Budget, OverBudget};
use super::heap::{Constant, Heap, Items, Value, View};
use super::stack_reader::StackReader;
use crate::config::TorchVersion;
use crate::replay::Trace;
use crate::replay::reader::Limits;
use crate::replay::reader::error::{Failure, Mismatch, PickleProblem};
use crate::replay::reader::fields::{
    BlockFields, EventFields, Fields, SHOWN_CHARS, Scalar, SegmentFields, SettingsFields,
};
use crate::replay::reader::parts::{Beside, Parts};
use crate::replay::reader::path::Path;
use crate::replay::reader::words::Word;

/// Reads a snapshot.
pub(in crate::replay::reader) fn interpret(
    mut heap: Heap,
    limits: &Limits,
) -> Result<Trace, Failure> {
    let mut budget = heap.take_budget();
    budget.decoded_and_dropped(heap.decoded_bytes);
    let (path, stacks) = (Path::default(), StackReader::default());
    let beside = Beside::default();
    let mut interpreter = Interpreter { heap: &heap, limits, path, budget, stacks, beside };
    match interpreter.snapshot() {
        Ok(mut parts) => {
            parts.stacks = interpreter.stacks.finish();
            drop(heap);
            Ok(parts.into_trace(limits))
        }
        Err(Stop::Mismatch(mismatch)) => {
            Err(Failure::Content { path: interpreter.path.to_string(), mismatch })
        }
        Err(Stop::OverBudget) => {
            Err(Failure::Pickle { at: heap.decoded_bytes, problem: PickleProblem::Memory })
        }
    }
}

struct Interpreter<'h> {
    heap: &'h Heap,
    limits: &'h Limits,
    path: Path,
    budget: Budget,
    stacks: StackReader,
    /// Of the list that is read.
    beside: Beside,
}

/// A device's list of trace entries, with remarks among them.
struct DeviceList {
    number: u32,
    list: Value,
    len: usize,
}

enum Stop {
    Mismatch(Mismatch),
    OverBudget,
}

impl From<Mismatch> for Stop {
    fn from(mismatch: Mismatch) -> Self {
        Self::Mismatch(mismatch)
    }
}

impl From<OverBudget> for Stop {
    fn from(_: OverBudget) -> Self {
        Self::OverBudget
    }
}

impl<'h> Interpreter<'h> {
    fn snapshot(&mut self) -> Result<Parts, Stop> {
        let mut parts = Parts::default();
        let root = self.heap.root;
        if let View::List(_) = self.heap.view(root) {
            parts.segments = self.entries::<SegmentFields>(root)?;
            return Ok(parts);
        }
        let expected = "a snapshot: a dictionary, or a list of segments";
        let record = self.heap.record_of(root);
        let record = record.ok_or_else(|| self.mismatch(expected, root))?;
        let segments = record[Word::Segments as usize]
            .ok_or_else(|| Mismatch::new("the key segments", "no such key"))?;
        parts.segments = self.at_key(Word::Segments, |me| me.entries::<SegmentFields>(segments))?;
        if let Some(settings) = record[Word::AllocatorSettings as usize] {
            let fields = self.at_key(Word::AllocatorSettings, |me| me.settings(settings))?;
            fields.finish(&mut parts);
        }
        if let Some(devices) = record[Word::DeviceTraces as usize] {
            self.at_key(Word::DeviceTraces, |me| me.devices(devices, &mut parts))?;
        }
        if let Some(host) = record[Word::HostSegments as usize] {
            parts.host_segments =
                self.at_key(Word::HostSegments, |me| me.entries::<SegmentFields>(host))?;
        }
        if let Some(host) = record[Word::HostTraces as usize] {
            parts.torch = parts.torch.max(Some(TorchVersion::V2_14));
            parts.host_events =
                self.at_key(Word::HostTraces, |me| me.entries::<EventFields>(host))?;
        }
        Ok(parts)
    }

    fn settings(&mut self, settings: Value) -> Result<SettingsFields, Stop> {
        let mut fields = SettingsFields::default();
        if self.heap.view(settings) == View::Constant(Constant::None) {
            return Ok(fields);
        }
        let record = self.heap.record_of(settings);
        let record = record.ok_or_else(|| self.mismatch("a dictionary of settings", settings))?;
        for key in SettingsFields::KEYS {
            if let Some(value) = record[key as usize] {
                let value = self.at_key(key, |me| me.setting(value))?;
                self.at_key(key, |_| Ok(fields.set(key, value)?))?;
            }
        }
        Ok(fields)
    }

    /// A setting; texts are whole.
    fn setting(&mut self, value: Value) -> Result<Scalar, Stop> {
        let View::Text(at) = self.heap.view(value) else {
            return Ok(self.scalar(value, SHOWN_CHARS));
        };
        let text = self.heap.text(at);
        self.budget.charge(text.len() as u64)?;
        // Replacing what is no text would take three times its place, and more while it grows.
        let text = str::from_utf8(text);
        let text = text.map_err(|_| Mismatch::new("text in UTF-8", "other bytes"))?;
        Ok(Scalar::Text(text.to_owned()))
    }

    /// Reads the events of the wanted device, or of the one with the most.
    fn devices(&mut self, devices: Value, parts: &mut Parts) -> Result<(), Stop> {
        if self.heap.view(devices) == View::Constant(Constant::None) {
            return Ok(());
        }
        let lists = self.items("a list with a list of trace entries per device", devices)?;
        let count = lists.len();
        let mut found: Vec<DeviceList> = Vec::new();
        for (index, list) in lists.enumerate() {
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            if self.limits.device.is_some_and(|wanted| wanted != number) {
                continue;
            }
            self.path.enter_index(index);
            let len = self.items("a list of trace entries", list)?.len();
            self.path.leave();
            if len > 0 {
                self.budget.room(&mut found, 1)?;
                found.push(DeviceList { number, list, len });
            }
        }
        if let Some(wanted) = self.limits.device.filter(|&d| d as usize >= count) {
            return Err(Stop::Mismatch(Mismatch::new(
                "events of the device that was asked for",
                format!("{count} devices and no device {wanted}"),
            )));
        }
        self.choose(found, parts)
    }

    /// Reads the longest lists until no other could hold more events. Remarks are no events, so the
    /// longest list need not hold the most.
    fn choose(&mut self, mut found: Vec<DeviceList>, parts: &mut Parts) -> Result<(), Stop> {
        found.sort_by_key(|device| (Reverse(device.len), device.number));
        parts.other_devices = u32::try_from(found.len().saturating_sub(1)).unwrap_or(u32::MAX);
        for DeviceList { number, list, len } in found {
            if len < parts.events.len() {
                break;
            }
            self.path.enter_index(number as usize);
            self.beside = Beside::default();
            let events = self.entries::<EventFields>(list)?;
            self.path.leave();
            let before = parts.device.is_none_or(|chosen| number < chosen);
            let (more, equal) =
                (events.len() > parts.events.len(), events.len() == parts.events.len());
            if more || (equal && before && !events.is_empty()) {
                parts.events = events;
                parts.device = Some(number);
                parts.beside = std::mem::take(&mut self.beside);
            }
        }
        Ok(())
    }

    /// The entries of a list.
    fn entries<F: Fields>(&mut self, list: Value) -> Result<Vec<F::Entry>, Stop> {
        let items = self.items("a list of entries", list)?;
        let mut entries = self.budget.vec_of(items.len())?;
        for (index, item) in items.enumerate() {
            self.path.enter_index(index);
            entries.extend(self.entry::<F>(item)?);
            self.path.leave();
        }
        Ok(entries)
    }

    fn entry<F: Fields>(&mut self, value: Value) -> Result<Option<F::Entry>, Stop> {
        let record = self.heap.record_of(value);
        let record = record.ok_or_else(|| self.mismatch(F::WHAT, value))?;
        let mut fields = F::default();
        for (&key, value) in Word::ALL.iter().zip(record) {
            let Some(value) = value else { continue };
            if F::HAS_BLOCKS && key == Word::Blocks {
                let blocks = self.at_key(key, |me| me.entries::<BlockFields>(value))?;
                fields.set_blocks(blocks);
            } else if F::HAS_STACK && key == Word::Frames {
                fields.set_stack(self.stacks.read(self.heap, value, &mut self.budget));
            } else if F::wants(key) {
                let scalar = self.scalar(value, SHOWN_CHARS);
                self.at_key(key, |_| Ok(fields.set(key, &scalar)?))?;
            }
        }
        let held_bytes = self.beside.held_bytes();
        let entry = fields.finish(&mut self.beside)?;
        self.budget.charge(self.beside.held_bytes().saturating_sub(held_bytes))?;
        Ok(entry)
    }

    fn at_key<T>(
        &mut self,
        key: Word,
        read: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        self.path.enter_key(key.text());
        let value = read(self)?;
        self.path.leave();
        Ok(value)
    }

    fn items(&self, expected: &'static str, value: Value) -> Result<Items<'h>, Stop> {
        let items = self.heap.items(value);
        items.ok_or_else(|| self.mismatch(expected, value))
    }

    fn mismatch(&self, expected: &'static str, found: Value) -> Stop {
        let found = self.scalar(found, SHOWN_CHARS);
        Stop::Mismatch(found.mismatch(expected))
    }

    /// A value as a field sees it; texts that are no word are cut to `text_bytes` or a little less.
    fn scalar(&self, value: Value, text_bytes: usize) -> Scalar {
        match self.heap.view(value) {
            View::Constant(Constant::None) => Scalar::None,
            View::Constant(Constant::False) => Scalar::Bool(false),
            View::Constant(Constant::True) => Scalar::Bool(true),
            View::Constant(Constant::Float) => Scalar::Other("a number that is not whole"),
            View::Constant(Constant::Bytes) => Scalar::Other("bytes"),
            View::Constant(Constant::Huge) => Scalar::Other("a number beyond 64 bits"),
            View::Int(n) => Scalar::Int(n.into()),
            View::Negative(magnitude) => Scalar::Int(-i128::from(magnitude)),
            View::Word(word) => Scalar::Word(word),
            View::Text(at) => {
                let text = self.heap.text(at);
                let shown = &text[..text.len().min(text_bytes)];
                Scalar::Text(String::from_utf8_lossy(shown).into_owned())
            }
            View::Dict(_) => Scalar::Other("a dictionary"),
            View::List(_) | View::Tuple(_) => {
                let items = self.heap.items(value);
                let mut pair = items.filter(|items| items.len() == 2).into_iter().flatten();
                let mut next = || match self.heap.view(pair.next()?) {
                    View::Int(n) => Some(n),
                    _ => None,
                };
                match (next(), next()) {
                    (Some(capture), Some(user)) => Scalar::Pair(capture, user),
                    _ => Scalar::Other("a list"),
                }
            }
        }
    }
}
