//! The work of a sweep: reads recordings, analyses them and keeps the results.
//!
//! The work has three steps, in this order: [`Sweep::scan`] reads each file once and keeps its fingerprint;
//! [`Sweep::difference`] compares a recording of each group with that of the largest group, and
//! [`Sweep::advise`] searches settings for it; [`Sweep::needs`] tries settings on it. The caller combines the
//! results. Each result is added to the [`State`], so that an interrupted sweep goes on where it was. Other
//! processes can do a part of the work, if they add it to the same state.
//!
//! Read next: `state`, then the `sweep` of `analysis`.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;
use serde::Serialize;

use super::state::State;
use crate::host::Host;
use stratalloc::config::Config;
use stratalloc::size::{GIB, MIB};
use stratalloc_analysis::{
    AdviceOptions, Advised, Difference, Fingerprint, Memory, Need, Rank, Recording, Scanned,
    SearchOptions,
};
use stratalloc_recording::{NoHistory, ReplayError, Stacks, Trace};

/// A name and a configuration that is replayed under it.
type NamedConfig = (String, Config);

/// Reads a file.
type Read<'a> = dyn Fn(&Path) -> Result<Trace, String> + Sync + 'a;
/// Receives the result of a file when it is done.
type Done<'a> = dyn Fn(usize, &Result<Scanned, String>) -> io::Result<()> + Sync + 'a;
/// Parses the configuration of a recording.
type Parse<'a> = dyn Fn(&str) -> Result<Config, String> + Sync + 'a;

/// A sweep of recordings. Paths are named by their indices.
pub(super) struct Sweep<'a> {
    /// The files.
    pub(super) paths: &'a [PathBuf],
    /// Reads a file.
    pub(super) read: &'a Read<'a>,
    /// Parses a recorded configuration.
    pub(super) parse: &'a Parse<'a>,
    /// The options with which files are read, as a part of the keys in the state.
    pub(super) read_options: String,
    /// The memory that the caller set.
    pub(super) memory: Memory,
    /// How settings are searched.
    pub(super) advice: AdviceOptions,
    /// The results of an earlier call.
    pub(super) state: &'a State,
    files: Vec<Result<File, String>>,
    kept: KeptRecordings,
}

/// A file when the sweep began.
#[derive(Clone, PartialEq, Eq)]
struct File {
    /// The absolute path, the length and the time of the last change.
    identity: String,
    length: u64,
}

/// Data that later steps need again.
#[derive(Default)]
struct KeptRecordings {
    /// Recordings for [`Sweep::needs`], without what it does not use.
    recordings: HashMap<usize, Recording>,
    /// The bytes of their operations.
    bytes: u64,
    /// The recording with which others are compared.
    largest: Option<(usize, Trace)>,
    /// The recording that was read last.
    loaded: Option<(usize, Trace)>,
}

/// At most so many bytes of recordings are kept. Others are read again.
const KEPT_MAX_BYTES: u64 = 256 * MIB;
/// Readers use at most this much memory beside the first of them.
const READERS_MAX_BYTES: u64 = GIB - KEPT_MAX_BYTES;
/// Reading a file and computing its fingerprint takes about three times its length; this is a bound for most.
const MEMORY_FACTOR: u64 = 4;
/// Compressed snapshots are seldom smaller than this part of the original.
const COMPRESSION: u64 = 16;

type Outcome<T> = io::Result<Result<T, String>>;

impl<'a> Sweep<'a> {
    /// Creates a sweep. Reads the length and the time of each file, not its contents.
    pub(super) fn new(
        paths: &'a [PathBuf],
        (read, parse): (&'a Read<'a>, &'a Parse<'a>),
        read_options: String,
        (memory, advice): (Memory, AdviceOptions),
        state: &'a State,
    ) -> Self {
        let files = paths.iter().map(|path| File::of(path)).collect();
        let kept = KeptRecordings::default();
        Self { paths, read, parse, read_options, memory, advice, state, files, kept }
    }

    /// Reads all files, on at most `jobs` threads. There are fewer if the readers could need too much memory.
    /// `done` is called after each file, in the order in which they are done.
    ///
    /// # Errors
    ///
    /// The error of `done` or of the state. A file that cannot be read is not an error, but a result.
    pub(super) fn scan(
        &self,
        jobs: usize,
        done: &Done<'_>,
    ) -> io::Result<Vec<Result<Scanned, String>>> {
        let jobs = jobs.min(self.readers_max()).max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(jobs).build();
        let scan = |index| {
            let scanned = self.scan_one(index)?;
            done(index, &scanned)?;
            Ok(scanned)
        };
        // One file at a time for each thread, because files differ in length.
        let files = (0..self.paths.len()).into_par_iter().with_max_len(1);
        pool.map_err(io::Error::other)?.install(|| files.map(scan).collect())
    }

