//! The output of `advise`, as data for the page. The sentences come from `analysis`.

use serde::Serialize;

use stratalloc_analysis::curves::NeedData;
use stratalloc_analysis::{Advice, Choice, Picture, Recording, Streams, Why, heap_name};

/// The setting to make, and the causes of reserved memory.
#[derive(Debug, Default, Serialize)]
pub(crate) struct AdviceData {
    /// The setting to make. If settings were not searched, the command that does so.
    pub sentence: String,
    pub is_searched: bool,
    /// For each allocator: its name, the variable with its value, and the need with this setting.
    pub set: Vec<(String, String, String)>,
    pub limit: Option<String>,
    pub searched: Option<String>,
    /// The data that the recording lacks, each with the option that supplies it.
    pub unknown: Vec<&'static str>,
    pub pictures: Vec<PictureData>,
}

/// The reserved bytes at one moment, by cause.
#[derive(Debug, Serialize)]
pub(crate) struct PictureData {
    pub name: &'static str,
    pub sentence: String,
    pub causes: Vec<&'static str>,
    /// The bytes of each cause.
    pub all: Vec<u64>,
    /// For each stream of each pool: its name, the bytes of each cause, and the largest free block.
    pub heaps: Vec<(String, Vec<u64>, u64)>,
}

/// The need of the recording under each setting.
#[derive(Debug, Default, Serialize)]
pub(crate) struct NeedsData {
    /// The reason why there are no needs, if there are none.
    pub missing: Option<String>,
    pub(crate) points: usize,
    pub rows: Vec<NeedData>,
}

/// The maximum number of streams and pools listed.
const HEAPS: usize = 64;

impl PictureData {
    pub(crate) fn of(picture: &Picture, streams: &Streams) -> Self {
        let bytes =
            |causes: &stratalloc_analysis::Causes| causes.rows().map(|(_, bytes)| bytes).to_vec();
        let heaps = picture.heaps.iter().take(HEAPS);
        Self {
            name: picture.moment.name(),
            sentence: picture.sentence(streams),
            causes: picture.causes.rows().map(|(name, _)| name).to_vec(),
            all: bytes(&picture.causes),
            heaps: heaps
                .map(|heap| (heap_name(heap), bytes(&heap.causes), heap.largest_free_bytes))
                .collect(),
        }
    }
}

impl AdviceData {
    pub(crate) fn of(recording: &Recording, advice: &Advice, why: &Why) -> Self {
        let choices = advice.choices(recording).into_iter();
        let searched = advice.searched();
        let cut_short =
            if advice.is_cut_short { "; time ran out before all were tried" } else { "" };
        Self {
            sentence: advice.sentence_with_holder(recording, why),
            is_searched: true,
            set: choices.map(|Choice { allocator, set, needs }| (allocator, set, needs)).collect(),
            limit: recording.limit_sentence(),
            searched: Some(format!("{searched}{cut_short}.")),
            unknown: advice.unknown(recording),
            pictures: why.pictures().map(|p| PictureData::of(p, &why.streams)).collect(),
        }
    }
}
