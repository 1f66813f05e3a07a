//! Names the data that a recording probably lacks if a replay of it differs.

use super::recording::{Memory, Recording};
use stratalloc::config::Config;
use stratalloc::ids::PoolId;
use stratalloc_recording::Verification;

impl Recording {
    /// Returns true if the recorded configuration uses the garbage collector, and the limit that it acts
    /// near is unknown: no replay is exact, no limit was inferred, and the caller set no fraction.
    #[must_use]
    pub fn lacks_collector_limit(&self) -> bool {
        let collects = |config: &Config| config.settings().garbage_collection_threshold.is_some();
        self.exact.is_none()
            && self.memory.fraction.is_none()
            && self.inferred_limit.is_none()
            && self.config.as_ref().is_some_and(collects)
    }

    /// Returns a sentence about the data that the recording probably lacks, and the option that supplies
    /// it. `found` is a replay that differs from the recording.
    #[must_use]
    pub fn probably_lacks(&self, found: &Verification) -> &'static str {
        if !self.trace.missing.is_empty() {
            return "entries that skip_actions left out when it was made: no option supplies them";
        }
        let segments = self.trace.segments.iter().map(|segment| segment.pool);
        let mut pools = segments.chain(self.trace.events.iter().map(|event| event.pool));
        let has_private = pools.any(|pool| pool != PoolId::DEFAULT);
        let names_pools = self.trace.events.iter().any(|event| event.names_pool);
        let limit_is_set = self.memory != Memory::default();
        // Without the pools, decisions differ that also depend on the limit. So pools are named first.
        if has_private && !names_pools {
            return "the pools of requests, which PyTorch records from 2.12 on: no option supplies them";
        }
        if self.lacks_collector_limit() {
            return "the limit near which garbage_collection_threshold acted: --memory-fraction sets it";
        }
        if found.limit.is_some() && !limit_is_set {
            return "the limit of the program's memory: --memory-fraction or --total-memory sets it";
        }
        if has_private {
            return "options of pools, restored checkpoints of pools, or which requests to pools were made \
                    in captures: no option supplies them";
        }
        if self.start.is_some() {
            return "what happened before it began: recording from the start of the program supplies it";
        }
        if found.limit.is_some() {
            return "settings that changed while the program ran, or its limit if that is not the one that \
                    is set: --conf, --memory-fraction and --total-memory set them";
        }
        "settings that changed while the program ran, or other rules than those of the replay: --conf sets \
         both"
    }
}
