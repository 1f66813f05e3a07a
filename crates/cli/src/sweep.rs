//! `stratalloc sweep`: the recordings of many ranks as one job.

mod state;
mod work;

use std::io::{self, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use stratalloc::config::{TorchVersion, shown};
use stratalloc_analysis::{
    Advised, Found, Group, Paste, Scanned, counted_as, grouped, ranks_sentence,
};
use stratalloc_recording::Trace;

use super::files;
use super::options::{ExtraConfs, PageFile, SearchArguments};
use super::outcome::{BadArguments, Outcome, Result, out, write_note};
use super::recordings::Recordings;
use super::report::Target;
use super::settings::{self, NamedConf};
use super::show::{
    Align, check_sort, columns, is_json, joined, near, paste_json, progress, say, shown_conf,
    table, table_text,
};
use state::State;
use work::Sweep;

/// Analyse the recordings of many ranks: those with equal requests once, and which ranks differ.
#[derive(Args, Debug)]
pub(crate) struct SweepArguments {
    #[command(flatten)]
    page: PageFile,
    /// Number of threads. Default: the number of processors.
    #[arg(long, value_name = "N", value_parser = thread_count)]
    jobs: Option<NonZero<usize>>,
    /// File to which finished work is added. A run with the same file does only the rest.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Do only this part of the work and print its results as JSON. For programs that distribute a sweep.
    #[arg(long, hide = true)]
    part: Option<Part>,
    /// The recording of the largest group, for `--part groups`.
    #[arg(long, hide = true, value_name = "TRACE")]
    against: Option<PathBuf>,
    #[command(flatten)]
    search: SearchArguments,
    #[command(flatten)]
    extra: ExtraConfs,
    #[command(flatten)]
    recordings: Recordings,
}

/// A part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Read the files.
    Files,
    /// Search settings for each file, as for the first one of a group.
    Groups,
    /// Try the configurations of `--conf` on each file.
    Needs,
}

/// The maximum number of groups whose difference is printed, and of recordings that are named for each.
const SHOWN: [usize; 2] = [20, 4];

/// Parses a number of threads.
fn thread_count(text: &str) -> Result<NonZero<usize>, String> {
    text.parse().map_err(|_| "expected a number of threads, 1 or more".to_owned())
}

/// The headings of the table.
const HEADING: &str = "recordings: | needs MiB: | at best MiB: | best setting | first of them";

pub(crate) fn run(args: &SweepArguments) -> Result<Outcome> {
    check_sort(&[HEADING])?;
    let mut paths = args.recordings.files.clone();
    if paths.iter().any(|path| path == Path::new("-")) {
        return Err(BadArguments("sweep reads files, not standard input".to_owned()).into());
    }
    let output = &args.page.output;
    if output.as_deref() == Some(Path::new("-")) {
        return Err(BadArguments("sweep writes its page to a file only".to_owned()).into());
    }
    for written in args.state.iter().chain(output) {
        files::spare(&paths, written)?;
    }
    if let (Some(state), Some(output)) = (&args.state, output)
        && files::is_same(state, output)
    {
        let text = "--state and --output name the same file; give each its own";
        return Err(BadArguments(text.to_owned()).into());
    }
    let confs = args.recordings.parse_confs(&args.extra.conf)?;
    let target = output.as_deref().map(Target::open).transpose()?;
    let state = args.state.as_deref().map(State::open).transpose()?.unwrap_or_default();
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok());
    let jobs = jobs.map_or(1, NonZero::get);
    let read = |path: &Path| -> Result<Trace, String> { args.recordings.read_silently(path) };
    let parse = |text: &str| settings::recorded(text).map_err(|error| error.to_string());
    let against = args.against.as_ref().map(|_| paths.len());
    paths.extend(args.against.clone());
    let options = (args.recordings.memory(), args.search.options());
    let sweep =
        Sweep::new(&paths, (&read, &parse), args.recordings.read_options(), options, &state);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(jobs).build()?;
    let mut job = Job { args, sweep, confs };
    let done: io::Result<Option<Found>> = match args.part {
        None => job.scan(jobs).and_then(|found| pool.install(|| job.analyse(found)).map(Some)),
        Some(Part::Files) => job.scan(jobs).map(|_| None),
        Some(part) => pool.install(|| job.only(part, against)).map(|()| None),
    };
    let Some(found) = done? else { return Ok(Outcome::Good) };
    if let Some(target) = target {
        target.write(
            stratalloc_page::sweep_page(&found, &names(args), args.search.torch()).as_bytes(),
        )?;
    }
    write(args, &found)?;
    let is_complete = found.analysed().count() == found.groups.len() && found.unread.is_empty();
    Ok(if is_complete { Outcome::Good } else { Outcome::Unjudged })
}

