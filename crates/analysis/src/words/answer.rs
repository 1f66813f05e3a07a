//! The sentences and texts about an [`Answer`].

use super::{BESIDES, BESIDES_ON_ROCM, ON_ROCM, Sentences, counted_as, grouped, near, need_in_mib};
use crate::answer::{Answer, HolderList, MainCauses, MomentCauses, Setting};
use crate::verdict::LivePeak;
use stratalloc_recording::Totals;

/// The end of the result if time ran out.
const OUT_OF_TIME: &str =
    "Time ran out before all settings were searched: --seconds sets how long it takes.";

impl Answer {
    /// Returns the moments whose reserved bytes are explained, the most important one first.
    pub fn explained(&self) -> impl Iterator<Item = &MomentCauses> {
        let main = self.causes.iter().map(|causes| &causes.main);
        let at = |causes: &MainCauses| causes.main.events;
        let reserved = self.causes.iter().filter_map(move |causes| {
            causes.peak_reserved.as_ref().filter(|reserved| reserved.events != at(causes))
        });
        main.chain(reserved)
    }

    /// Returns a sentence about the memory that a device needs in addition to the recorded memory.
    #[must_use]
    pub fn besides(&self) -> &'static str {
        if self.platform.is_some() { BESIDES_ON_ROCM } else { BESIDES }
    }

    /// Returns a sentence about the platform, if settings depend on it.
    #[must_use]
    pub fn platform_sentence(&self) -> Option<&'static str> {
        self.platform.map(|_| ON_ROCM)
    }

    /// Returns the kind of the result and its sentences. Growth from step to step precedes the settings if it
    /// decides: no setting stops it. So does a sentence about private pools, if most of the memory that is
    /// not live is free in them: no setting releases it, and one pool for graphs saves more than a setting.
    pub(crate) fn result(&self) -> (&'static str, Sentences) {
        let growth = self.growth.as_ref().filter(|growth| growth.is_decisive);
        let name = growth.map_or(self.verdict.name(), |_| "growth");
        let growth = growth.map(|growth| growth.sentence.clone());
        let cut_short = self.is_cut_short.then(|| Sentences::one(OUT_OF_TIME));
        let parts = [growth, self.pools_sentences(), Some(self.verdict.sentences()), cut_short];
        (name, parts.into_iter().flatten().fold(Sentences::default(), Sentences::then))
    }

    /// Returns sentences about free memory in private pools if it is the largest cause: at the first
    /// failure, else at the peak of reserved bytes.
    fn pools_sentences(&self) -> Option<Sentences> {
        let causes = self.causes.as_ref()?;
        let reserved = causes.peak_reserved.as_ref();
        let moment = match causes.main.failed_bytes {
            Some(_) => &causes.main,
            None => reserved.unwrap_or(&causes.main),
        };
        let of_graphs = moment.graph_pools.filter(|pools| pools.is_largest_cause);
        let of_program = moment.program_pools.filter(|pools| pools.is_largest_cause);
        let of_graphs = of_graphs.and_then(|pools| pools.sentences(moment.reserved_bytes));
        of_graphs.or_else(|| of_program?.sentences(moment.reserved_bytes))
    }

    /// Returns the totals of a file that has nothing else.
    #[must_use]
    pub fn totals_alone(&self) -> Option<&Totals> {
        self.totals.as_ref().filter(|_| self.no_history.is_some())
    }

    /// Returns how many settings were searched to the end.
    #[must_use]
    pub fn searched_count(&self) -> usize {
        self.tried.iter().filter(|setting| !setting.is_model).count()
    }

    /// Returns how many settings were searched and how many were dropped, as text.
    #[must_use]
    pub fn searched(&self) -> String {
        let searched = counted_as(self.searched_count() as u64, "setting", "settings");
        let dropped = match self.passed_over {
            0 => String::new(),
            some => format!(
                "; {} dropped because three others were already better",
                grouped(some as u64)
            ),
        };
        format!("{searched} searched to the end{dropped}")
    }

    /// Returns the peak of live bytes, with a request that failed.
    #[must_use]
    pub fn live_peak(&self) -> LivePeak {
        let served_bytes = self.causes.as_ref().and_then(|causes| causes.live_peak_bytes);
        let (bytes, served_bytes) = (self.live_peak_bytes.unwrap_or(0), served_bytes.unwrap_or(0));
        LivePeak { live_bytes: bytes, with_failed: bytes > served_bytes }
    }

    /// Without a history, returns a sentence about the request that failed, if one was recorded.
    #[must_use]
    pub fn failed_before_dump(&self) -> Option<String> {
        let bytes = self.causes.as_ref().filter(|_| self.no_history.is_some())?.main.failed_bytes?;
        Some(format!("A request of {} MiB failed before the dump.", near(bytes)))
    }

    /// Returns the beginning of a list of holders at the most important moment.
    #[must_use]
    pub fn holders_sentence(&self, holders: &HolderList) -> String {
        let blocks = counted_as(holders.blocks, "block holds", "blocks hold");
        let moment = self.causes.as_ref().map_or("moment", |causes| causes.main.moment);
        format!("At the {moment}, {blocks} {} MiB:", near(holders.requested_bytes))
    }

    /// Without a history, returns a sentence about all free ranges.
    #[must_use]
    pub fn free_sentence(&self) -> String {
        let heaps = self.causes.iter().flat_map(|causes| &causes.main.heaps);
        let largest = heaps.map(|heap| heap.largest_free_bytes).max().unwrap_or(0);
        match self.free_ranges.is_empty() {
            true => "No range is free then.".to_owned(),
            false => format!("The largest free range then has {} MiB:", near(largest)),
        }
    }
}

impl Setting {
    /// Formats the need in MiB. If the need with the luckiest order of addresses is known, adds that.
    #[must_use]
    pub fn needs_in_mib(&self) -> String {
        need_in_mib(self.needs_bytes, self.needs_with_luck_bytes)
    }

    /// Formats the line to paste for a sentence: `` `ALLOC_CONF=...` (stratalloc) ``.
    #[must_use]
    pub fn paste_text(&self) -> String {
        match self.paste.is_empty() {
            true => format!("the default settings of {}", self.paste_for),
            false => format!("`{}` ({})", self.paste, self.paste_for),
        }
    }
}
