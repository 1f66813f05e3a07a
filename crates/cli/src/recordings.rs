//! The recordings that a command reads: files, the devices in them, and the memory of the recorded
//! programs.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use serde_json::{Value, json};

use stratalloc::config::{Config, shown};
use stratalloc::history::{BlockStateName, SegmentLayout};
use stratalloc_analysis::{Memory, Recording, counted_as, devices_sentence, remarks};
use stratalloc_recording::{
    DeviceFigures, Limits, NoHistory, ReplayError, Trace, UnknownEntries, reader,
};

use super::files;
use super::options::RECORDINGS;
use super::outcome::{Outcome, Result, fraction, is_closed_pipe, write_note, write_stderr};
use super::settings::{self, BadConf, NamedConf};
use super::show::{progress, shown_path};
use super::size::size;

/// Arguments of commands that read recordings.
#[derive(Args, Clone, Debug)]
pub(crate) struct Recordings {
    /// PyTorch memory snapshots (.pickle, .json or the viewer's .html), traces of its profiler with
    /// profile_memory=True (.json), logs of requests in RMM's format (.csv), plain, .xz, .gz or .zst. Of
    /// memory_stats() and export_memory_timeline (.json) the totals are shown. Standard input: -.
    #[arg(required = true, value_name = "TRACE", value_hint = ValueHint::FilePath,
        help_heading = None::<&str>)]
    pub(crate) files: Vec<PathBuf>,
    /// Memory of the device, such as 32GiB, 40G or 512MiB. All units are binary: 24GB is 24GiB.
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = RECORDINGS)]
    pub(crate) total_memory: Option<u64>,
    /// Share of the device's memory that may be reserved. 1 turns off a limit that the recording shows.
    #[arg(long, value_name = "SHARE", value_parser = fraction, help_heading = RECORDINGS)]
    pub(crate) memory_fraction: Option<f64>,
    /// Device of the recording to use. Default: each one separately, first the one whose requests failed
    /// first, else the one with the most reserved bytes. Commands that use only one take the first.
    #[arg(long, value_name = "N", help_heading = RECORDINGS)]
    recorded_device: Option<u32>,
    /// Refuse recordings that decode to more than this.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4GiB", help_heading = RECORDINGS)]
    max_input: u64,
}

/// Which devices of a recording a command uses by default.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Devices {
    /// The first one in the order of [`DeviceFigures::order`](stratalloc_recording::DeviceFigures::order).
    First,
    /// The same. The command itself shows how the devices compare.
    Compared,
    /// All devices with events, in this order.
    Each,
    /// All devices with events or memory, in this order. The command itself shows how they compare.
    All,
}

/// A recording without a result.
pub(crate) struct NotJudged {
    /// The name to print.
    pub(crate) name: String,
    pub(crate) error: String,
}

/// A function that processes one device of a recording. The text is the name to print.
type Act<'a> = dyn FnMut(&str, Trace) -> Result<Outcome> + 'a;

impl Recordings {
    /// Returns the same options for other files.
    pub(crate) fn of_files(&self, files: Vec<PathBuf>) -> Self {
        Self { files, ..self.clone() }
    }

    /// Returns the device memory and fraction that the user set.
    pub(crate) fn memory(&self) -> Memory {
        Memory { total_bytes: self.total_memory, fraction: self.memory_fraction }
    }

    /// Returns the recording of a trace, with the recorded configuration. If that configuration cannot
    /// be used, prints a note that ends with `lack`.
    pub(crate) fn recording(&self, name: &str, trace: Trace, lack: &str) -> Recording {
        let own = settings::recorded(&trace.conf);
        if let Err(error) = &own {
            write_note(format_args!("{}: {lack}: {error}", shown(name)));
        }
        let recording = Recording::new(trace, own.ok(), self.memory());
        write_remarks(name, &recording);
        recording
    }

    /// Does the same as [`recording`](Self::recording), for commands that only answer with needs.
    ///
    /// # Errors
    ///
    /// [`ReplayError::NoHistory`].
    pub(crate) fn with_history(&self, name: &str, trace: Trace, lack: &str) -> Result<Recording> {
        match NoHistory::of(&trace) {
            Some(no_history) => Err(ReplayError::from(no_history).into()),
            None => Ok(self.recording(name, trace, lack)),
        }
    }

    /// Parses `--conf`. Called before any recording is read, so that an error is found early.
    pub(crate) fn parse_conf(&self, text: &str) -> Result<Config> {
        let config = settings::parse("--conf", text)?;
        files::spare_from(&config, &self.files)?;
        settings::write_idle_keys(&config, self.memory_fraction.is_some());
        Ok(config)
    }