/// Returns the paths of the recordings as text.
fn names(args: &SweepArguments) -> Vec<String> {
    args.recordings.files.iter().map(|path| path.display().to_string()).collect()
}

struct Job<'a> {
    args: &'a SweepArguments,
    sweep: Sweep<'a>,
    confs: Vec<NamedConf>,
}

impl Job<'_> {
    fn name(&self, index: usize) -> String {
        self.sweep.paths[index].display().to_string()
    }

    /// Prints a line of JSON, if the user wants JSON.
    fn line(&self, line: &Value) -> io::Result<()> {
        if is_json() || self.args.part.is_some() { writeln!(out(), "{line}") } else { Ok(()) }
    }

    fn scan(&self, jobs: usize) -> io::Result<Found> {
        let bar = progress(self.sweep.paths.len() as u64, "reading recordings");
        let done = |index, scanned: &Result<Scanned, String>| {
            bar.inc(1);
            self.line(&with_error(json!({"recording": self.name(index)}), scanned))
        };
        let scanned = self.sweep.scan(jobs, &done)?;
        bar.finish_and_clear();
        let several = scanned.iter().flatten().filter(|scanned| scanned.other_devices > 0);
        let several = several.count() as u64;
        if several > 0 {
            let count = counted_as(several, "recording has", "recordings have");
            write_note(format_args!(
                "{count} several devices: the one whose requests failed first, else the one with the \
                 most reserved bytes, is taken; --recorded-device N takes another"
            ));
        }
        Ok(Found::of(&scanned))
    }

    /// Analyses each group, and tries the best settings of each on all.
    fn analyse(&mut self, mut found: Found) -> io::Result<Found> {
        let bar = progress(2 * found.groups.len() as u64, "trying settings");
        let mut largest = None;
        for (at, group) in found.groups.iter_mut().enumerate() {
            for member in group.members.clone() {
                match self.sweep.load(member, largest) {
                    Ok(()) => {
                        group.analysed = member;
                        if let Some(largest) = largest {
                            match self.sweep.difference(member, largest)? {
                                Ok(difference) => group.difference = Some(difference),
                                Err(error) => write_note(format_args!(
                                    "{} is not compared: {}",
                                    shown(&self.name(member)),
                                    shown(&error)
                                )),
                            }
                        }
                        group.advised = self.sweep.advise(member)?;
                        break;
                    }
                    Err(error) => group.advised = Err(error),
                }
            }
            if group.advised.is_ok() && group.analysed != group.members[0] {
                write_note(format_args!(
                    "{} cannot be read again: {} is analysed instead",
                    shown(&self.name(group.members[0])),
                    shown(&self.name(group.analysed))
                ));
            }
            let largest = *largest.get_or_insert(group.analysed);
            if let Ok(Advised { conf_error: Some(error), .. }) = &group.advised {
                let name = shown(&self.name(group.analysed));
                write_note(format_args!("{name}: compared with PyTorch's default: {error}"));
            }
            self.line(&self.group_json(at, group, largest))?;
            bar.inc(1);
        }
        found.confs = found.candidates(self.confs.iter().map(|(text, _)| text.clone()));
        let config = |conf: &String| {
            let own =
                self.confs.iter().find(|(text, _)| text == conf).map(|(_, config)| config.clone());
            let config = own.map_or_else(|| settings::recorded(conf), Ok);
            config.map(|config| (conf.clone(), config)).map_err(|error| error.to_string())
        };
        let confs: Result<Vec<NamedConf>, String> = found.confs.iter().map(config).collect();
        let confs = confs.map_err(io::Error::other)?;
        for group in &mut found.groups {
            let Ok(Advised { best_conf, best_needs_bytes, .. }) = &group.advised else { continue };
            // The need under the group's own best setting is known.
            let others: Vec<_> =
                confs.iter().filter(|(conf, _)| conf != best_conf).cloned().collect();
            match self.sweep.needs(group.analysed, &others)? {
                Ok(needs) => {
                    let mut needs = needs.into_iter();
                    let need = |(conf, _): &NamedConf| match conf == best_conf {
                        true => *best_needs_bytes,
                        false => needs.next().flatten(),
                    };
                    group.needs = confs.iter().map(need).collect();
                }
                Err(error) => group.advised = Err(error),
            }
            bar.inc(1);
        }
        Ok(found)
    }

    /// Does a part of the work for each file.
    fn only(&mut self, part: Part, against: Option<usize>) -> io::Result<()> {
        for index in 0..self.args.recordings.files.len() {
            let name = json!({"recording": self.name(index)});
            if part == Part::Groups {
                if let Some(against) = against {
                    // Without a result, the comparison is left to the process that combines the parts.
                    let _ = self.sweep.difference(index, against)?;
                }
                let advised = self.sweep.advise(index)?;
                self.line(&with_error(name, &advised))?;
                continue;
            }
            let needs = self.sweep.needs(index, &self.confs)?.map(|needs| json!({"needs": needs}));
            self.line(&with_error(name, &needs))?;
        }
        Ok(())
    }

    fn group_json(&self, at: usize, group: &Group, largest: usize) -> Value {
        let names = group.members.iter().map(|index| self.name(*index));
        group_json(at, group, names.collect(), &self.name(largest), self.args.search.torch())
    }
}

