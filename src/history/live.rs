//! Who holds memory: live blocks by who asked for them.

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

/// Stacks whose names are looked up for one report, those with the most bytes. Names are foreign code's, and
/// may take microseconds a stack.
const STACKS_MAX: usize = 2000;

/// Live blocks as of one moment, by who asked for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveReport {
    /// What was asked for, in bytes.
    pub bytes: u64,
    /// How many blocks.
    pub blocks: u64,
    /// The largest holders, the largest first; at most 16. Blocks of which
    /// nobody knows who asked have no frames.
    pub holders: Vec<LiveBytes>,
    /// How many others there are.
    pub others: u64,
    /// What those hold together.
    pub others_bytes: u64,
    /// In so many blocks.
    pub others_blocks: u64,
}

impl LiveReport {
    /// The most holders that are told one by one.
    pub(crate) const HOLDERS_MAX: usize = 16;
    /// The most frames that are told of each.
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

/// Told what lives when nobody can give it back any more.
pub type LeakReporter = Box<dyn Fn(&LiveReport) + Send + Sync>;

/// Who is told of leaks.
#[derive(Default)]
pub(super) struct Leaks(Mutex<Option<LeakReporter>>);

impl fmt::Debug for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaks").field("told", &self.0.lock().is_some()).finish()
    }
}

impl History {
    /// Who holds live blocks now: those that were asked for while stacks were gathered. Looks up the names of
    /// each stack, which may take milliseconds the first time. Holds no lock meanwhile.
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

    /// Gathers stacks of live blocks from now on, those of the program itself unless somebody chose where
    /// stacks come from. A history that is off records nothing else.
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

    /// Tells `reporter` what lives when this history goes, if anything does: then no allocator is left that
    /// could take it back.
    pub fn report_leaks(&self, reporter: LeakReporter) {
        let before = self.leaks.0.lock().replace(reporter);
        drop(before);
    }

    /// Asks the stack provider no more, because it is about to go, as an interpreter does at its end. If
    /// [leaks](Self::report_leaks) are to be told, live blocks keep the names of their stacks; all that was
    /// recorded is forgotten. Looks names up, and holds no lock meanwhile.
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

    /// Tells the [reporter](Self::report_leaks) what lives now, if anything does.
    pub(crate) fn tell_leaks(&self) {
        // Nobody runs foreign code under the lock.
        let Some(reporter) = self.leaks.0.lock().take() else { return };
        let live = self.live();
        if live.blocks > 0 {
            reporter(&live);
        }
    }

    /// Holders of live blocks that are `wanted`, the largest first, each with so many frames; and those whose
    /// stacks are not looked up, because there are more than [`STACKS_MAX`]. Holds no lock while frames are
    /// looked up.
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
            let asked = holder.context.as_ref().map(Context::asked);
            let known = by_context.entry(asked);
            let (all, _) = known.or_insert_with(|| (LiveBytes::default(), holder.context));
            add(all, &live);
        }
        let mut by_context: Vec<_> = by_context.into_values().collect();
        by_context.sort_by_key(|(live, _)| Reverse(live.bytes));
        let small = by_context.split_off(by_context.len().min(STACKS_MAX));
        // Stacks that were gathered twice may be equal: they are told as one.
        let mut by_frames: HashMap<Vec<Frame>, LiveBytes> = HashMap::new();
        for (live, context) in by_context {
            let frames = context.as_ref().map(Context::frames).unwrap_or_default();
            add(by_frames.entry(frames).or_default(), &live);
        }
        let told = by_frames.into_iter().map(|(frames, live)| LiveBytes {
            frames: frames.iter().take(frames_max).map(Frame::to_string).collect(),
            ..live
        });
        let mut told: Vec<_> = told.collect();
        told.sort_by(|a, b| (Reverse(a.bytes), &a.frames).cmp(&(Reverse(b.bytes), &b.frames)));
        let others = small.into_iter().map(|(live, _)| live).collect();
        self.release();
        (told, others)
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.tell_leaks();
    }
}

fn add(all: &mut LiveBytes, more: &LiveBytes) {
    all.bytes += more.bytes;
    all.blocks += more.blocks;
    all.oldest = all.oldest.max(more.oldest);
}
