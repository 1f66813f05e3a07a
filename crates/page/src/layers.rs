//! The layers of the time line, in the format of the page.

use serde::Serialize;

use super::tables::differenced;
use stratalloc_analysis::Layers;
use stratalloc_analysis::lives::Lives;

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

/// The live bytes of each layer at the peaks of the columns, as packed differences.
#[derive(Serialize)]
struct SeriesData {
    category: Vec<String>,
    line: Vec<String>,
    stream: Vec<String>,
    step: Vec<String>,
}

impl LayersData {
    /// Returns the data. With `columns`, the page does not have every block.
    pub(crate) fn of(layers: &Layers, lives: &Lives, columns: Option<usize>) -> Self {
        let [category, line, stream, step] = layers.names.clone();
        let (step_bounds, step_ends) = (layers.step_bounds.clone(), layers.step_ends.clone());
        let series = columns.map(|most| SeriesData::of(layers, lives, most));
        Self { category, line, stream, step, step_bounds, step_ends, series }
    }
}

impl SeriesData {
    fn of(layers: &Layers, lives: &Lives, most: usize) -> Self {
        let of = |layers: Vec<Vec<u64>>| {
            layers.into_iter().map(|layer| differenced(layer.into_iter())).collect()
        };
        let [category, line, stream, step] = layers.series(lives, most).map(of);
        Self { category, line, stream, step }
    }
}
