//! The commands of the program, and the command line that selects one.
//!
//! A command is a type whose fields are its arguments: a file of its own and a row of [`COMMANDS`]. Its doc
//! comment is its text in the program's help.

use std::io::Write;

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser};

pub(crate) use super::bench::loops::Loops;
use super::outcome::{Outcome, Result, out};
use super::table::TableOptions;
use super::{advise, bench, compare, diff, explain, forecast, info, replay, report, sweep};

/// A command with its arguments.
pub(crate) trait Command {
    /// Runs the command. Only `bench` uses the loops.
    fn run(&self, loops: &Loops) -> Result<Outcome>;

    /// Returns whether the command can print JSON.
    fn can_print_json(&self) -> bool {
        true
    }
}

/// The commands, in the order of the help text.
const COMMANDS: &[Registered] = &[
    Registered::of::<explain::Explain>("explain"),
    Registered::of::<info::Info>("info"),
    Registered::of::<replay::Replay>("replay"),
    Registered::of::<advise::Advise>("advise"),
    Registered::of::<compare::Compare>("compare"),
    Registered::of::<diff::DiffArguments>("diff"),
    Registered::of::<forecast::ForecastArguments>("forecast"),
    Registered::of::<sweep::SweepArguments>("sweep"),
    Registered::of::<report::ReportArguments>("report"),
    Registered::of::<bench::Bench>("bench"),
    Registered::of::<Completions>("completions"),
];

/// A command that the program knows.
struct Registered {
    name: &'static str,
    /// Adds the arguments and the help text.
    describe: fn(clap::Command) -> clap::Command,
    parse: fn(&mut ArgMatches) -> Result<Box<dyn Command>, clap::Error>,
}

impl Registered {
    const fn of<C: Command + Args + 'static>(name: &'static str) -> Self {
        let parse: fn(&mut ArgMatches) -> Result<Box<dyn Command>, clap::Error> =
            |matches| Ok(Box::new(C::from_arg_matches_mut(matches)?));
        Self { name, describe: C::augment_args, parse }
    }
}

/// Device-memory allocators, chosen by one string and measured on recordings of real programs.
#[derive(Parser)]
#[command(name = "stratalloc", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Program {
    #[command(flatten)]
    table: TableOptions,
}

/// The end of the help text.
const EXIT_CODES: &str = "Exit codes: 0 done, and every condition holds; 1 a condition does not hold, or a \
    verification found a difference; 2 no answer: the arguments are wrong, or a file cannot be read or \
    judged. Of several recordings, the largest code counts.";

/// Returns the command line with all commands.
fn program() -> clap::Command {
    let commands = COMMANDS.iter().map(|known| (known.describe)(clap::Command::new(known.name)));
    Program::command().subcommands(commands).subcommand_required(true).arg_required_else_help(true)
}

/// The parsed command line.
pub(crate) struct Parsed {
    pub(crate) table: TableOptions,
    pub(crate) name: &'static str,
    pub(crate) command: Box<dyn Command>,
}

/// Parses the program's arguments. Exits the process if they are invalid or ask for help.
pub(crate) fn parse() -> Parsed {
    let parsed = parsed(&mut program().get_matches());
    parsed.unwrap_or_else(|error| error.format(&mut program()).exit())
}

fn parsed(matches: &mut ArgMatches) -> Result<Parsed, clap::Error> {
    let Program { table } = Program::from_arg_matches_mut(matches)?;
    let selected = matches.remove_subcommand().and_then(|(name, matches)| {
        Some((COMMANDS.iter().find(|known| known.name == name)?, matches))
    });
    let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
    let (known, mut matches) = selected.ok_or_else(missing)?;
    Ok(Parsed { table, name: known.name, command: (known.parse)(&mut matches)? })
}

/// Print a shell's completion script for this program; write it to where the shell looks for it.
#[derive(Args)]
struct Completions {
    shell: clap_complete::Shell,
}

impl Command for Completions {
    fn run(&self, _: &Loops) -> Result<Outcome> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut program(), "stratalloc", &mut text);
        out().write_all(&text)?;
        Ok(Outcome::Good)
    }

    fn can_print_json(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_all_commands_are_consistent() {
        program().debug_assert();
    }
}
