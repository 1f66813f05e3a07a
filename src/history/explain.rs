//! What a history adds to the report of a request that failed: the configuration, and who holds the memory.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::clock::Moment;
use super::context::{Context, Frame};
use super::record::History;
use crate::error::{LiveBytes, OutOfMemory};

/// Frames of a holder that are told.
const FRAMES_MAX: usize = 4;

impl History {
    /// Adds the configuration in force, and the largest holders of live bytes if stacks are recorded. Holds
    /// no lock while frames are looked up.
    #[cold]
    pub(crate) fn explain(&self, report: &mut OutOfMemory) {
        let text = self.about().config.to_text();
        report.configuration = Some(text).filter(|text| !text.is_empty());
        let now = Moment::now();
        let mut by_context: HashMap<usize, (LiveBytes, Context)> = HashMap::new();
        for holder in self.live_blocks() {
            let Some(context) = holder.context else { continue };
            let known = by_context.entry(context.frames_number());
            let (live, _) = known.or_insert_with(|| (LiveBytes::default(), context));
            live.bytes += holder.size_bytes;
            live.blocks += 1;
            live.oldest = live.oldest.max(now.since(holder.moment));
        }
        // Stacks that were gathered twice may be equal: they are told as one.
        let mut by_frames: HashMap<Vec<Frame>, LiveBytes> = HashMap::new();
        for (live, context) in by_context.into_values() {
            let all = by_frames.entry(context.frames()).or_default();
            all.bytes += live.bytes;
            all.blocks += live.blocks;
            all.oldest = all.oldest.max(live.oldest);
        }
        let told = by_frames.into_iter().map(|(frames, live)| LiveBytes {
            frames: frames.iter().take(FRAMES_MAX).map(Frame::to_string).collect(),
            ..live
        });
        report.live = told.collect();
        report
            .live
            .sort_by(|a, b| (Reverse(a.bytes), &a.frames).cmp(&(Reverse(b.bytes), &b.frames)));
        report.live.truncate(OutOfMemory::LIVE_MAX);
        self.release();
    }
}
