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
        let differenced = |layer: &Vec<u64>| packed(differences(layer.iter().copied()).into_iter());
        let of = |layers: Vec<Vec<u64>>| layers.iter().map(differenced).collect();
        let [category, line, stream, step] = layers.series(lives, most).map(of);
        Self { category, line, stream, step }
    }
}
