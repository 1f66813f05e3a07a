//! The recordings that a command reads: which files and devices, and how much memory their programs had.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use crate::analysis::{Memory, Recording, counted_as};
use crate::config::{Config, Size, shown};
use crate::history::{BlockStateName, SegmentLayout};
use crate::replay::{Limits, ReplayError, Trace, UnknownEntries, reader};

use super::files;
use super::outcome::{Outcome, Result, each, fraction, one_of_several, tell};
use super::settings::{self, BadConf};
use super::show::{mib, progress, shown_path};

/// Arguments of commands that read recordings.
#[derive(Args, Debug)]
pub(crate) struct Recordings {
    /// PyTorch memory snapshots (.pickle or .json) or logs of requests in RMM's format (.csv), plain, .xz,
    /// .gz or .zst; - for standard input.
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) files: Vec<PathBuf>,
    /// Memory of the device: 32GiB, 40G, 512MiB, or a number of bytes.
    #[arg(long, value_parser = Size::in_bytes)]
    pub(crate) total_memory: Option<u64>,
    /// Part of the device's memory that may be reserved; 1 turns a limit that the recording shows off.
    #[arg(long, value_parser = fraction)]
    pub(crate) memory_fraction: Option<f64>,
    /// The device of the recording that is taken. Default: each by itself; where only one can be, the one
    /// with the most events.
    #[arg(long)]
    recorded_device: Option<u32>,
    /// Refuse recordings that decode to more bytes than this.
    #[arg(long, value_parser = Size::in_bytes, default_value_t = Limits::default().decoded_bytes)]
    max_input: u64,
}

/// Which devices of a recording are taken where nobody names one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Devices {
    /// The one with the most events.
    First,
    /// All that have some, the one with the most first.
    Each,
}

/// A recording's devices have numbers below this.
const DEVICE_NUMBERS: u32 = 64;

/// What is done with one device of a recording, which has this name for people.
type Act<'a> = dyn FnMut(&str, Trace) -> Result<Outcome> + 'a;

impl Recordings {
    /// What was said of the memory.
    pub(crate) fn memory(&self) -> Memory {
        Memory { total_bytes: self.total_memory, fraction: self.memory_fraction }
    }

    /// The recording of a trace under its own configuration; if that cannot be used, a note names the `lack`.
    pub(crate) fn recording(&self, name: &str, trace: Trace, lack: &str) -> Recording {
        let own = settings::recorded(&trace.conf);
        if let Err(error) = &own {
            tell(format_args!("note: {}: {lack}: {error}", shown(name)));
        }
        let recording = Recording::new(trace, own.ok(), self.memory());
        tell_start(name, &recording);
        recording
    }

    /// What `--conf` says, looked at before any recording is read.
    pub(crate) fn parse_conf(&self, text: &str) -> Result<Config> {
        let config = settings::parse("--conf", text)?;
        files::spare_from(&config, &self.files)?;
        settings::tell_idle_keys(&config, self.memory_fraction.is_some());
        Ok(config)
    }

    /// Reads each recording and does something with each device that is wanted, one after another: a file is
    /// read once for each of its devices, so that one at a time is held.
    pub(crate) fn each(&self, wanted: Devices, act: &mut Act<'_>) -> Result<Outcome> {
        each(&self.files, |path| self.each_device(path, wanted, act))
    }

    fn each_device(&self, path: &Path, wanted: Devices, act: &mut Act<'_>) -> Result<Outcome> {
        let device = self.recorded_device;
        let again = device.is_none() && wanted == Devices::Each;
        let source = Source::of(path, self.max_input, again)?;
        let first = self.read(path, &source, device)?;
        let (name, taken) = (name_of(path), first.device);
        let mut others = if device.is_none() { first.other_devices } else { 0 };
        if others == 0 || wanted == Devices::First {
            if others > 0 {
                tell(format_args!(
                    "note: {}: events of device {taken} are taken, {others} more have some: \
                     --recorded-device N takes another",
                    shown_path(path)
                ));
            }
            return take(path, act, &name, first);
        }
        let count = others + 1;
        tell(format_args!(
            "note: {}: events of {count} devices; each is told by itself, --recorded-device N takes one",
            shown_path(path)
        ));
        let mut outcome =
            one_of_several(take(path, act, &format!("{name} device {taken}"), first))?;
        for number in (0..DEVICE_NUMBERS).filter(|number| *number != taken) {
            if others == 0 {
                break;
            }
            // A device without entries is none of those.
            if let Ok(trace) = self.read(path, &source, Some(number)) {
                others -= 1;
                let name = format!("{name} device {number}");
                let done = one_of_several(take(path, act, &name, trace))?;
                outcome = if done == Outcome::Good { outcome } else { done };
            }
        }
        Ok(outcome)
    }

