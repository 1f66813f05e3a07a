//! Finds settings that would have served a program that has just run out of memory (`advise_on_oom:True`).
//!
//! The program waits for the result. So each setting is replayed only once, under the program's own limit,
//! without a search for its need. Only the newest entries of the history are used.

use std::time::Duration;

use super::advice::{ALONE, QUICK};
use super::recording::{Memory, Recording};
use super::trial::{Capacity, measure};
use super::words::counted_as;
use stratalloc::config::{Config, KeyTable};
use stratalloc::history::Snapshot;
use stratalloc::layers::on_oom::set_adviser;
use stratalloc_recording::{Progress, Trace};

/// No replay of a setting starts after this much time.
const TIME: Duration = Duration::from_secs(4);
/// The maximum number of history entries that are replayed, the newest ones; more would take more time
/// and memory.
const ENTRIES_MAX: usize = 200_000;
/// The maximum number of settings that are named.
const NAMED: usize = 3;

/// Enables the key `advise_on_oom:True` for the allocators of this process. The command line and the C
/// library, if it has its feature `advise`, call this. A Rust program calls it before it builds an
/// allocator with that key.
///
/// Each search uses a new `P`. Its clock ends the search after 4 seconds; without a clock
/// ([`Silent`](stratalloc_recording::Silent)) all settings are tried, at most 19.
pub fn advise_on_oom<P: Progress + Default>() {
    set_adviser(advise::<P>);
}

/// Replays the history under other settings and returns the results as sentences.
fn advise<P: Progress + Default>(snapshot: &Snapshot) -> Vec<String> {
    let sentences = served(snapshot, &P::default());
    sentences.unwrap_or_else(|why| vec![format!("advise_on_oom found nothing: {why}")])
}

/// Returns settings under which fewer requests fail, best first, or the reason why there are none.
fn served(snapshot: &Snapshot, progress: &dyn Progress) -> Result<Vec<String>, String> {
    let ends = progress.elapsed() + TIME;
    if snapshot.entries.is_empty() {
        let why = "nothing is recorded; record_history:1000000 keeps that many entries";
        return Err(why.to_owned());
    }
    let Snapshot { segments, entries, about, .. } = snapshot.clone();
    let trace = Trace::of(&Snapshot::new(segments, entries.at_most(ENTRIES_MAX), about));
    let config = Config::parse(&trace.conf, &KeyTable::default()).map_err(|e| e.to_string())?;
    let own = config.settings().clone();
    let recording = Recording::new(trace, Some(config.clone()), Memory::default());
    if let Some(no_history) = &recording.no_history {
        return Err(no_history.to_string());
    }
    let failures = |config: &Config| {
        let trial = measure(&recording, config, Capacity::Limited, 1, progress);
        trial.map(|trial| trial.run.ooms).map_err(|e| e.to_string())
    };
    let before = failures(&config)?;
    if before == 0 {
        let why = "the recorded part runs unchanged on a device without other processes";
        return Err(why.to_owned());
    }
    let mut found: Vec<(u64, &str)> = Vec::new();
    for setting in QUICK.iter().chain(&ALONE).copied() {
        if progress.elapsed() > ends || found.iter().filter(|(left, _)| *left == 0).count() >= NAMED
        {
            break;
        }
        let Ok(candidate) = Config::parse(setting, &KeyTable::default()) else { continue };
        let candidate = candidate.with_compat(own.compat);
        if *candidate.settings() == own {
            continue;
        }
        match failures(&candidate)? {
            left if left < before => found.push((left, setting)),
            _ => {}
        }
    }
    if found.is_empty() {
        return Err("no setting that was tried serves the program".to_owned());
    }
    found.sort_by_key(|(left, _)| *left);
    let sentence = |(left, setting): &(u64, &str)| {
        let set = if setting.is_empty() { "no setting at all" } else { *setting };
        let failed = counted_as(before, "request that failed", "requests that failed");
        match left {
            0 => format!("{set} would have served the {failed} (replayed)"),
            left => format!("{set}: {left} would fail of the {failed} (replayed)"),
        }
    };
    Ok(found.iter().take(NAMED).map(sentence).collect())
}