    /// Parses several configurations as [`parse_conf`](Self::parse_conf) does.
    pub(crate) fn parse_confs(&self, texts: &[String]) -> Result<Vec<NamedConf>> {
        texts.iter().map(|text| Ok((text.clone(), self.parse_conf(text)?))).collect()
    }

    /// Reads each recording and processes each selected device in turn. Reads a file once per device, so
    /// that only one device's data is in memory at a time. An error is printed, and the remaining
    /// recordings are processed.
    ///
    /// # Errors
    ///
    /// Only one that means a closed pipe.
    pub(crate) fn each(&self, wanted: Devices, act: &mut Act<'_>) -> Result<Outcome> {
        self.each_or(wanted, act, &mut Vec::new())
    }

    /// Does the same as [`each`](Self::each). Adds the recordings that cannot be read or processed to
    /// `failed`.
    pub(crate) fn each_or(
        &self,
        wanted: Devices,
        act: &mut Act<'_>,
        failed: &mut Vec<NotJudged>,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::Good;
        for path in &self.files {
            let done = self.each_device(path, wanted, act, failed);
            outcome = outcome.max(or_printed(done, &name_of(path), failed)?);
        }
        Ok(outcome)
    }

    fn each_device(
        &self,
        path: &Path,
        wanted: Devices,
        act: &mut Act<'_>,
        failed: &mut Vec<NotJudged>,
    ) -> Result<Outcome> {
        let source = RecordingInput::of(path, self.max_input)?;
        let first = self.read(path, &source, self.recorded_device)?;
        let (name, devices) = (name_of(path), first.devices.clone());
        let is_shown = |figures: &&DeviceFigures| match wanted {
            Devices::First | Devices::Compared => figures.device == first.device,
            Devices::Each => figures.events > 0 || figures.device == first.device,
            Devices::All => true,
        };
        let shown: Vec<u32> = devices.iter().filter(is_shown).map(|one| one.device).collect();
        let compared = devices_sentence(&devices).filter(|_| wanted != Devices::Compared);
        if let Some(compared) = compared {
            let one_by_one = "shown one by one, in this order; --recorded-device N takes one";
            let note = match (wanted, shown.len()) {
                (Devices::All, count) => format!("{count} devices, {one_by_one}"),
                (_, 1) => {
                    let taken = format!("Device {} is taken", first.device);
                    format!("{compared} {taken}; --recorded-device N takes another")
                }
                _ => format!("{compared} They are {one_by_one}"),
            };
            write_note(format_args!("{}: {note}", shown_path(path)));
        }
        let others = match shown.as_slice() {
            [] | [_] => return take(path, act, &name, first),
            [_, others @ ..] => others,
        };
        let mut take_named = |number: u32, trace: Result<Trace>| {
            let name = format!("{name} device {number}");
            let done = trace.and_then(|trace| take(path, act, &name, trace));
            or_printed(done, &name, failed)
        };
        let mut outcome = take_named(first.device, Ok(first))?;
        for number in others {
            let trace = self.read(path, &source, Some(*number));
            let trace = trace.map(|trace| Trace { devices: devices.clone(), ..trace });
            outcome = outcome.max(take_named(*number, trace)?);
        }
        Ok(outcome)
    }

    /// Reads a recording, with a progress bar.
    fn read(&self, path: &Path, source: &RecordingInput<'_>, device: Option<u32>) -> Result<Trace> {
        let name = shown_path(path);
        let (file, length): (Box<dyn Read + '_>, u64) = match source {
            RecordingInput::File(path) => {
                let file = opened(path)?;
                let length = file.metadata().map_or(0, |metadata| metadata.len());
                (Box::new(file), length)
            }
            RecordingInput::Kept(bytes) => (Box::new(bytes.as_slice()), bytes.len() as u64),
        };
        let bar = progress(length, &format!("reading {name}"));
        let trace = self.decoded(&name, file, device, Some(&|done| bar.set_position(done)))?;
        bar.finish_and_clear();
        if trace.event_count() == 0 && device.is_some() {
            let why = nothing_in(&trace, device);
            write_note(format_args!("only the blocks that lived are taken: {name}: {why}"));
        }
        Ok(trace)
    }

    /// Reads the device to look at first, or the one that the user selected, from a file. Prints nothing.
    pub(crate) fn read_silently(&self, path: &Path) -> Result<Trace, String> {
        let name = shown_path(path);
        let file = opened(path)?;
        self.decoded(&name, Box::new(file), self.recorded_device, None)
            .map_err(|error| error.to_string())
    }

