//! `stratalloc advise`: finds a setting with which a program needs less memory, and the causes of its
//! need.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use stratalloc::config::{TorchVersion, shown};
use stratalloc_analysis::{AdviceOptions, Answer, Compared, Question, Recording, answer};
use stratalloc_recording::{ReplayError, Trace};

use super::assertion::{Assertion, Verdict, fits};
use super::junit::{self, Case};
use super::outcome::{Outcome, Result, out, unless_closed};
use super::recordings::{Devices, NotJudged, Recordings};
use super::show::{emphasised, progress};
use super::text;

/// Arguments of `advise`.
#[derive(Args, Debug)]
pub(crate) struct Advise {
    #[command(flatten)]
    recordings: Recordings,
    /// Try only the settings that help most often: seconds instead of up to a minute.
    #[arg(long)]
    quick: bool,
    /// Compare stacks by all their frames, and print all of them: also those of the unwinder, the allocator,
    /// the dispatcher, autograd's engine, Python's interpreter and generated wrappers.
    #[arg(long)]
    all_frames: bool,
    /// Version of PyTorch that the settings are for, such as 2.8. Default: the oldest that can have made
    /// the recording.
    #[arg(long, value_name = "VERSION")]
    torch: Option<TorchVersion>,
    /// Check whether the program fits in this much memory as it is. The exit code is 1 if it needs more, or
    /// if requests failed when it was recorded. If it needs more, the cheapest setting with which it fits is
    /// named. A size such as 24GiB, or a share of --total-memory, such as 80%.
    #[arg(long, value_name = "SIZE", value_parser = fits)]
    fits: Option<Assertion>,
    /// Check a condition, such as needs<=24GiB, live_peak<20GiB or failures==0. The exit code is 1 if it does
    /// not hold. Can be given several times. needs is the need as recorded, least_need the smallest of all
    /// settings that are tried, failures the number of failed requests.
    #[arg(long, value_name = "CONDITION")]
    assert: Vec<Assertion>,
    /// Write the results of the conditions to this file, in JUnit's format.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per recording.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &Advise) -> Result<Outcome> {
    let has_conditions = args.assertions().next().is_some();
    junit::check(args.junit.as_deref(), has_conditions, &args.recordings.files)?;
    let mut cases = Vec::new();
    let mut act = |name: &str, trace| advise(args, name, trace, &mut cases);
    let mut failed = Vec::new();
    let outcome = args.recordings.each_or(Devices::Each, &mut act, &mut failed)?;
    for NotJudged { name, error } in &failed {
        cases.extend(
            args.assertions()
                .map(|assertion| Case { name: name.clone(), answer: assertion.unjudged(error) }),
        );
    }
    if let Some(file) = &args.junit {
        junit::write(file, "advise", &cases)?;
    }
    Ok(outcome)
}

impl Advise {
    fn assertions(&self) -> impl Iterator<Item = &Assertion> {
        self.fits.iter().chain(&self.assert)
    }

    fn question(&self, recording: &Recording) -> Question {
        // The strictest condition decides: if the recorded setting meets it, no other setting is
        // searched.
        let total_bytes = recording.memory.total_bytes;
        let enough = self.assertions().map(|assertion| assertion.enough_bytes(total_bytes));
        let enough = enough.collect::<Option<Vec<u64>>>();
        let enough_bytes = enough.and_then(|all| all.into_iter().min());
        let within = self.assertions().filter_map(|assertion| assertion.most_bytes(total_bytes));
        let (quick, torch) = (self.quick, self.torch);
        Question {
            advice: AdviceOptions { quick, torch, enough_bytes, ..AdviceOptions::default() },
            within_bytes: within.collect(),
            compared: if self.all_frames { Compared::AllFrames } else { Compared::Code },
            ..Question::default()
        }
    }
}

/// Prints the answer about a recording. Adds the results of the conditions to `cases`.
fn advise(args: &Advise, name: &str, trace: Trace, cases: &mut Vec<Case>) -> Result<Outcome> {
    let recording = args.recordings.recording(name, trace, "compared with PyTorch's default");
    let question = args.question(&recording);
    let bar = progress(1, &format!("trying settings on {}", shown(name)));
    let found = answer(name, &recording, &question, &|done, known| {
        bar.set_length(known as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let verdicts = verdicts(args, &recording, &found);
    let printed = print(args, &question, &found, &verdicts);
    // The exit code does not depend on whether the conditions can be printed.
    if verdicts.is_empty() {
        printed?
    } else {
        unless_closed(printed)?
    }
    if let Some(no_history) = found.no_history.filter(|_| !verdicts.is_empty()) {
        return Err(ReplayError::from(no_history).into());
    }
    let of = |verdict: &Verdict| Case { name: name.to_owned(), answer: verdict.answer.clone() };
    cases.extend(verdicts.iter().map(of));
    Ok(verdicts.iter().map(|verdict| verdict.answer.outcome).max().unwrap_or_default())
}

fn verdicts(args: &Advise, recording: &Recording, found: &Answer) -> Vec<Verdict> {
    let total_bytes = recording.memory.total_bytes;
    let mut within = found.within.iter();
    let check = |assertion: &Assertion| {
        let has_setting = assertion.most_bytes(total_bytes).is_some();
        let setting = has_setting.then(|| within.next().cloned().flatten()).flatten();
        assertion.check(found, total_bytes, setting)
    };
    args.assertions().map(check).collect()
}

fn print(
    args: &Advise,
    question: &Question,
    found: &Answer,
    verdicts: &[Verdict],
) -> io::Result<()> {
    if args.json {
        let mut json = json!(found);
        json["assertions"] = verdicts.iter().map(Verdict::json).collect();
        return writeln!(out(), "{json}");
    }
    match (verdicts, found.no_history) {
        ([], _) => text::write(found, question),
        (_, Some(_)) => text::write_no_history(found),
        _ => write_verdicts(&found.trace, verdicts),
    }
}

fn write_verdicts(name: &str, verdicts: &[Verdict]) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", shown(name))?;
    for verdict in verdicts {
        writeln!(out, "{}", emphasised(&verdict.answer.sentence))?;
    }
    writeln!(out)
}
