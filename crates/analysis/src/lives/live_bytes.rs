//! The live bytes at each moment of a recording.

use super::{Block, Lives};

/// The live bytes at each moment, in six bytes each: long logs have millions of moments. Larger sums than
/// 2^47 bytes are reduced to it.
pub(crate) struct LiveBytes {
    low: Vec<u32>,
    high: Vec<i16>,
}

/// The largest sum.
const MOST_BYTES: i64 = (1 << 47) - 1;

impl LiveBytes {
    /// Returns those of the blocks for which `is_counted` returns true.
    pub(crate) fn of(lives: &Lives, is_counted: impl Fn(&Block) -> bool) -> Self {
        let moments = lives.events as usize + 1;
        let mut all = Self { low: vec![0; moments], high: vec![0; moments] };
        for block in lives.blocks.iter().filter(|block| is_counted(block)) {
            let bytes = i64::try_from(block.requested_bytes).unwrap_or(MOST_BYTES);
            all.change(block.born, bytes);
            all.change(block.freed, -bytes);
        }
        let mut live = 0_i64;
        for at in 0..moments {
            live = live.saturating_add(all.number(at));
            all.set(at, live.max(0));
        }
        all
    }

    /// Returns the live bytes at a moment, 0 after the last one.
    pub(crate) fn at(&self, moment: u32) -> u64 {
        let at = moment as usize;
        if at < self.low.len() { u64::try_from(self.number(at)).unwrap_or(0) } else { 0 }
    }

    /// Returns the peak of these moments.
    pub(crate) fn peak(&self, moments: impl Iterator<Item = u32>) -> u64 {
        moments.map(|moment| self.at(moment)).max().unwrap_or(0)
    }

    fn change(&mut self, moment: u32, bytes: i64) {
        let at = moment as usize;
        if at < self.low.len() {
            self.set(at, self.number(at).saturating_add(bytes));
        }
    }

    fn number(&self, at: usize) -> i64 {
        i64::from(self.high[at]) << 32 | i64::from(self.low[at])
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "two parts")]
    fn set(&mut self, at: usize, bytes: i64) {
        let bytes = bytes.clamp(-MOST_BYTES, MOST_BYTES);
        self.low[at] = bytes as u32;
        self.high[at] = (bytes >> 32) as i16;
    }
}
