//! Builds the snapshot from the values of a file, for pickle and JSON alike.
//!
//! The code descends only as deep as a snapshot is nested, so a cycle of references ends in a mismatch
//! error. A value that several places refer to is read again at each of them, except stacks, which
//! `stack_reader` caches. The memory of each result is charged to the budget first, so a small file cannot
//! expand into a large trace.

use std::collections::{BTreeMap, HashMap};

use super::Limits;
use super::budget::{Budget, OverBudget};
use super::error::{Failure, Mismatch, NO_SEGMENTS, PickleProblem};
use super::fields::{BriefEvent, Entry, ListedSegment, SHOWN_CHARS, Scalar};
use super::heap::{Constant, Heap, Items, Record, Value, View};
use super::parts::{Beside, ListedOwner, Parts};
use super::path::Path;
use super::recognise::Format;
use super::stack_reader::StackReader;
use super::words::Word;
use crate::devices::{EndBytes, Survey};
use crate::{DeviceFigures, MadeHere, Mark, StackId, Trace};
use stratalloc::config::TorchVersion;

/// Builds a snapshot from the values of a file. `format` is the syntax of the file.
pub(super) fn interpret(mut heap: Heap, format: Format, limits: &Limits) -> Result<Trace, Failure> {
    let mut budget = std::mem::replace(&mut heap.budget, Budget::new());
    budget.decoded_and_dropped(heap.decoded_bytes);
    let heap_bytes = budget.held_bytes();
    let (path, stacks) = (Path::default(), StackReader::default());
    let beside = Beside::default();
    let mut interpreter = Interpreter { heap: &heap, limits, path, budget, stacks, beside };
    let too_large = |at, path: String, error: OverBudget| match format {
        Format::Json => Failure::Json { at, path, problem: error.to_string() },
        _ => Failure::Pickle { at, problem: PickleProblem::Memory },
    };
    match interpreter.snapshot() {
        Ok(mut parts) => {
            let Interpreter { stacks, mut budget, .. } = interpreter;
            parts.trace.stacks = stacks.finish();
            let at = heap.decoded_bytes;
            drop(heap);
            budget.release(heap_bytes);
            let trace = parts.into_trace(limits, &mut budget);
            trace.map_err(|error| too_large(at, String::new(), error))
        }
        Err(Stop::Mismatch(mismatch)) => {
            Err(Failure::Content { path: interpreter.path.to_string(), mismatch })
        }
        Err(Stop::OverBudget(error)) => {
            Err(too_large(heap.decoded_bytes, interpreter.path.to_string(), error))
        }
    }
}

pub(super) struct Interpreter<'h> {
    heap: &'h Heap,
    limits: &'h Limits,
    path: Path,
    pub(super) budget: Budget,
    stacks: StackReader,
    /// Counts the events of the list being read, and collects its entries that are not events.
    pub(super) beside: Beside,
}

/// A device's list of trace entries, including those that will be ignored.
struct DeviceList {
    number: u32,
    list: Value,
    len: usize,
}

