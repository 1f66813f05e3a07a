//! `stratalloc report`: writes one HTML page that shows how memory was used.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use stratalloc::config::shown;
use stratalloc::files::NewFile;
use stratalloc_analysis::lives::COLUMNS;
use stratalloc_analysis::{
    AdviceOptions, Budget, Question, Recording, Timeline, answer, counted_as, curves, described_on,
};
use stratalloc_page::{Drawn, HOLDERS, PAGE_BYTES};
use stratalloc_recording::Trace;

use super::host::Terminal;
use super::options::{ExtraConfs, PageFile, SearchArguments};
use super::outcome::{BadArguments, Outcome, Result, out, write_note};
use super::recordings::{Devices, Recordings, name_of};
use super::show::{near, say, shown_path};
use super::{files, settings};

/// The result without a search.
const UNSEARCHED: &str = "Settings were not searched (--no-search).";

/// Write a page for a browser that shows how memory was used.
#[derive(Args, Debug)]
#[command(mut_arg("output", |output| {
    output.help(
        "Write the page to this file; - is standard output. Default: next to the first recording, run.html for \
         run.pickle",
    )
}))]
pub(crate) struct ReportArguments {
    #[command(flatten)]
    page: PageFile,
    /// Draw the page at once: replay nothing, and take the advice from what the recording shows.
    #[arg(long, conflicts_with_all = ["quick", "seconds", "conf"])]
    no_search: bool,
    /// Open the page in the browser.
    #[arg(long)]
    open: bool,
    #[command(flatten)]
    search: SearchArguments,
    #[command(flatten)]
    extra: ExtraConfs,
    #[command(flatten)]
    recordings: Recordings,
}

pub(crate) fn run(args: &ReportArguments) -> Result<Outcome> {
    let output = match &args.page.output {
        Some(output) => output.clone(),
        None => beside(&args.recordings.files)?,
    };
    files::spare(&args.recordings.files, &output)?;
    if args.open && output == Path::new("-") {
        let why = "--open needs a file: standard output cannot be opened in a browser";
        return Err(BadArguments(why.to_owned()).into());
    }
    let question = Question {
        advice: AdviceOptions { always_recorded: false, ..args.search.options() },
        unsearched: args.no_search.then_some(UNSEARCHED),
        settings: args.recordings.parse_confs(&args.extra.conf)?,
        holders: HOLDERS,
        frames: false,
        ..Question::default()
    };
    let target = Target::open(&output)?;
    let mut report = stratalloc_page::Report::new(args.recordings.files.len());
    let mut add = |name: &str, trace: Trace| -> Result<Outcome> {
        add(args, &question, &mut report, name, trace)?;
        Ok(Outcome::Good)
    };
    let outcome = args.recordings.each(Devices::All, &mut add)?;
    if report.left_out > 0 {
        let count = counted_as(report.left_out as u64, "recording", "recordings");
        let most = PAGE_BYTES / 1_000_000;
        write_note(format_args!("{count} found no room on the page, which has {most} MB at most"));
    }
    if report.recordings() == 0 {
        return Ok(Outcome::Unjudged);
    }
    let page = report.page();
    target.write(page.as_bytes())?;
    if output != Path::new("-") {
        let count = counted_as(report.recordings() as u64, "recording", "recordings");
        let (size, path) = (near(page.len() as u64), shown_path(&output));
        let hint = if args.open { "" } else { "; open it in a browser" };
        say(&mut out(), format_args!("{path}: {count}, {size} MiB{hint}"))?;
    }
    if args.open {
        open::that(&output).map_err(|error| {
            format!("{}: no browser could be started: {error}", shown_path(&output))
        })?;
    }
    Ok(outcome)
}

/// Adds a recording to a page.
fn add(
    args: &ReportArguments,
    question: &Question,
    report: &mut stratalloc_page::Report,
    name: &str,
    trace: Trace,
) -> Result<()> {
    let own = settings::recorded(&trace.conf).map_err(|error| error.to_string());
    let error = own.as_ref().err();
    let notes: Vec<String> = error
        .map(|error| format!("Shown with PyTorch's default settings: {error}"))
        .into_iter()
        .collect();
    if let Some(error) = error {
        write_note(format_args!("{}: shown with PyTorch's default: {error}", shown(name)));
    }
    let mut terminal = Terminal::new(1, &format!("trying settings on {}", shown(name)));
    let budget = Budget::new(&terminal, question.advice.time);
    let memory = args.recordings.memory();
    let recording = match question.unsearched {
        Some(_) => Recording::unverified(trace, own.ok(), memory),
        None => Recording::timed(trace, own.ok(), memory, &budget),
    };
    let advice = AdviceOptions { time: budget.left(), ..question.advice };
    let question = Question { advice, ..question.clone() };
    // With memory that the user set, the moments are those of a replay. After a search the timeline is made
    // last, because it takes memory.
    let (found, timeline) = match question.unsearched.is_some() && !recording.is_memory_set {
        true => {
            let timeline = Timeline::recorded(&recording, COLUMNS)?;
            (described_on(name, &recording, &question, &timeline)?, timeline)
        }
        false => {
            let found = answer(name, &recording, &question, &mut terminal)?;
            (found, Timeline::recorded(&recording, COLUMNS)?)
        }
    };
    let curves = &curves(&recording, &timeline.lives, &found, &question, &terminal)?;
    report.add(&Drawn { answer: &found, timeline: &timeline, curves, notes: &notes });
    Ok(())
}

/// Returns the default path of the page: next to the first recording.
fn beside(recordings: &[PathBuf]) -> Result<PathBuf, BadArguments> {
    let named = recordings.first().filter(|file| *file != Path::new("-"));
    let named = named.map(|file| file.with_file_name(format!("{}.html", name_of(file))));
    named.ok_or_else(|| BadArguments("standard input has no name: -o names the page".to_owned()))
}

/// The destination of a page.
pub(super) enum Target {
    Stdout,
    /// An existing device or pipe.
    InPlace(NewFile),
    /// A new file appears only when the page is complete.
    File(PathBuf),
}

impl Target {
    /// Checks the destination. Called before any recording is read, so that an unwritable destination is
    /// found early.
    pub(super) fn open(output: &Path) -> Result<Self> {
        if output == Path::new("-") {
            return Ok(Self::Stdout);
        }
        // The temporary file is removed at once: the program may be killed while it tries settings.
        let file =
            NewFile::create(output).map_err(|error| format!("{}: {error}", shown_path(output)))?;
        Ok(if file.is_in_place() { Self::InPlace(file) } else { Self::File(output.to_owned()) })
    }

    pub(super) fn write(self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => Ok(out().write_all(bytes)?),
            Self::InPlace(mut file) => Ok(file.write_all(bytes)?),
            Self::File(path) => stratalloc::files::write(&path, bytes)
                .map_err(|error| format!("{}: {error}", shown_path(&path)).into()),
        }
    }
}
