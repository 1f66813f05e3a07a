//! Parses the events of a profiler's trace: those of memory, and the calls that may enclose them.
//!
//! Every other event is skipped. All that is kept is charged to the budget. The order of the keys of an event
//! does not matter.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::stacks::{Call, Callee};
use crate::reader::budget::{Budget, OverBudget};
use crate::reader::error::Failure;
use crate::reader::input::Input;
use crate::reader::json;
use crate::reader::values::{JsonScalar, ScalarSeed};
use crate::stacks::{StackBuilder, StackId};

/// An event of the allocator.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryEvent {
    pub(super) time_us: f64,
    pub(super) address: u64,
    /// Negative for a free.
    pub(super) bytes: i64,
    /// The allocated bytes after the event.
    pub(super) allocated_bytes: Option<u64>,
    /// The reserved bytes after the event.
    pub(super) reserved_bytes: Option<u64>,
    pub(super) device: u32,
    /// The number of its thread.
    pub(super) track: u32,
    /// Whether it is a request that failed.
    pub(super) is_failure: bool,
    pub(super) stack: Option<StackId>,
}

/// The type of the host among PyTorch's types of devices.
const HOST: i128 = 0;
/// The memory of a row of the table of tracks.
const TRACK_BYTES: u64 = 128;

/// The events that are kept.
pub(super) struct ProfileEvents {
    pub(super) budget: Budget,
    pub(super) memory: Vec<MemoryEvent>,
    /// The number of events of a device's memory without an address.
    pub(super) without_address: u64,
    pub(super) calls: Vec<Call>,
    /// Whether the lines of calls are recorded; `None` without calls of Python functions.
    pub(super) has_call_lines: Option<bool>,
    pub(super) stacks: StackBuilder,
    /// The number of each track, which has the events of one thread, by the ids of process and thread.
    tracks: HashMap<(i128, i128), u32>,
}

impl ProfileEvents {
    pub(super) fn parse(input: &mut Input<'_>) -> Result<Self, Failure> {
        let decoded_bytes = Cell::new(0);
        let mut events = Self {
            budget: Budget::new(),
            memory: Vec::new(),
            without_address: 0,
            calls: Vec::new(),
            has_call_lines: None,
            stacks: StackBuilder::default(),
            tracks: HashMap::new(),
        };
        let (event, key) = (EventFields::default(), String::new());
        let reader = EventReader { events: &mut events, decoded_bytes: &decoded_bytes, event, key };
        json::parse_as(input, &decoded_bytes, "traceEvents", Root(reader))?;
        Ok(events)
    }

    fn track(&mut self, fields: &EventFields) -> Result<Option<u32>, OverBudget> {
        let Some(track) = fields.process.zip(fields.track) else { return Ok(None) };
        if let Some(known) = self.tracks.get(&track) {
            return Ok(Some(*known));
        }
        self.budget.charge(TRACK_BYTES)?;
        let number = u32::try_from(self.tracks.len()).map_err(|_| OverBudget)?;
        self.tracks.insert(track, number);
        Ok(Some(number))
    }

    /// Keeps an event, if it is about memory or a call.
    fn keep(&mut self, fields: &EventFields) -> Result<(), OverBudget> {
        match (fields.name.as_str(), fields.kind) {
            ("[memory]", _) => self.keep_memory(fields, false),
            ("[OutOfMemory]", _) => self.keep_memory(fields, true),
            (_, EventKind::PythonFunction) => self.keep_call(fields, &Callee::python(&fields.name)),
            (_, EventKind::Operator) => self.keep_call(fields, &Callee::operator(&fields.name)),
            (_, EventKind::Other) => Ok(()),
        }
    }

    fn keep_memory(&mut self, fields: &EventFields, is_failure: bool) -> Result<(), OverBudget> {
        let device = fields.device.and_then(|number| u32::try_from(number).ok());
        let is_host = fields.device_type.is_none_or(|kind| kind == HOST);
        let bytes = fields.bytes.and_then(|bytes| i64::try_from(bytes).ok());
        let Some((device, bytes)) = device.zip(bytes).filter(|_| !is_host) else { return Ok(()) };
        let address = fields.address.and_then(|address| u64::try_from(address).ok());
        if address.is_none() && !is_failure {
            self.without_address += 1;
            return Ok(());
        }
        let whole = |number: Option<i128>| number.and_then(|number| u64::try_from(number).ok());
        let event = MemoryEvent {
            time_us: fields.begin_us.unwrap_or(0.0),
            address: address.unwrap_or(0),
            bytes,
            allocated_bytes: whole(fields.allocated_bytes),
            reserved_bytes: whole(fields.reserved_bytes),
            device,
            track: self.track(fields)?.unwrap_or(u32::MAX),
            is_failure,
            stack: None,
        };
        self.budget.reserve(&mut self.memory, 1)?;
        self.memory.push(event);
        Ok(())
    }

    fn keep_call(&mut self, fields: &EventFields, callee: &Callee<'_>) -> Result<(), OverBudget> {
        let Some((begin_us, duration_us)) = fields.begin_us.zip(fields.duration_us) else {
            return Ok(());
        };
        let Some(track) = self.track(fields)? else { return Ok(()) };
        let Self { stacks, budget, .. } = self;
        let end_us = begin_us + duration_us;
        let call = Call::of(callee, &fields.called_from, stacks, &mut |bytes| {
            budget.charge(bytes).is_ok()
        });
        let Some(call) = call else { return Ok(()) };
        if matches!(callee, Callee::Python(_)) {
            self.has_call_lines = Some(self.has_call_lines == Some(true) || call.from.is_some());
        }
        self.budget.reserve(&mut self.calls, 1)?;
        self.calls.push(Call { track, begin_us, end_us, ..call });
        Ok(())
    }
}