    /// Reads a recording with a progress bar.
    fn read(&self, path: &Path, source: &Source<'_>, device: Option<u32>) -> Result<Trace> {
        let name = shown_path(path);
        let (file, length): (Box<dyn Read + '_>, u64) = match source {
            Source::File(path) => {
                let file = std::fs::File::open(path).map_err(|error| format!("{name}: {error}"))?;
                let length = file.metadata().map_or(0, |metadata| metadata.len());
                (Box::new(file), length)
            }
            Source::Kept(bytes) => (Box::new(bytes.as_slice()), bytes.len() as u64),
            Source::Passing => (Box::new(std::io::stdin().lock()), 0),
        };
        let bar = progress(length, &format!("reading {name}"));
        let limits = Limits { decoded_bytes: self.max_input, device, ..Limits::default() };
        let trace = reader::read_bytes(&name, file, &limits, Some(&|done| bar.set_position(done)))?;
        bar.finish_and_clear();
        if trace.events.is_empty() {
            let why = format!("{name}: {}", nothing_in(&trace, device));
            let live =
                |segment: &SegmentLayout| segment.bytes_in(&[BlockStateName::ActiveAllocated]) > 0;
            if !trace.segments.iter().any(live) {
                return Err(why.into());
            }
            tell(format_args!("note: only the blocks that lived are taken: {why}"));
        }
        Ok(trace)
    }
}

/// Does something with a recording of the file at `path`, which errors of the replay name.
fn take(path: &Path, act: &mut Act<'_>, name: &str, trace: Trace) -> Result<Outcome> {
    let UnknownEntries { entries, first_action } = &trace.unknown;
    if *entries > 0 {
        let ignored = counted_as(*entries, "entry is ignored", "entries are ignored");
        tell(format_args!(
            "note: {}: {ignored}: unknown actions, the first {first_action:?}",
            shown(name)
        ));
    }
    act(name, trace).map_err(|error| {
        let file = shown_path(path);
        if error.is::<ReplayError>() {
            return format!("{file}: {error}").into();
        }
        match error.downcast::<BadConf>() {
            Ok(bad) => Box::new(bad.in_file(&file)),
            Err(error) => error,
        }
    })
}

/// Where a recording is read from, once for each of its devices.
enum Source<'a> {
    File(&'a Path),
    /// Standard input, which passes once: kept as it came.
    Kept(Vec<u8>),
    /// Standard input for one device.
    Passing,
}

impl<'a> Source<'a> {
    fn of(path: &'a Path, max_input: u64, again: bool) -> Result<Self> {
        if path != Path::new("-") {
            return Ok(Self::File(path));
        }
        if !again {
            return Ok(Self::Passing);
        }
        // More than may be decoded is refused when it is read; no encoding adds as much as the rest.
        let most = max_input.saturating_add(max_input / 8).saturating_add(1 << 16);
        let mut kept = Vec::new();
        std::io::stdin().lock().take(most).read_to_end(&mut kept).map_err(|e| format!("-: {e}"))?;
        Ok(Self::Kept(kept))
    }
}

/// The limit of a recording, and how many of its entries have unknown actions, which are ignored.
pub(crate) fn limit_json(recording: &Recording) -> Value {
    json!({
        "limit_bytes": recording.limit.map(|limit| limit.bytes),
        "limit_from": recording.limit.map(|limit| limit.source.to_string()),
        "limit_inferred": recording.limit_is_inferred(),
        "unknown_entries": recording.trace.unknown.entries,
    })
}

/// Says from where replays of a recording start that begins late.
pub(crate) fn tell_start(name: &str, recording: &Recording) {
    if recording.lacks_collector_limit() {
        tell(format_args!(
            "note: {}: garbage_collection_threshold acts near a limit that the recording does not show: \
             --memory-fraction sets it",
            shown(name)
        ));
    }
    let Some(start) = &recording.start else {
        return;
    };
    let (blocks, reserved) = (start.live_addresses.len(), mib(start.reserved_bytes as f64));
    let (live, name) = (mib(start.requested_bytes as f64), shown(name));
    let from = match &start.layout {
        Some(_) => {
            "replays of the recorded configuration start from that layout, others and the needs from the \
             live blocks"
        }
        None => "where they lay cannot be told, so that replays start from the live blocks alone",
    };
    tell(format_args!(
        "note: {name}: it begins late: {blocks} blocks of {live} MiB lived and {reserved} MiB were reserved \
         before its first event; {from}"
    ));
}

/// What a recording without events lacks, and why it may. `device`: the one that was asked for.
fn nothing_in(trace: &Trace, device: Option<u32>) -> String {
    match device {
        _ if trace.requests_only => "it holds no requests".to_owned(),
        Some(device) => format!("it holds no events of device {device}; others may have some"),
        None => "it holds no events: was torch.cuda.memory._record_memory_history on while the \
                 program ran?"
            .to_owned(),
    }
}

/// The name of a recording: its file's, without the endings.
pub(crate) fn name_of(path: &Path) -> String {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let known = [".xz", ".gz", ".zst", ".pickle", ".json", ".csv"];
    known
        .iter()
        .fold(file, |name, ending| name.strip_suffix(ending).map(str::to_owned).unwrap_or(name))
}