    fn scan_one(&self, index: usize) -> Outcome<Scanned> {
        self.known_or("scan", &[index], &format!("{:?}", self.memory), || {
            let trace = self.trace(index)?;
            if let Some(no_history) = NoHistory::of(&trace) {
                return Err(format!("{}: {no_history}", self.paths[index].display()));
            }
            Ok(Scanned::of(&self.rank(&trace)))
        })
    }

    fn rank<'t>(&self, trace: &'t Trace) -> Rank<'t> {
        let own = (self.parse)(&trace.conf).ok();
        Rank::of(trace, own.as_ref(), &self.memory)
    }

    /// Reads a recording for [`Self::difference`] and [`Self::advise`], unless their results are known.
    ///
    /// # Errors
    ///
    /// The file cannot be read or has changed.
    pub(super) fn load(&mut self, index: usize, largest: Option<usize>) -> Result<(), String> {
        let is_known = |what, files: &[usize], options: &str| {
            let key = self.key(what, files, options);
            key.is_some_and(|key| self.state.has(&key))
        };
        let options = self.options();
        let is_compared =
            largest.is_none_or(|largest| is_known("difference", &[largest, index], &options));
        if !(is_compared && is_known("advice", &[index], &options)) {
            self.kept.loaded = Some((index, self.trace(index)?));
        }
        Ok(())
    }

    /// Compares a recording with that of the largest group.
    ///
    /// # Errors
    ///
    /// The error of the state.
    pub(super) fn difference(&mut self, index: usize, largest: usize) -> Outcome<Difference> {
        let options = self.options();
        if let Some(known) = self.known("difference", &[largest, index], &options) {
            return Ok(Ok(known));
        }
        for (at, is_largest) in [(largest, true), (index, false)] {
            let kept = if is_largest { &self.kept.largest } else { &self.kept.loaded };
            if kept.as_ref().is_none_or(|kept| kept.0 != at) {
                match self.trace(at) {
                    Ok(trace) if is_largest => self.kept.largest = Some((at, trace)),
                    Ok(trace) => self.kept.loaded = Some((at, trace)),
                    Err(error) => return Ok(Err(error)),
                }
            }
        }
        self.known_or("difference", &[largest, index], &options, || {
            let kept = self.kept.largest.as_ref().zip(self.kept.loaded.as_ref());
            let ((_, of_largest), (_, loaded)) = kept.ok_or("it was not read")?;
            Ok(Difference::of(&[of_largest, loaded].map(|trace| self.rank(trace))))
        })
    }

    /// Searches settings for a recording.
    ///
    /// # Errors
    ///
    /// The error of the state.
    pub(super) fn advise(&mut self, index: usize) -> Outcome<Advised> {
        let loaded = self.kept.loaded.take().filter(|(loaded, _)| *loaded == index);
        let mut analysed = None;
        let options = self.options();
        let advised = self.known_or("advice", &[index], &options, || {
            let trace = loaded.map_or_else(|| self.trace(index), |(_, trace)| Ok(trace))?;
            let recording = analysed.insert(self.recording(trace));
            let conf_error = (self.parse)(&recording.trace.conf).err();
            Advised::of(recording, &self.advice, conf_error, &Host::default())
                .map_err(|error| error.to_string())
        })?;
        if let Some(recording) = analysed {
            self.kept.keep(index, recording);
        }
        Ok(advised)
    }

    /// Returns the need of a recording under each configuration: as `compare` does, but without other
    /// figures.
    ///
    /// # Errors
    ///
    /// The error of the state.
    pub(super) fn needs(
        &mut self,
        index: usize,
        configs: &[NamedConfig],
    ) -> Outcome<Vec<Option<u64>>> {
        let options = self.options();
        let key = |conf: &str| format!("{options} {conf}");
        let known = |(conf, _): &NamedConfig| self.known("need", &[index], &key(conf));
        let known: Vec<Option<Option<u64>>> = configs.iter().map(known).collect();
        if let Some(all) = known.iter().copied().collect() {
            return Ok(Ok(all));
        }
        let recording = match self.kept.recordings.remove(&index) {
            Some(recording) => recording,
            None => match self.trace(index) {
                Ok(trace) => self.recording(trace),
                Err(error) => return Ok(Err(error)),
            },
        };
        let need = |(conf, config): &NamedConfig| {
            self.known_or("need", &[index], &key(conf), || {
                need_of(&recording, config).map_err(|error| error.to_string())
            })
        };
        let needs: io::Result<Vec<_>> = configs.par_iter().map(need).collect();
        Ok(needs?.into_iter().collect())
    }

    fn recording(&self, trace: Trace) -> Recording {
        let own = (self.parse)(&trace.conf).ok();
        Recording::new(trace, own, self.memory)
    }

    /// Reads a file.
    fn trace(&self, index: usize) -> Result<Trace, String> {
        let (path, file) = (&self.paths[index], self.files[index].as_ref().map_err(Clone::clone)?);
        let trace = (self.read)(path)?;
        if File::of(path)? != *file {
            return Err(format!("{}: the file changed during the sweep", path.display()));
        }
        Ok(trace)
    }

    /// Returns the number of readers that together use at most [`READERS_MAX_BYTES`] beside one of them.
    fn readers_max(&self) -> usize {
        let needs = |(path, file): (&PathBuf, &Result<File, String>)| {
            let is_compressed =
                path.extension().is_some_and(|e| ["xz", "gz", "zst"].iter().any(|c| e == *c));
            let factor = MEMORY_FACTOR * if is_compressed { COMPRESSION } else { 1 };
            file.as_ref().map_or(0, |file| file.length.saturating_mul(factor))
        };
        let largest = self.paths.iter().zip(&self.files).map(needs).max().unwrap_or(0).max(1);
        usize::try_from(1 + READERS_MAX_BYTES / largest).unwrap_or(usize::MAX)
    }

    /// Returns the options that change results, as a part of keys.
    fn options(&self) -> String {
        format!("{:?} {:?}", self.memory, self.advice)
    }

    /// Returns the key of work on files; `None` if one of them cannot be read.
    fn key(&self, what: &str, files: &[usize], options: &str) -> Option<Fingerprint> {
        let mut texts = vec![env!("CARGO_PKG_VERSION"), what, &self.read_options, options];
        for index in files {
            texts.push(&self.files[*index].as_ref().ok()?.identity);
        }
        Some(Fingerprint::of_texts(&texts))
    }

    fn known<T: serde::de::DeserializeOwned>(
        &self,
        what: &str,
        files: &[usize],
        options: &str,
    ) -> Option<T> {
        self.state.known(&self.key(what, files, options)?)
    }

    /// Returns the known result of some work. If there is none, does the work and adds its result to the
    /// state, unless it is an error.
    fn known_or<T: Serialize + serde::de::DeserializeOwned>(
        &self,
        what: &str,
        files: &[usize],
        options: &str,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Outcome<T> {
        if let Some(known) = self.known(what, files, options) {
            return Ok(Ok(known));
        }
        let result = work();
        if let (Ok(result), Some(key)) = (&result, self.key(what, files, options)) {
            self.state.add(key, result)?;
        }
        Ok(result)
    }
}