/// The most devices of a file that are compared and shown.
pub(super) const DEVICES_MAX: usize = 64;

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum Stop {
    Mismatch(#[from] Mismatch),
    OverBudget(#[from] OverBudget),
}

impl<'h> Interpreter<'h> {
    fn snapshot(&mut self) -> Result<Parts, Stop> {
        let mut parts = Parts::default();
        let root = self.heap.root;
        if let View::List(_) = self.heap.view(root) {
            parts.segments = self.entries(root)?;
            return Ok(parts);
        }
        let record = &self.record("a snapshot: a dictionary, or a list of segments", root)?;
        let segments = self.at(record, Word::Segments, Self::entries)?;
        let expected = "the key segments, which a memory snapshot has";
        parts.segments = segments.ok_or_else(|| Mismatch::new(expected, NO_SEGMENTS))?;
        self.at(record, Word::AllocatorSettings, |me, settings| me.settings(settings, &mut parts))?;
        self.at(record, Word::DeviceTraces, |me, devices| me.devices(devices, &mut parts))?;
        self.at(record, Word::ExternalAnnotations, |me, ranges| me.ranges(ranges, &mut parts))?;
        parts.account = self.at(record, Word::Account, Self::account)?.unwrap_or_default();
        let host_segments = self.at(record, Word::HostSegments, Self::entries)?;
        parts.host_segments = host_segments.unwrap_or_default();
        if let Some(events) = self.at(record, Word::HostTraces, Self::entries)? {
            parts.trace.torch = parts.trace.torch.max(Some(TorchVersion::V2_14));
            parts.host_events = events;
        }
        Ok(parts)
    }

    fn settings(&mut self, settings: Value, parts: &mut Parts) -> Result<(), Stop> {
        if self.heap.view(settings) == View::Constant(Constant::None) {
            return Ok(());
        }
        let record = &self.record("a dictionary of settings", settings)?;
        parts.trace.conf = self.at(record, Word::Conf, Self::conf)?.unwrap_or_default();
        let limit_bytes = self.field(record, Word::LimitBytes, Scalar::number_or_none)?.flatten();
        let total_bytes = self.field(record, Word::TotalBytes, Scalar::number)?;
        let total_bytes = total_bytes.filter(|bytes| *bytes > 0);
        let is_ours = record[Word::Stratalloc as usize].is_some();
        parts.trace.made_here = is_ours.then_some(MadeHere { limit_bytes, total_bytes });
        if record[Word::MaxRoundThreshold as usize].is_some() {
            parts.trace.torch = Some(TorchVersion::V2_13);
        }
        Ok(())
    }

    /// Returns the configuration string. Python's None means the empty string.
    fn conf(&mut self, conf: Value) -> Result<String, Stop> {
        match self.heap.view(conf) {
            View::Constant(Constant::None) => Ok(String::new()),
            View::Word(word) => Ok(word.text().to_owned()),
            View::Text(at) => {
                let text = self.heap.text(at);
                self.budget.charge(text.len() as u64)?;
                // Invalid UTF-8 is an error. A replacement character has three bytes, so replacing invalid
                // bytes could triple the size of the text.
                let text = str::from_utf8(text);
                Ok(text.map_err(|_| Mismatch::new("text in UTF-8", "other bytes"))?.to_owned())
            }
            _ => Err(self.mismatch("a configuration string or None", conf)),
        }
    }

    /// Adds a mark for the begin of each range that a profiler recorded. Ranges that cannot be read are left
    /// out, and all of them if the events have no times.
    fn ranges(&mut self, ranges: Value, parts: &mut Parts) -> Result<(), Stop> {
        let Some(ranges) = self.heap.items(ranges) else { return Ok(()) };
        let Parts { trace, device, .. } = parts;
        if !trace.events.is_sorted_by_key(|event| event.time_us) {
            return Ok(());
        }
        for range in ranges {
            let Some(record) = self.heap.record_of(range) else { continue };
            let field = |key: Word| record[key as usize].map(|value| self.scalar(value));
            let number = |key: Word| field(key).and_then(|value| value.number().ok());
            let is_other = number(Word::Device).is_some_and(|of| device.map(u64::from) != Some(of));
            let is_end = field(Word::Stage).is_some_and(|stage| stage.text() == Some("END"));
            let (name, time_us) = (field(Word::Name), number(Word::TimeUs));
            let name = name.as_ref().and_then(Scalar::text);
            let (Some(name), Some(time_us), false) = (name, time_us, is_other || is_end) else {
                continue;
            };
            self.budget.charge(name.len() as u64)?;
            self.budget.reserve(&mut trace.marks, 1)?;
            let before = trace.events.partition_point(|event| event.time_us < time_us);
            let events_before = u32::try_from(before).unwrap_or(u32::MAX);
            trace.marks.push(Mark { events_before, text: name.to_owned() });
        }
        trace.marks.sort_by_key(|mark| mark.events_before);
        Ok(())
    }

    /// Returns the rows of the accounts of all devices, which are a JSON text.
    fn account(&mut self, account: Value) -> Result<Vec<ListedOwner>, Stop> {
        if self.heap.view(account) == View::Constant(Constant::None) {
            return Ok(Vec::new());
        }
        let text = self.conf(account)?;
        let rows: Vec<ListedOwner> = serde_json::from_str(&text)
            .map_err(|error| Mismatch::new("the rows of an account", error.to_string()))?;
        self.budget.charge(size_of_val(&*rows) as u64)?;
        Ok(rows)
    }

    /// Reads the events of the requested device, or of the first one in the order of
    /// [`DeviceFigures::order`].
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
                let len = self.items("a list of trace entries", list).map_or(0, |list| list.len());
                let elsewhere = &mut parts.trace.entries_elsewhere;
                *elsewhere = (len as u64).max(*elsewhere);
                continue;
            }
            self.path.enter_index(index);
            let len = self.items("a list of trace entries", list)?.len();
            self.path.leave();
            if len > 0 {
                self.budget.reserve(&mut found, 1)?;
                found.push(DeviceList { number, list, len });
            }
        }
        let has_memory = |wanted| parts.segments.iter().any(|s| s.device == Some(wanted));
        let is_absent = |wanted: &u32| *wanted as usize >= count && !has_memory(*wanted);
        if let Some(wanted) = self.limits.device.filter(is_absent) {
            return Err(Stop::Mismatch(Mismatch::new(
                "events of the requested device",
                format!("{count} devices and no device {wanted}"),
            )));
        }
        self.choose(found, parts)
    }

    /// Compares the devices, and reads the list of the first one.
    fn choose(&mut self, found: Vec<DeviceList>, parts: &mut Parts) -> Result<(), Stop> {
        // No list is chosen if none has events.
        parts.trace.entries = found.iter().map(|list| list.len as u64).max().unwrap_or(0);
        let mut devices = self.compared(&found, &parts.segments)?;
        let first = devices.first().filter(|first| first.events > 0);
        let chosen = match (first, found.as_slice()) {
            (Some(first), all) => all.iter().find(|list| list.number == first.device),
            (None, [only]) => Some(only),
            (None, _) => None,
        };
        devices.truncate(if devices.len() > 1 { DEVICES_MAX } else { 0 });
        parts.trace.devices = devices;
        let Some(DeviceList { number, list, len }) = chosen else { return Ok(()) };
        let others = found.iter().filter(|other| other.number != *number);
        let elsewhere = others.map(|other| other.len as u64).max();
        parts.trace.entries_elsewhere = elsewhere.unwrap_or(parts.trace.entries_elsewhere);
        self.path.enter_index(*number as usize);
        self.beside = Beside::default();
        let events = self.entries(*list)?;
        self.path.leave();
        if !events.is_empty() {
            parts.trace.events = events;
            parts.device = Some(*number);
            let Beside { unknown, annotations, marks, .. } = std::mem::take(&mut self.beside);
            parts.trace.unknown = unknown;
            parts.trace.entries = *len as u64;
            parts.trace.annotations = annotations;
            parts.trace.marks = marks;
        }
        Ok(())
    }

    /// Returns the figures of all devices with events or memory in the order of [`DeviceFigures::order`].
    /// Empty if the file names one device only, or if the caller did.
    fn compared(
        &mut self,
        found: &[DeviceList],
        segments: &[ListedSegment],
    ) -> Result<Vec<DeviceFigures>, Stop> {
        // A device has an entry in two maps, and its list in a third one.
        let maps_bytes = (128 * (found.len() + segments.len()) + 256 * found.len()) as u64;
        self.budget.charge(maps_bytes)?;
        self.budget.release(maps_bytes);
        let mut ends: BTreeMap<u32, EndBytes> = BTreeMap::new();
        // Old files do not contain the device of a segment.
        let mut end_of_any = EndBytes::default();
        for ListedSegment { device, layout, .. } in segments {
            let end = device.map(|device| ends.entry(device).or_default());
            end.unwrap_or(&mut end_of_any).add(layout);
        }
        found.iter().for_each(|list| _ = ends.entry(list.number).or_default());
        if ends.len() < 2 || self.limits.device.is_some() {
            return Ok(Vec::new());
        }
        let lists: BTreeMap<u32, Value> = found.iter().map(|one| (one.number, one.list)).collect();
        let mut devices = self.budget.vec_of(ends.len())?;
        // A pickle may refer to one list many times.
        let mut surveys: HashMap<Value, Survey> = HashMap::new();
        for (device, end) in ends {
            let survey = lists.get(&device).map_or_else(Survey::default, |list| {
                *surveys.entry(*list).or_insert_with(|| self.survey(*list))
            });
            let figures = survey.finish(device, end.plus(end_of_any));
            if figures.events > 0 || end.reserved > 0 {
                devices.push(figures);
            }
        }
        devices.sort_by_key(DeviceFigures::order);
        Ok(devices)
    }

    fn survey(&self, list: Value) -> Survey {
        let mut survey = Survey::default();
        let items = self.heap.items(list).into_iter().flatten();
        for record in items.filter_map(|item| self.heap.record_of(item)) {
            if let Some(event) = BriefEvent::read(self, &record) {
                survey.see(event.action, event.size_bytes, event.time_us);
            }
        }
        survey
    }

    /// Reads the entries of a list.
    pub(super) fn entries<T: Entry>(&mut self, list: Value) -> Result<Vec<T>, Stop> {
        let items = self.items("a list of entries", list)?;
        let mut entries = self.budget.vec_of(items.len())?;
        for (index, item) in items.enumerate() {
            self.path.enter_index(index);
            let record = self.record(T::WHAT, item)?;
            entries.extend(T::read(self, &record)?);
            self.path.leave();
        }
        Ok(entries)
    }

    /// Returns the stack of an entry, if it has one that can be stored.
    pub(super) fn stack(&mut self, record: &Record) -> Option<StackId> {
        self.stacks.read(self.heap, record[Word::Frames as usize]?, &mut self.budget)
    }

    /// Returns the first dictionary of a list of dictionaries.
    pub(super) fn first_record(&self, list: Value) -> Option<Record> {
        self.heap.record_of(self.heap.items(list)?.next()?)
    }

    /// Returns the number under `key` in `record`. Returns `None` for any other value.
    pub(super) fn number(&self, record: &Record, key: Word) -> Option<u64> {
        match self.heap.view(record[key as usize]?) {
            View::Int(number) => Some(number),
            _ => None,
        }
    }

    /// Applies `read` to the value under `key` in `record`. Returns `None` if the key is missing.
    pub(super) fn field<T>(
        &mut self,
        record: &Record,
        key: Word,
        read: impl FnOnce(Scalar) -> Result<T, Mismatch>,
    ) -> Result<Option<T>, Stop> {
        self.at(record, key, |me, value| Ok(read(me.scalar(value))?))
    }

    /// Applies `read` to the value under `key` in `record`. Returns `None` if the key is missing.
    pub(super) fn at<T>(
        &mut self,
        record: &Record,
        key: Word,
        read: impl FnOnce(&mut Self, Value) -> Result<T, Stop>,
    ) -> Result<Option<T>, Stop> {
        let Some(value) = record[key as usize] else { return Ok(None) };
        self.path.enter_key(key.text());
        let found = read(self, value)?;
        self.path.leave();
        Ok(Some(found))
    }

    fn record(&self, expected: &'static str, value: Value) -> Result<Record, Stop> {
        let record = self.heap.record_of(value);
        record.ok_or_else(|| self.mismatch(expected, value))
    }

    fn items(&self, expected: &'static str, value: Value) -> Result<Items<'h>, Stop> {
        let items = self.heap.items(value);
        items.ok_or_else(|| self.mismatch(expected, value))
    }

    fn mismatch(&self, expected: &'static str, found: Value) -> Stop {
        Stop::Mismatch(self.scalar(found).mismatch(expected))
    }

    /// Returns a value as fields read it. Texts that are not words are cut to [`SHOWN_CHARS`] characters.
    pub(super) fn scalar(&self, value: Value) -> Scalar {
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
                // A character has at most four bytes.
                let text = String::from_utf8_lossy(&text[..text.len().min(4 * SHOWN_CHARS)]);
                let end = text.char_indices().nth(SHOWN_CHARS).map_or(text.len(), |(end, _)| end);
                Scalar::Text(text[..end].to_owned())
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