/// The kind of an event, by its category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EventKind {
    PythonFunction,
    Operator,
    #[default]
    Other,
}

/// The fields of one event that are read.
#[derive(Debug, Default)]
struct EventFields {
    name: String,
    kind: EventKind,
    process: Option<i128>,
    track: Option<i128>,
    begin_us: Option<f64>,
    duration_us: Option<f64>,
    bytes: Option<i128>,
    address: Option<i128>,
    device: Option<i128>,
    device_type: Option<i128>,
    allocated_bytes: Option<i128>,
    reserved_bytes: Option<i128>,
    /// The file and the line of a call; empty if they are not recorded.
    called_from: String,
}

impl EventFields {
    /// Removes all fields and keeps the memory of the texts.
    fn clear(&mut self) {
        let (mut name, mut called_from) =
            (std::mem::take(&mut self.name), std::mem::take(&mut self.called_from));
        name.clear();
        called_from.clear();
        *self = Self { name, called_from, ..Self::default() };
    }
}

/// Reads the events one by one.
struct EventReader<'b> {
    events: &'b mut ProfileEvents,
    decoded_bytes: &'b Cell<u64>,
    event: EventFields,
    /// The last key, or a text that is not kept.
    key: String,
}

impl EventReader<'_> {
    fn keep<E: Error>(&mut self) -> Result<(), E> {
        self.events.budget.decoded(self.decoded_bytes.get());
        self.events.keep(&self.event).map_err(E::custom)
    }

    fn scalar<'de, A: MapAccess<'de>>(&mut self, map: &mut A) -> Result<JsonScalar, A::Error> {
        map.next_value_seed(ScalarSeed { text: &mut self.key })
    }

    /// Reads the value under the key of an event.
    fn field<'de, A: MapAccess<'de>>(&mut self, map: &mut A) -> Result<(), A::Error> {
        match self.key.as_str() {
            "name" => {
                map.next_value_seed(ScalarSeed { text: &mut self.event.name })?;
            }
            "cat" => {
                let found = self.scalar(map)?;
                self.event.kind = match self.key.as_str() {
                    _ if found != JsonScalar::Text => EventKind::Other,
                    "python_function" => EventKind::PythonFunction,
                    "cpu_op" | "operator" | "Operator" => EventKind::Operator,
                    _ => EventKind::Other,
                };
            }
            "pid" => self.event.process = self.scalar(map)?.whole(),
            "tid" => self.event.track = self.scalar(map)?.whole(),
            "ts" => self.event.begin_us = self.scalar(map)?.float(),
            "dur" => self.event.duration_us = self.scalar(map)?.float(),
            "args" => map.next_value_seed(Dictionary { reader: self, part: Part::Arguments })?,
            _ => _ = map.next_value::<IgnoredAny>()?,
        }
        Ok(())
    }

    /// Reads the value under the key of an event's arguments.
    fn argument<'de, A: MapAccess<'de>>(&mut self, map: &mut A) -> Result<(), A::Error> {
        let event = &mut self.event;
        let place = match self.key.as_str() {
            "Bytes" => &mut event.bytes,
            "Addr" => &mut event.address,
            "Device Id" => &mut event.device,
            "Device Type" => &mut event.device_type,
            "Total Allocated" => &mut event.allocated_bytes,
            "Total Reserved" => &mut event.reserved_bytes,
            "CallFrom" => {
                map.next_value_seed(ScalarSeed { text: &mut event.called_from })?;
                return Ok(());
            }
            _ => {
                map.next_value::<IgnoredAny>()?;
                return Ok(());
            }
        };
        *place = map.next_value_seed(ScalarSeed { text: &mut self.key })?.whole();
        Ok(())
    }
}

/// A dictionary of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Event,
    Arguments,
}

struct Dictionary<'r, 'b> {
    reader: &'r mut EventReader<'b>,
    part: Part,
}

impl<'de> DeserializeSeed<'de> for Dictionary<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Dictionary<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a dictionary of an event")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { reader, part } = self;
        while let Some(found) = map.next_key_seed(ScalarSeed { text: &mut reader.key })? {
            match part {
                _ if found != JsonScalar::Text => _ = map.next_value::<IgnoredAny>()?,
                Part::Event => reader.field(&mut map)?,
                Part::Arguments => reader.argument(&mut map)?,
            }
        }
        Ok(())
    }
}

/// The list of events.
struct EventList<'r, 'b>(&'r mut EventReader<'b>);

impl<'de> DeserializeSeed<'de> for EventList<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventList<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let reader = self.0;
        loop {
            reader.event.clear();
            let event = Dictionary { reader: &mut *reader, part: Part::Event };
            if items.next_element_seed(event)?.is_none() {
                return Ok(());
            }
            reader.keep()?;
        }
    }
}

/// The whole file: a dictionary with the list of events, or only the list.
struct Root<'b>(EventReader<'b>);

impl<'de> DeserializeSeed<'de> for Root<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Root<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a profiler's trace")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(found) = map.next_key_seed(ScalarSeed { text: &mut self.0.key })? {
            if found == JsonScalar::Text && self.0.key == "traceEvents" {
                map.next_value_seed(EventList(&mut self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, items: A) -> Result<(), A::Error> {
        EventList(&mut self.0).visit_seq(items)
    }
}
