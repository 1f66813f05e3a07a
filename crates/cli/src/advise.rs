//! `stratalloc advise`: finds a setting with which a program needs less memory, and the causes of its
//! need.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;

use stratalloc::config::shown;
use stratalloc_analysis::{AdviceOptions, Answer, Compared, Question, Recording, answer};
use stratalloc_recording::{ReplayError, Trace};

use super::assertion::{Absolute, Assertion, AssertionVerdict, fits};
use super::host::Terminal;
use super::junit::TestCase;
use super::options::{CONDITIONS, Conditions, ExtraConfs, SearchArguments};
use super::outcome::{Outcome, Result, out, unless_closed};
use super::recordings::{Devices, NotJudged, Recordings};
use super::settings::NamedConf;
use super::show::{emphasised, is_json, is_markdown};
use super::text;
use super::view;

/// Find the setting with which a recorded program needs less memory, and explain its need.
#[derive(Args, Debug)]
pub(crate) struct Advise {
    /// Compare stacks by all their frames, and print all of them: also those of the unwinder, the allocator,
    /// the dispatcher, autograd's engine, Python's interpreter and generated wrappers.
    #[arg(long)]
    all_frames: bool,
    /// Print all of the answer, as -v does, instead of what fits on one screen.
    #[arg(long)]
    all: bool,
    /// Check whether the program fits in this much memory as it is. The exit code is 1 if it needs more, or
    /// if requests failed when it was recorded. If it needs more, the cheapest setting with which it fits is
    /// named. A size such as 24GiB, or a share of --total-memory, such as 80%.
    #[arg(long, value_name = "SIZE", value_parser = fits, help_heading = CONDITIONS)]
    fits: Option<Assertion>,
    #[command(flatten)]
    conditions: Conditions<Absolute>,
    #[command(flatten)]
    search: SearchArguments,
    #[command(flatten)]
    extra: ExtraConfs,
    #[command(flatten)]
    recordings: Recordings,
}

pub(crate) fn run(args: &Advise) -> Result<Outcome> {
    let has_conditions = args.assertions().next().is_some();
    args.conditions.check(has_conditions, &args.recordings.files)?;
    let mut cases = Vec::new();
    let settings = args.recordings.parse_confs(&args.extra.conf)?;
    let mut act = |name: &str, trace| advise(args, &settings, name, trace, &mut cases);
    let mut failed = Vec::new();
    // A condition on a device without events would never be judged.
    let devices = match has_conditions {
        true => Devices::Each,
        false if is_json() || args.wants_all() => Devices::All,
        false => Devices::Compared,
    };
    let outcome = args.recordings.each_or(devices, &mut act, &mut failed)?;
    for NotJudged { name, error } in &failed {
        cases.extend(args.assertions().map(|assertion| TestCase {
            name: name.clone(),
            judgement: assertion.unjudged(error),
        }));
    }
    args.conditions.write("advise", &cases)?;
    Ok(outcome)
}

impl Advise {
    fn assertions(&self) -> impl Iterator<Item = &Assertion> {
        self.fits.iter().chain(&self.conditions.assert)
    }

    /// Returns true if all of an answer is printed. What the caller asked for is not in the short form.
    fn wants_all(&self) -> bool {
        let is_asked = self.all_frames || !self.extra.conf.is_empty();
        self.all || is_asked || view::current().is_verbose() || is_markdown()
    }

    fn question(&self, recording: &Recording) -> Question {
        // The strictest condition decides: if the recorded setting meets it, no other setting is
        // searched.
        let total_bytes = recording.memory.total_bytes;
        let enough = self.assertions().map(|assertion| assertion.enough_bytes(total_bytes));
        let enough = enough.collect::<Option<Vec<u64>>>();
        let enough_bytes = enough.and_then(|all| all.into_iter().min());
        let within = self.assertions().filter_map(|assertion| assertion.most_bytes(total_bytes));
        Question {
            // A condition on the recorded setting is always judged.
            advice: AdviceOptions {
                enough_bytes,
                always_recorded: self.assertions().next().is_some(),
                ..self.search.options()
            },
            within_bytes: within.collect(),
            compared: if self.all_frames { Compared::AllFrames } else { Compared::Code },
            ..Question::default()
        }
    }
}

/// Prints the answer about a recording. Adds the results of the conditions to `cases`.
fn advise(
    args: &Advise,
    settings: &[NamedConf],
    name: &str,
    trace: Trace,
    cases: &mut Vec<TestCase>,
) -> Result<Outcome> {
    let recording = args.recordings.recording(name, trace, "compared with PyTorch's default");
    let question = Question { settings: settings.to_vec(), ..args.question(&recording) };
    let mut terminal = Terminal::new(1, &format!("trying settings on {}", shown(name)));
    let found = answer(name, &recording, &question, &mut terminal)?;
    drop(terminal);
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
    let of = |verdict: &AssertionVerdict| TestCase {
        name: name.to_owned(),
        judgement: verdict.judgement.clone(),
    };
    cases.extend(verdicts.iter().map(of));
    Ok(verdicts.iter().map(|verdict| verdict.judgement.outcome).max().unwrap_or_default())
}

fn verdicts(args: &Advise, recording: &Recording, found: &Answer) -> Vec<AssertionVerdict> {
    let total_bytes = recording.memory.total_bytes;
    let mut within = found.within.iter();
    let check = |assertion: &Assertion| {
        let has_setting = assertion.most_bytes(total_bytes).is_some();
        let setting = has_setting.then(|| within.next().cloned().flatten()).flatten();
        assertion.check(found, total_bytes, setting)
    };
    args.assertions().map(check).collect()
}

/// Prints the answer, or the results of the conditions if there are any.
fn print(
    args: &Advise,
    question: &Question,
    found: &Answer,
    verdicts: &[AssertionVerdict],
) -> io::Result<()> {
    if is_json() {
        let mut json = json!(found);
        json["assertions"] = verdicts.iter().map(AssertionVerdict::json).collect();
        return writeln!(out(), "{json}");
    }
    match (verdicts, found.no_history) {
        ([], _) if args.wants_all() => text::write(found, question),
        ([], _) => text::write_short(found),
        (_, Some(_)) => text::write_no_history(found),
        _ => write_verdicts(&found.trace, verdicts),
    }
}

fn write_verdicts(name: &str, verdicts: &[AssertionVerdict]) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", shown(name))?;
    for verdict in verdicts {
        writeln!(out, "{}", emphasised(&verdict.judgement.sentence))?;
    }
    writeln!(out)
}
