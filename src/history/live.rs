//! Live bytes by the call stack that allocated them.

use std::cmp::Reverse;
use std::fmt;
#[cfg(feature = "stacks")]
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::clock::Moment;
use super::context::{Context, Frame};
use super::event::Action;
use super::options::{RecordOptions, StackLevel};
use super::record::{History, Holder};
use crate::error::LiveBytes;
use crate::size::human_bytes;

/// The most stacks whose frames are looked up for one report, starting with those that have the most
/// bytes. The lookup is user code and may take microseconds for each stack.
const STACKS_MAX: usize = 2000;

/// Live blocks at one moment, grouped by call stack (*holder*).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveReport {
    /// The sum of the requested sizes, in bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The largest holders, at most 16, largest first. Blocks without a known stack form one holder
    /// without frames.
    pub holders: Vec<LiveBytes>,
    /// The number of holders that are not listed.
    pub others: u64,
    /// The bytes of the holders that are not listed.
    pub others_bytes: u64,
    /// The blocks of the holders that are not listed.
    pub others_blocks: u64,
}

impl LiveReport {
    /// The most holders listed.
    pub(crate) const HOLDERS_MAX: usize = 16;
    /// The most frames listed for each holder.
    pub(crate) const FRAMES_MAX: usize = 8;
}

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = |bytes, blocks| {
            let plural = if blocks == 1 { "block" } else { "blocks" };
            format!("{} in {blocks} {plural}", human_bytes(bytes))
        };
        write!(f, "{}", held(self.bytes, self.blocks))?;
        self.holders.iter().try_for_each(|holder| write!(f, "\n  {holder}"))?;
        match self.others {
            0 => Ok(()),
            1 => write!(f, "\n  {} of 1 other", held(self.others_bytes, self.others_blocks)),
            others => {
                let held = held(self.others_bytes, self.others_blocks);
                write!(f, "\n  {held} of {others} others")
            }
        }
    }
}

/// Called with the live blocks when the history is dropped. No allocator is left then that could free
/// them.
pub type LeakReporter = Box<dyn Fn(&LiveReport) + Send + Sync>;

/// The function that is called with leaks, if one was set.
#[derive(Default)]
pub(super) struct Leaks(Mutex<Option<LeakReporter>>);

impl fmt::Debug for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaks").field("has_reporter", &self.0.lock().is_some()).finish()
    }
}

impl History {
    /// Returns the live blocks that were allocated while stacks were gathered, grouped by call stack.
    /// Looks up the frames of each stack, which may take milliseconds the first time. Holds no lock
    /// during the lookup.
    #[must_use]
    pub fn live(&self) -> LiveReport {
        let (mut holders, mut others) = self.holders(LiveReport::FRAMES_MAX, |_| true);
        others.extend(holders.split_off(holders.len().min(LiveReport::HOLDERS_MAX)));
        let sum = |of: &[LiveBytes]| {
            of.iter()
                .fold((0, 0), |(bytes, blocks), live| (bytes + live.bytes, blocks + live.blocks))
        };
        let ((bytes, blocks), (others_bytes, others_blocks)) = (sum(&holders), sum(&others));
        LiveReport {
            bytes: bytes + others_bytes,
            blocks: blocks + others_blocks,
            holders,
            others: others.len() as u64,
            others_bytes,
            others_blocks,
        }
    }

    /// Gathers stacks of live blocks from now on. Uses `RustStacks` (feature `stacks`) if the program
    /// set no provider. If recording is off, starts it, but without recording entries.
    pub(crate) fn remember_live_blocks(&self) {
        #[cfg(feature = "stacks")]
        self.sources.provider.write().get_or_insert_with(|| Arc::new(super::RustStacks::new()));
        if !self.is_on() {
            let nothing = RecordOptions::at_most(1).without(&Action::ALL);
            self.start(&nothing.with_stacks(StackLevel::OfLiveBlocks));
        } else if self.stacks() == StackLevel::Never {
            self.gather_from(StackLevel::OfLiveBlocks);
        }
    }

    /// Sets a function that is called when this history is dropped, with the blocks that are still
    /// live, if there are any. No allocator is left then that could free them.
    pub fn report_leaks(&self, reporter: LeakReporter) {
        let before = self.leaks.0.lock().replace(reporter);
        drop(before);
    }

    /// Removes the stack provider because the provider is about to end, as an interpreter does at
    /// process exit. If [leaks](Self::report_leaks) will be reported, live blocks keep the frames of
    /// their stacks. If not, recording stops. All entries are dropped. Holds no lock while it looks up
    /// frames.
    pub fn drop_stack_provider(&self) {
        self.set_stack_provider(None);
        if self.leaks.0.lock().is_none() {
            self.stop();
            return;
        }
        let mut known = HashMap::new();
        self.rename_holders(|context| context.with_names(&mut known));
        self.clear();
    }

    /// Calls the [reporter](Self::report_leaks) with the live blocks, if there are any.
    pub(crate) fn report_leaks_at_end(&self) {
        // The reporter is user code: it must run without the lock.
        let Some(reporter) = self.leaks.0.lock().take() else { return };
        let live = self.live();
        if live.blocks > 0 {
            reporter(&live);
        }
    }

    /// Returns the holders of those live blocks for which `wanted` returns true, largest first, with at
    /// most `frames_max` frames each. The second list has the holders beyond [`STACKS_MAX`], without
    /// frames. Holds no lock while it looks up frames.
    pub(super) fn holders(
        &self,
        frames_max: usize,
        wanted: impl Fn(&Holder) -> bool,
    ) -> (Vec<LiveBytes>, Vec<LiveBytes>) {
        let now = Moment::now();
        let mut by_context: HashMap<_, (LiveBytes, _)> = HashMap::new();
        for holder in self.live_blocks().into_iter().filter(wanted) {
            let live = LiveBytes {
                bytes: holder.size_bytes,
                blocks: 1,
                oldest: now.since(holder.moment),
                frames: Vec::new(),
            };
            let key = holder.context.as_ref().map(Context::frames_key);
            let known = by_context.entry(key);
            let (all, _) = known.or_insert_with(|| (LiveBytes::default(), holder.context));
            add(all, &live);
        }
        let mut by_context: Vec<_> = by_context.into_values().collect();
        by_context.sort_by_key(|(live, _)| Reverse(live.bytes));
        let small = by_context.split_off(by_context.len().min(STACKS_MAX));
        // Different stacks may have equal frames. Their blocks form one holder.
        let mut by_frames: HashMap<Vec<Frame>, LiveBytes> = HashMap::new();
        for (live, context) in by_context {
            let frames = context.as_ref().map(Context::frames).unwrap_or_default();
            add(by_frames.entry(frames).or_default(), &live);
        }
        let listed = by_frames.into_iter().map(|(frames, live)| LiveBytes {
            frames: frames.iter().take(frames_max).map(Frame::to_string).collect(),
            ..live
        });
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by(|a, b| (Reverse(a.bytes), &a.frames).cmp(&(Reverse(b.bytes), &b.frames)));
        let others = small.into_iter().map(|(live, _)| live).collect();
        self.release();
        (listed, others)
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.report_leaks_at_end();
    }
}

fn add(all: &mut LiveBytes, more: &LiveBytes) {
    all.bytes += more.bytes;
    all.blocks += more.blocks;
    all.oldest = all.oldest.max(more.oldest);
}
