//! Names the data that a recording probably lacks if a replay of it differs.

use super::recording::{Memory, Recording};
use super::refusals::Refusals;
use super::words::mib;
use stratalloc::config::Config;
use stratalloc::ids::PoolId;
use stratalloc_recording::Verification;

impl Recording {
    /// Returns true if the recorded configuration uses the garbage collector, and the limit that it acts
    /// near is unknown: no replay is exact, although one was looked for, no limit was inferred, and the
    /// caller set no fraction.
    #[must_use]
    pub fn lacks_collector_limit(&self) -> bool {
        let collects = |config: &Config| config.settings().garbage_collection_threshold.is_some();
        self.is_verified
            && self.exact.is_none()
            && self.memory.fraction.is_none()
            && self.inferred_limit.is_none()
            && self.config.as_ref().is_some_and(collects)
    }

    /// Returns a sentence about the data that the recording probably lacks, and the option that supplies
    /// it. `found` is a replay that differs from the recording.
    #[must_use]
    pub fn probably_lacks(&self, found: &Verification) -> String {
        match self.other_limit_than_set(found) {
            Some(other) if !self.lacks_pools() => other,
            _ => self.lacks_besides_limit(found).to_owned(),
        }
    }

    /// Returns true if requests were made to private pools and the recording does not contain to which.
    fn lacks_pools(&self) -> bool {
        self.has_private_pools() && !self.trace.events.iter().any(|event| event.names_pool)
    }

    fn has_private_pools(&self) -> bool {
        let segments = self.trace.segments.iter().map(|segment| segment.pool);
        let mut pools = segments.chain(self.trace.events.iter().map(|event| event.pool));
        pools.any(|pool| pool != PoolId::DEFAULT)
    }

    /// Returns a sentence about the limit that the recorded segments and failed requests show, if the caller
    /// set another one and the first difference shows that.
    fn other_limit_than_set(&self, found: &Verification) -> Option<String> {
        let set_bytes = self.limit.filter(|_| self.is_memory_set)?.bytes;
        found.limit?;
        let settings = self.config.as_ref().map(|config| config.settings().clone());
        let refusals = Refusals::of(&self.trace, &settings.unwrap_or_default(), &self.figures);
        let (least_bytes, below_bytes) = (refusals.least_bytes, refusals.below_bytes);
        let is_possible =
            set_bytes >= least_bytes && below_bytes.is_none_or(|below| set_bytes < below);
        let shown = match below_bytes {
            _ if is_possible || refusals.contradict() => return None,
            Some(below) => format!("between {} and {} MiB", mib(least_bytes), mib(below)),
            None => format!("of at least {} MiB", mib(least_bytes)),
        };
        let set = mib(set_bytes);
        Some(format!(
            "its limit: the entries show one {shown}, and {set} MiB are set: --memory-fraction and \
             --total-memory set it"
        ))
    }

    /// Returns what the recording probably lacks, if the limit that the caller set is right.
    fn lacks_besides_limit(&self, found: &Verification) -> &'static str {
        if !self.trace.missing.is_empty() {
            return "entries that skip_actions left out when it was made: no option supplies them";
        }
        let limit_is_set = self.memory != Memory::default();
        // Without the pools, decisions differ that also depend on the limit. So pools are named first.
        if self.lacks_pools() {
            return "the pools of requests, which PyTorch records from 2.12 on: no option supplies them";
        }
        if self.lacks_collector_limit() {
            return "the limit near which garbage_collection_threshold acted: --memory-fraction sets it";
        }
        if found.limit.is_some() && !limit_is_set {
            return "the limit of the program's memory: --memory-fraction or --total-memory sets it";
        }
        if self.has_private_pools() {
            return "options of pools, restored checkpoints of pools, or which requests to pools were made \
                    in captures: no option supplies them";
        }
        if self.start.is_some() {
            return "what happened before it began: recording from the start of the program supplies it";
        }
        "settings that changed while the program ran, or other rules than those of the replay: --conf sets \
         both"
    }
}