/// Adds the fields of a result, or the field `error`.
fn with_error<T: serde::Serialize>(object: Value, result: &Result<T, String>) -> Value {
    joined([
        object,
        match result {
            Ok(result) => json!(result),
            Err(error) => json!({"error": error}),
        },
    ])
}

/// Adds the line that sets the best setting to the result of a group.
fn with_paste(object: Value, group: &Group, torch: Option<TorchVersion>) -> Value {
    let object = with_error(object, &group.advised);
    match &group.advised {
        Ok(advised) => joined([object, paste_json(&Paste::of(&advised.best_conf, torch))]),
        Err(_) => object,
    }
}

fn group_json(
    at: usize,
    group: &Group,
    names: Vec<String>,
    largest: &str,
    torch: Option<TorchVersion>,
) -> Value {
    let difference = group.difference.as_ref().map(|difference| {
        joined([json!({"sentence": difference.sentence(largest)}), json!(difference)])
    });
    let object = json!({"group": at + 1, "recordings": names, "difference": difference});
    with_paste(object, group, torch)
}

/// Prints the results.
fn write(args: &SweepArguments, found: &Found) -> io::Result<()> {
    let names = names(args);
    let (heading, rows) = rows(found, &names, args.search.torch());
    let facts = facts(found, &names, args.search.torch());
    let compared = ranks_sentence(&found.ranks, &names).map(|sentence| shown(&sentence));
    let mut out = out();
    if !is_json() {
        compared.iter().try_for_each(|sentence| say(&mut out, format_args!("{sentence}\n")))?;
        table(&mut out, &heading, &rows)?;
        return facts.iter().try_for_each(|fact| say(&mut out, fact));
    }
    let mut of_all: Vec<Option<Value>> = vec![None; names.len()];
    for (index, error) in &found.unread {
        of_all[*index] = Some(json!({"recording": names[*index], "error": error}));
    }
    let largest = found.largest(&names);
    let groups = found.groups.iter().enumerate().map(|(at, group)| {
        let members: Vec<String> = group.members.iter().map(|at| names[*at].clone()).collect();
        for index in &group.members {
            let row = json!({"recording": names[*index], "group": at + 1});
            of_all[*index] = Some(with_paste(row, group, args.search.torch()));
        }
        group_json(at, group, members, largest, args.search.torch())
    });
    let groups: Vec<Value> = groups.collect();
    let advice = found.advice().map(|(conf, bytes)| {
        let paste = paste_json(&Paste::of(conf, args.search.torch()));
        joined([json!({"conf": conf, "needs_bytes": bytes}), paste])
    });
    let ranks = found.ranks.iter();
    let ranks =
        ranks.map(|(at, figures)| joined([json!({"recording": names[*at]}), json!(figures)]));
    let lines = facts.iter().map(|fact| format!("\n{}", shown(fact)));
    let begin = compared.as_ref().map_or_else(String::new, |sentence| format!("{sentence}\n\n"));
    let text = begin + table_text(&heading, &rows).trim_end() + &lines.collect::<String>();
    let all = json!({
        "rows": of_all,
        "groups": groups,
        "ranks": ranks.collect::<Vec<_>>(),
        "ranks_sentence": compared,
        "worst": found.worst().map(|group| &names[group.analysed]),
        "advice": advice,
        "table": text,
    });
    writeln!(out, "{all}")
}

