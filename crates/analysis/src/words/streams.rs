//! The names of streams: handles are addresses, which differ from run to run.

use std::collections::HashSet;

use schemars::JsonSchema;
use serde::Serialize;

use stratalloc::ids::StreamId;

/// The number of a stream in names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StreamNumber {
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    #[schemars(with = "u64")]
    pub stream: StreamId,
    /// 0 for the default stream; the others are numbered from 1 on, in the order of their first use.
    pub number: u32,
}

/// The numbers of the streams of a recording, ordered by handle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StreamNumbers(Vec<StreamNumber>);

impl StreamNumbers {
    /// Numbers streams, which are in the order of their first use.
    pub(crate) fn of(streams: impl IntoIterator<Item = StreamId>) -> Self {
        let mut known = HashSet::from([StreamId::DEFAULT]);
        let others = streams.into_iter().filter(|stream| known.insert(*stream));
        let others = others.zip(1..).map(|(stream, number)| StreamNumber { stream, number });
        let default = StreamNumber { stream: StreamId::DEFAULT, number: 0 };
        let mut all: Vec<_> = [default].into_iter().chain(others).collect();
        all.sort_unstable_by_key(|one| one.stream);
        Self(all)
    }

    /// Returns the name of a stream, such as `stream 1`.
    #[must_use]
    pub fn name(&self, stream: StreamId) -> String {
        format!("stream {}", self.label(stream))
    }

    /// Returns the number of a stream as text; its handle, if it has no number.
    #[must_use]
    pub fn label(&self, stream: StreamId) -> String {
        match self.0.binary_search_by_key(&stream, |one| one.stream) {
            Ok(at) => self.0[at].number.to_string(),
            Err(_) => format!("{:#x}", stream.0),
        }
    }

    /// Returns true if there are streams besides the default stream.
    #[must_use]
    pub fn has_several(&self) -> bool {
        self.0.len() > 1
    }

    /// Returns the handles of the streams as a sentence; `None` if there is only the default stream.
    #[must_use]
    pub fn handles_sentence(&self) -> Option<String> {
        let mut others: Vec<_> = self.0.iter().filter(|one| one.number > 0).collect();
        others.sort_unstable_by_key(|one| one.number);
        let others =
            others.iter().map(|one| format!("stream {} is {:#x}", one.number, one.stream.0));
        let others: Vec<String> = others.collect();
        (!others.is_empty()).then(|| format!("Handles: {}.", others.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_stream_is_number_0_and_the_others_are_numbered_in_the_order_of_use() {
        let numbers = StreamNumbers::of([9, 0, 7, 9].map(StreamId));
        let names = [0, 7, 9, 8].map(|handle| numbers.name(StreamId(handle)));
        assert_eq!(names, ["stream 0", "stream 2", "stream 1", "stream 0x8"]);
        let sentence = "Handles: stream 1 is 0x9, stream 2 is 0x7.";
        assert_eq!(numbers.handles_sentence().as_deref(), Some(sentence));
        assert_eq!(StreamNumbers::of([StreamId(0)]).handles_sentence(), None);
    }
}
