//! The layers of the time line, in the format of the page.

use serde::Serialize;

use super::tables::packed;
use stratalloc_analysis::Layers;
use stratalloc_analysis::lives::{Lives, differences};

/// The names of the layers, and what assigns the blocks to them.
#[derive(Serialize)]
pub(crate) struct LayersData {
    category: Vec<String>,
    line: Vec<String>,
    stream: Vec<String>,
    step: Vec<String>,
    /// The moments between the layers of steps.
    step_bounds: Vec<u32>,
    /// The moments between the steps.
    step_ends: Vec<u32>,
    /// The layers at the peaks of columns, if the page does not have every block.
    series: Option<SeriesData>,
}

/// Packed differences.
#[derive(Serialize)]
struct SeriesData {
    /// The first moment of each column.
    start: String,
    /// The moment of each column with its most live bytes.
    at: String,
    /// The live bytes of each layer at these moments.
    category: Vec<String>,
    line: Vec<String>,
    stream: Vec<String>,
    step: Vec<String>,
}

impl LayersData {
    pub(crate) fn of(layers: &Layers, lives: &Lives, is_short: bool, most: usize) -> Self {
        let [category, line, stream, step] = layers.names.clone();
        let (step_bounds, step_ends) = (layers.step_bounds.clone(), layers.step_ends.clone());
        let series = is_short.then(|| SeriesData::of(layers, lives, most));
        Self { category, line, stream, step, step_bounds, step_ends, series }
    }
}

impl SeriesData {
    fn of(layers: &Layers, lives: &Lives, most: usize) -> Self {
        let series = layers.series(lives, most);
        let moments = |all: &[u32]| differenced(all.iter().map(|moment| u64::from(*moment)));
        let of = |layers: &Vec<Vec<u64>>| {
            layers.iter().map(|layer| differenced(layer.iter().copied())).collect()
        };
        let [category, line, stream, step] = series.bytes.each_ref().map(of);
        let (start, at) = (moments(&series.start), moments(&series.at));
        Self { start, at, category, line, stream, step }
    }
}

fn differenced(numbers: impl Iterator<Item = u64>) -> String {
    packed(differences(numbers).into_iter())
}