type GroupTable = (Vec<(&'static str, Align)>, Vec<Vec<String>>);

/// Returns the table of the groups.
fn rows(found: &Found, names: &[String], torch: Option<TorchVersion>) -> GroupTable {
    let need = |bytes: Option<u64>| bytes.map_or_else(|| "none fits".to_owned(), near);
    let worst = found.worst().map(|group| group.analysed);
    let row = |group: &Group| {
        let mut row = vec![grouped(group.members.len() as u64)];
        let mark = if worst == Some(group.analysed) { " (most)" } else { "" };
        let name = format!("{}{mark}", names[group.analysed]);
        row.extend(match &group.advised {
            Ok(Advised { needs_bytes, best_needs_bytes, best_conf, .. }) => {
                let set = shown_conf(&Paste::of(best_conf, torch).set);
                [need(*needs_bytes), need(*best_needs_bytes), set, name]
            }
            Err(error) => {
                ["-".to_owned(), "-".to_owned(), "-".to_owned(), format!("{name}: {error}")]
            }
        });
        row
    };
    let heading = columns(HEADING);
    (heading, found.groups.iter().map(row).collect())
}

/// Returns the lines below the table: the recordings that differ, those without a result, and the advice.
fn facts(found: &Found, names: &[String], torch: Option<TorchVersion>) -> Vec<String> {
    let mut facts = Vec::new();
    let largest = found.largest(names);
    let others = found.groups.iter().filter_map(|group| Some((group, group.difference.as_ref()?)));
    let sentence = |(group, difference): (&Group, &stratalloc_analysis::Difference)| {
        format!("{} {}", named(group, names), difference.sentence(largest))
    };
    facts.extend(others.clone().take(SHOWN[0]).map(sentence));
    let more = others.count().saturating_sub(SHOWN[0]) as u64;
    if more > 0 {
        facts.push(format!("{} not shown.", counted_as(more, "more group is", "more groups are")));
    }
    facts.extend(found.unread.iter().map(|(_, error)| format!("error: {error}")));
    let of = found.partial().unwrap_or_else(|| "all".to_owned());
    facts.push(match found.advice() {
        None if found.groups.is_empty() => "No recording has a result.".to_owned(),
        None => format!("No setting that was tried suits {of}."),
        Some((conf, bytes)) => {
            format!("For {of}: {}, in {} MiB.", Paste::of(conf, torch), near(bytes))
        }
    });
    facts
}

/// Returns the names of a group's recordings.
fn named(group: &Group, names: &[String]) -> String {
    let first = group.members.iter().take(SHOWN[1]).map(|index| names[*index].as_str());
    let first = first.collect::<Vec<_>>().join(", ");
    match group.members.len().saturating_sub(SHOWN[1]) {
        0 => first,
        more => format!("{first} and {} more", grouped(more as u64)),
    }
}
