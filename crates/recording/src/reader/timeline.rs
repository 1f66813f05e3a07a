//! The two forms of `export_memory_timeline` of PyTorch's profiler, as JSON.
//!
//! A name that ends in `.json` or `.json.gz` selects `[times, sizes]`: for each time the bytes of each
//! category, after a leading zero. `.raw.json.gz` selects a list of changes: time in nanoseconds (-1 for
//! tensors from before the trace), action, bytes with a sign, category. Neither has addresses, streams,
//! reserved bytes or code, so only [`Totals`] follow. They are computed as the file is read.
//!
//! Source of the formats: `MemoryProfileTimeline` in torch/profiler/_memory_profiler.py.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

use super::error::Failure;
use super::input::Input;
use super::json;
use super::values::{EachSeed, Numbers, NumbersSeed};
use crate::Trace;
use crate::totals::{CategoryTotal, Totals, TotalsSource};

/// The categories, in the order of their numbers in both forms.
const CATEGORIES: [&str; 8] = [
    "parameters",
    "optimizer state",
    "inputs",
    "temporaries",
    "activations",
    "gradients",
    "details of autograd",
    "unknown",
];

/// Follows the bytes over time and keeps those at the peak.
#[derive(Default)]
struct Peak {
    entries: u64,
    peak_bytes: i128,
    sizes: [i128; CATEGORIES.len()],
    end_bytes: i128,
}

impl Peak {
    fn see(&mut self, sizes: &[i128]) {
        self.entries += 1;
        self.end_bytes = sizes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes));
        if self.end_bytes > self.peak_bytes {
            self.peak_bytes = self.end_bytes;
            self.sizes.copy_from_slice(sizes);
        }
    }

    fn into_trace(self, source: TotalsSource, duration_us: Option<u64>) -> Trace {
        let whole = |bytes: i128| u64::try_from(bytes.max(0)).unwrap_or(u64::MAX);
        let category = |(name, bytes): (&&'static str, i128)| CategoryTotal {
            category: name,
            bytes: whole(bytes),
        };
        let mut categories: Vec<CategoryTotal> =
            CATEGORIES.iter().zip(self.sizes).map(category).collect();
        categories.retain(|one| one.bytes > 0);
        categories.sort_by_key(|one| std::cmp::Reverse(one.bytes));
        let totals = Totals {
            entries: self.entries,
            peak_allocated_bytes: Some(whole(self.peak_bytes)),
            end_allocated_bytes: Some(whole(self.end_bytes)),
            duration_us,
            categories,
            ..Totals::of(source)
        };
        Trace { entries: self.entries, totals: Some(totals), ..Trace::default() }
    }
}

/// Reads `[times, sizes]`.
pub(super) fn parse(input: &mut Input<'_>) -> Result<Trace, Failure> {
    let decoded = Cell::new(0);
    json::parse_as(input, &decoded, "the timeline", Timeline)
}

struct Timeline;

impl<'de> DeserializeSeed<'de> for Timeline {
    type Value = Trace;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Trace, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Timeline {
    type Value = Trace;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of times and a list of sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Trace, A::Error> {
        let short = || A::Error::custom("expected a list of times and a list of sizes");
        let times = items.next_element_seed(NumbersSeed::<1>)?.ok_or_else(short)?;
        let mut peak = Peak::default();
        let see = |row: &Numbers<{ CATEGORIES.len() + 1 }>| {
            if row.len != row.first.len() as u64 || !row.is_whole {
                return Err(format!(
                    "expected the bytes of 8 categories after a zero, found {} numbers",
                    row.len
                ));
            }
            peak.see(&row.first[1..]);
            Ok(())
        };
        items.next_element_seed(EachSeed(see))?.ok_or_else(short)?;
        if items.next_element::<IgnoredAny>()?.is_some() {
            return Err(short());
        }
        if times.len == 0 {
            return Err(A::Error::custom("the timeline has no times"));
        }
        if times.len != peak.entries {
            let text = format!(
                "expected as many sizes as times, found {} and {}",
                peak.entries, times.len
            );
            return Err(A::Error::custom(text));
        }
        let duration_us = times.last.checked_sub(times.first[0]);
        let duration_us = duration_us.and_then(|duration| u64::try_from(duration).ok());
        Ok(peak.into_trace(TotalsSource::MemoryTimeline, duration_us))
    }
}

/// Reads a list of changes.
pub(super) fn parse_changes(input: &mut Input<'_>) -> Result<Trace, Failure> {
    let (mut peak, mut now) = (Peak::default(), [0_i128; CATEGORIES.len()]);
    let mut times: Option<(i128, i128)> = None;
    let see = |change: &Numbers<4>| {
        let [time_ns, _action, bytes, category] = change.first;
        let place = usize::try_from(category).ok().and_then(|at| now.get_mut(at));
        let Some(place) = place.filter(|_| change.len == 4 && change.is_whole) else {
            return Err("expected a time, an action, bytes and a category from 0 to 7".to_owned());
        };
        *place = place.saturating_add(bytes);
        peak.see(&now);
        if time_ns >= 0 {
            times = Some((times.map_or(time_ns, |(first, _)| first), time_ns));
        }
        Ok(())
    };
    json::parse_as(input, &Cell::new(0), "the timeline", EachSeed(see))?;
    let duration_us = times.and_then(|(first, last)| last.checked_sub(first));
    let duration_us = duration_us.and_then(|ns| u64::try_from(ns / 1000).ok());
    Ok(peak.into_trace(TotalsSource::RawMemoryTimeline, duration_us))
}