/// Searches for a need in the same steps as `advise`, so that both are the same.
fn need_of(recording: &Recording, config: &Config) -> Result<Option<u64>, ReplayError> {
    let (options, host) = (&SearchOptions::QUICK, &Host::default());
    let mut need = Need::search(recording, config, options, host)?;
    need.try_other_addresses(recording, config, options, host)?;
    Ok(need.needs_bytes)
}

impl File {
    fn of(path: &Path) -> Result<Self, String> {
        let named = |error: io::Error| format!("{}: {error}", path.display());
        let metadata = std::fs::metadata(path).map_err(named)?;
        let absolute = std::path::absolute(path).map_err(named)?;
        let changed = metadata.modified().map_err(named)?;
        let changed_ns = changed.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let length = metadata.len();
        // The names of different files must differ, also if they are not text.
        Ok(Self { identity: format!("{absolute:?} {length} {changed_ns}"), length })
    }
}

impl KeptRecordings {
    /// Keeps the part of a recording that searches for needs use, if there is room.
    fn keep(&mut self, index: usize, mut recording: Recording) {
        let bytes = recording.workload.ops.host_bytes();
        if self.bytes + bytes as u64 > KEPT_MAX_BYTES {
            return;
        }
        self.bytes += bytes as u64;
        let trace = &mut recording.trace;
        trace.torch = Some(trace.torch_version());
        trace.stacks = Stacks::default();
        (trace.events, trace.segments, trace.log) = (Vec::new(), Vec::new(), None);
        (recording.exact, recording.start, recording.start_layout) = (None, None, None);
        self.recordings.insert(index, recording);
    }
}