    /// Decodes a recording. One without events and without live blocks is an error.
    fn decoded(
        &self,
        name: &str,
        file: Box<dyn Read + '_>,
        device: Option<u32>,
        progress: Option<&dyn Fn(u64)>,
    ) -> Result<Trace> {
        let limits = Limits { decoded_bytes: self.max_input, device, ..Limits::default() };
        let trace = reader::read_bytes(name, file, &limits, progress)?;
        let live =
            |segment: &SegmentLayout| segment.bytes_in(&[BlockStateName::ActiveAllocated]) > 0;
        let has_nothing = trace.event_count() == 0 && trace.totals.is_none();
        if has_nothing && !trace.segments.iter().any(live) {
            return Err(format!("{name}: {}", nothing_in(&trace, device)).into());
        }
        Ok(trace)
    }

    /// Returns the options that select what is read, as text.
    pub(crate) fn read_options(&self) -> String {
        format!("{:?} {}", self.recorded_device, self.max_input)
    }
}

/// Opens a file. A folder is an error, which some systems report only when it is read.
fn opened(path: &Path) -> Result<std::fs::File, String> {
    let name = shown_path(path);
    if path.is_dir() {
        let folder = name.trim_end_matches('/');
        return Err(format!(
            "{name}: it is a folder; pass the recordings in it, as {folder}/*.pickle"
        ));
    }
    std::fs::File::open(path).map_err(|error| format!("{name}: {error}"))
}

/// Prints an error and adds it to `failed`, so that the remaining recordings are still processed. An error
/// that means a closed pipe is returned.
fn or_printed(done: Result<Outcome>, name: &str, failed: &mut Vec<NotJudged>) -> Result<Outcome> {
    match done {
        Err(error) if !is_closed_pipe(&*error) => {
            write_stderr(format_args!("stratalloc: {error}"));
            failed.push(NotJudged { name: name.to_owned(), error: error.to_string() });
            Ok(Outcome::Unjudged)
        }
        done => done,
    }
}

/// Processes one device of the file at `path`. Errors of the replay include the path.
fn take(path: &Path, act: &mut Act<'_>, name: &str, trace: Trace) -> Result<Outcome> {
    let UnknownEntries { entries, first_action } = &trace.unknown;
    if *entries > 0 {
        let ignored = counted_as(*entries, "entry is ignored", "entries are ignored");
        write_note(format_args!(
            "{}: {ignored}: unknown actions, the first {first_action:?}",
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

/// The source of a recording, which is read once for each device.
enum RecordingInput<'a> {
    File(&'a Path),
    /// The bytes of standard input, which can be read only once.
    Kept(Vec<u8>),
}

impl<'a> RecordingInput<'a> {
    fn of(path: &'a Path, max_input: u64) -> Result<Self> {
        if path != Path::new("-") {
            return Ok(Self::File(path));
        }
        // Limits the memory for input that will be refused anyway. No encoding makes a file larger than
        // this.
        let most = max_input.saturating_add(max_input / 8).saturating_add(1 << 16);
        let mut kept = Vec::new();
        std::io::stdin().lock().take(most).read_to_end(&mut kept).map_err(|e| format!("-: {e}"))?;
        Ok(Self::Kept(kept))
    }
}

/// Returns the limit of a recording, and the number of its entries that are ignored because their action
/// is unknown, as JSON.
pub(crate) fn limit_json(recording: &Recording) -> Value {
    json!({
        "limit_bytes": recording.limit.map(|limit| limit.bytes),
        "limit_below_bytes": recording.limit.and_then(|limit| limit.below_bytes),
        "limit_from": recording.limit.map(|limit| limit.source.to_string()),
        "limit_inferred": recording.limit_is_inferred(),
        "limit_certainty": recording.limit.map(|limit| limit.source.certainty()),
        "unknown_entries": recording.trace.unknown.entries,
    })
}

/// Prints the remarks about a recording, such as that it begins late.
pub(crate) fn write_remarks(name: &str, recording: &Recording) {
    for remark in remarks(recording) {
        write_note(format_args!("{}: {remark}", shown(name)));
    }
}

/// Returns a message for a recording without events. `device` is the device that the user selected, if
/// any.
fn nothing_in(trace: &Trace, device: Option<u32>) -> String {
    match device {
        _ if trace.requests_only => "it holds no requests".to_owned(),
        Some(device) => format!("it holds no events of device {device}; others may have some"),
        None => "it holds no events: was torch.cuda.memory._record_memory_history on while the \
                 program ran?"
            .to_owned(),
    }
}

/// Returns the name to print for a recording: the file's name without its extensions.
pub(crate) fn name_of(path: &Path) -> String {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let known = [".xz", ".gz", ".zst", ".pickle", ".json", ".csv"];
    known
        .iter()
        .fold(file, |name, ending| name.strip_suffix(ending).map(str::to_owned).unwrap_or(name))
}
