//! Live and reserved bytes over the events of a recording, reduced to columns that keep every peak. A
//! *moment* is the number of events that have happened so far.

/// The bytes between two moments: minimum, maximum and last values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The first moment of the column.
    pub first: u32,
    /// The time of the first moment, in microseconds of the recorded machine's clock.
    pub time_us: u64,
    /// The least live bytes.
    pub live_min_bytes: u64,
    /// The most live bytes.
    pub live_max_bytes: u64,
    /// The live bytes at the end of the column.
    pub live_last_bytes: u64,
    /// The least reserved bytes.
    pub reserved_min_bytes: u64,
    /// The most reserved bytes.
    pub reserved_max_bytes: u64,
    /// The reserved bytes at the end of the column.
    pub reserved_last_bytes: u64,
    /// The maximum of reserved bytes and bytes of paused tags together.
    pub total_max_bytes: u64,
    /// The bytes of paused tags at the end of the column.
    pub paused_last_bytes: u64,
    /// The first moment at which the live bytes of this column are at their maximum.
    pub live_peak_at: u32,
}

impl Column {
    /// Merges the next column into this one.
    fn take_in(&mut self, next: &Self) {
        if next.live_max_bytes > self.live_max_bytes {
            self.live_max_bytes = next.live_max_bytes;
            self.live_peak_at = next.live_peak_at;
        }
        self.live_min_bytes = self.live_min_bytes.min(next.live_min_bytes);
        self.live_last_bytes = next.live_last_bytes;
        self.reserved_max_bytes = self.reserved_max_bytes.max(next.reserved_max_bytes);
        self.reserved_min_bytes = self.reserved_min_bytes.min(next.reserved_min_bytes);
        self.reserved_last_bytes = next.reserved_last_bytes;
        self.total_max_bytes = self.total_max_bytes.max(next.total_max_bytes);
        self.paused_last_bytes = next.paused_last_bytes;
    }
}

/// The bytes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    pub live: u64,
    pub reserved: u64,
    /// Bytes of paused tags, which are not reserved.
    pub paused: u64,
}

/// All moments of a recording, divided into columns of equal width. Each keeps its minimum, maximum and
/// last values.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// The number of moments.
    pub moments: u64,
    /// The number of columns.
    count: u64,
    /// The live and reserved bytes over time.
    pub columns: Vec<Column>,
    /// The time of the first event that has one; 0 if none has.
    pub begin_us: u64,
    /// The time of the last event that has one, in microseconds.
    pub end_us: u64,
}

impl Columns {
    /// Creates at most `most` columns for the moments from 0 to `last`.
    pub fn new(most: usize, last: u32) -> Self {
        let moments = u64::from(last) + 1;
        Self { moments, count: moments.min(most.max(1) as u64), ..Self::default() }
    }

    /// Returns the index of the column that contains a moment.
    pub fn of(&self, moment: u32) -> usize {
        let at = u64::from(moment) * self.count / self.moments.max(1);
        usize::try_from(at).unwrap_or(0)
    }

    /// Adds a moment. Moments must be added in order.
    pub fn see(&mut self, moment: u32, time_us: u64, bytes: Bytes) {
        // If a time is missing or earlier than the previous one, the previous time is used.
        if time_us > 0 {
            if self.begin_us == 0 {
                self.begin_us = time_us;
                self.end_us = time_us;
                self.columns.iter_mut().for_each(|column| column.time_us = time_us);
            }
            self.end_us = self.end_us.max(time_us);
        }
        let time_us = self.end_us;
        let one = Column {
            first: moment,
            time_us,
            live_min_bytes: bytes.live,
            live_max_bytes: bytes.live,
            live_last_bytes: bytes.live,
            reserved_min_bytes: bytes.reserved,
            reserved_max_bytes: bytes.reserved,
            reserved_last_bytes: bytes.reserved,
            total_max_bytes: bytes.reserved.saturating_add(bytes.paused),
            paused_last_bytes: bytes.paused,
            live_peak_at: moment,
        };
        let is_new = self.of(moment) >= self.columns.len();
        match self.columns.last_mut().filter(|_| !is_new) {
            Some(column) => column.take_in(&one),
            None => self.columns.push(one),
        }
    }
}

/// Merges columns until at most `most` remain. Minimum, maximum and last values are kept.
pub fn fewer(columns: &[Column], most: usize) -> Vec<Column> {
    if columns.len() <= most.max(1) {
        return columns.to_vec();
    }
    let each = columns.len().div_ceil(most.max(1));
    let joined = columns.chunks(each).map(|part| {
        let mut one = part[0];
        part[1..].iter().for_each(|column| one.take_in(column));
        one
    });
    joined.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_of_one_event_among_a_million_is_kept() {
        let last = 1_000_000;
        let mut columns = Columns::new(1000, last);
        for moment in 0..=last {
            let bytes = if moment == 654_321 { 99_000 } else { u64::from(moment % 7) };
            let bytes = Bytes { live: bytes, reserved: 2 * bytes, paused: 0 };
            columns.see(moment, u64::from(moment) + 5, bytes);
        }
        assert_eq!(columns.columns.len(), 1000);
        let column = columns.columns[columns.of(654_321)];
        assert_eq!((column.live_max_bytes, column.reserved_max_bytes), (99_000, 198_000));
        assert_eq!((column.live_peak_at, column.live_min_bytes), (654_321, 0));
        assert_eq!((columns.begin_us, columns.end_us), (5, 1_000_005));
        let less = fewer(&columns.columns, 10);
        assert_eq!(less.len(), 10);
        assert_eq!(less.iter().map(|column| column.live_max_bytes).max(), Some(99_000));
        assert_eq!(less[9].live_last_bytes, columns.columns[999].live_last_bytes);
    }

    #[test]
    fn a_short_recording_has_a_column_for_each_moment() {
        let mut columns = Columns::new(1000, 2);
        let bytes = |moment| Bytes { live: u64::from(moment), reserved: 8, paused: 0 };
        (0..=2).for_each(|moment| columns.see(moment, 0, bytes(moment)));
        let live: Vec<_> = columns.columns.iter().map(|c| c.live_last_bytes).collect();
        assert_eq!((live, columns.end_us), (vec![0, 1, 2], 0));
    }
}
