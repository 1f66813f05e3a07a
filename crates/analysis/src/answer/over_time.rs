//! Live and reserved bytes over the events of a recording, for a small chart.

use schemars::JsonSchema;
use serde::Serialize;

use crate::lives::Lives;

/// The most columns of [`OverTime`].
pub(crate) const CHART_COLUMNS: usize = 64;

/// Live and reserved bytes over the events of a recording, in at most 64 columns with equally many events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OverTime {
    /// The number of events.
    pub events: u32,
    /// For each column the most live bytes in it.
    pub live_max_bytes: Vec<u64>,
    /// For each column the most reserved bytes in it.
    pub reserved_max_bytes: Vec<u64>,
    /// The columns with requests that failed, from 0 on.
    pub failed_columns: Vec<usize>,
}

impl OverTime {
    /// Returns the columns of lifetimes; `None` if there are no events.
    pub(super) fn of(lives: &Lives) -> Option<Self> {
        let columns = &lives.columns;
        let mut failed_columns: Vec<usize> =
            lives.failures.iter().map(|failure| columns.of(failure.moment)).collect();
        failed_columns.dedup();
        (lives.events > 0).then(|| Self {
            events: lives.events,
            live_max_bytes: columns.columns.iter().map(|one| one.live_max_bytes).collect(),
            reserved_max_bytes: columns.columns.iter().map(|one| one.reserved_max_bytes).collect(),
            failed_columns,
        })
    }
}
