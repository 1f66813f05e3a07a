//! The output of `torch.cuda.memory_stats()` as JSON: counters of the allocator.
//!
//! The keys are flat (`allocated_bytes.all.peak`) or, as `memory_stats_as_nested_dict` returns them, nested.
//! Only the counters of both pools together are read. They may be inside other JSON, but only once: counters
//! of several devices are an error.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::{Failure, Mismatch};
use super::input::Input;
use super::json;
use super::values::{JsonScalar, ScalarSeed};
use crate::Trace;
use crate::totals::{Totals, TotalsSource};

/// The longest name of a counter that is read.
const NAME_MAX_BYTES: usize = 256;
/// The longest place of counters that an error shows.
const PLACE_MAX_BYTES: usize = 64;

/// Reads the counters. At least the peak of the allocated or of the reserved bytes must be among them.
pub(super) fn parse(input: &mut Input<'_>) -> Result<Trace, Failure> {
    let decoded = Cell::new(0);
    let mut found = Counters {
        totals: Totals::of(TotalsSource::MemoryStats),
        name: String::new(),
        place: None,
        other_place: None,
    };
    json::parse_as(input, &decoded, "the counters", &mut found)?;
    let totals = found.totals;
    if let Some((first, other)) = found.place.zip(found.other_place) {
        let mismatch =
            Mismatch::new("counters of one device", format!("those of {first:?} and {other:?}"));
        return Err(Failure::Content { path: "the counters".to_owned(), mismatch });
    }
    if totals.peak_allocated_bytes.is_none() && totals.peak_reserved_bytes.is_none() {
        let mismatch = Mismatch::new("the counter allocated_bytes.all.peak", "no such key");
        return Err(Failure::Content { path: "the counters".to_owned(), mismatch });
    }
    Ok(Trace { entries: totals.entries, totals: Some(totals), ..Trace::default() })
}

struct Counters {
    totals: Totals,
    /// The keys that lead to the current value, joined by dots.
    name: String,
    /// The keys that lead to the counters, joined by dots and cut.
    place: Option<String>,
    /// The first other place with counters.
    other_place: Option<String>,
}

/// The counters that are read.
const COUNTERS: [&str; 9] = [
    "allocated_bytes.all.peak",
    "allocated_bytes.all.current",
    "requested_bytes.all.peak",
    "reserved_bytes.all.peak",
    "reserved_bytes.all.current",
    "inactive_split_bytes.all.peak",
    "inactive_split_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
];

impl Counters {
    /// Returns the counter with the current name, and the place of its counters.
    fn counter(&self) -> Option<(&'static str, &str)> {
        COUNTERS.into_iter().find_map(|counter| {
            let before = self.name.strip_suffix(counter)?;
            let place = if before.is_empty() { before } else { before.strip_suffix('.')? };
            Some((counter, place.get(..PLACE_MAX_BYTES).unwrap_or(place)))
        })
    }

    fn set(&mut self, value: JsonScalar) {
        self.totals.entries += 1;
        let Some(number) = value.whole().and_then(|number| u64::try_from(number).ok()) else {
            return;
        };
        let Some((counter, place)) = self.counter() else { return };
        let place = place.to_owned();
        if self.place.get_or_insert_with(|| place.clone()) != &place {
            self.other_place.get_or_insert(place);
            return;
        }
        let totals = &mut self.totals;
        let place = match counter {
            "allocated_bytes.all.peak" => &mut totals.peak_allocated_bytes,
            "allocated_bytes.all.current" => &mut totals.end_allocated_bytes,
            "requested_bytes.all.peak" => &mut totals.peak_requested_bytes,
            "reserved_bytes.all.peak" => &mut totals.peak_reserved_bytes,
            "reserved_bytes.all.current" => &mut totals.end_reserved_bytes,
            "inactive_split_bytes.all.peak" => &mut totals.peak_inactive_split_bytes,
            "inactive_split_bytes.all.current" => &mut totals.end_inactive_split_bytes,
            "num_alloc_retries" => &mut totals.retries,
            "num_ooms" => &mut totals.failures,
            _ => return,
        };
        *place = Some(number);
    }
}

impl<'de> DeserializeSeed<'de> for &mut Counters {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Counters {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("counters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let outer = self.name.len();
        let mut key = String::new();
        while let Some(found) = map.next_key_seed(ScalarSeed { text: &mut key })? {
            if found == JsonScalar::Text && outer + key.len() < NAME_MAX_BYTES {
                if outer > 0 {
                    self.name.push('.');
                }
                self.name.push_str(&key);
                map.next_value_seed(&mut *self)?;
                self.name.truncate(outer);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        if !self.name.is_empty() {
            while items.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        for index in 0_u64.. {
            self.name = index.to_string();
            if items.next_element_seed(&mut *self)?.is_none() {
                break;
            }
        }
        self.name.clear();
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.set(JsonScalar::Whole(number.into()));
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.set(JsonScalar::Whole(number.into()));
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.set(JsonScalar::Float(number));
        Ok(())
    }
}
