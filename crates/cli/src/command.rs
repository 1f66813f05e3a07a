//! The commands of the program, and the command line that selects one.
//!
//! A command has a file of its own, with the type of its arguments and a function that runs it, and a row
//! of [`COMMANDS`]. The doc comment of the type is the command's text in the program's help. Options that
//! several commands have are in `options`.

use std::io::Write;

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser};

use super::bench::loops::Loops;
use super::outcome::{BadArguments, Outcome, Result, out};
use super::table::{self, TableOptions};
use super::view::{self, ViewOptions};
use super::{advise, bench, compare, diff, explain, forecast, info, replay, report, sweep};

/// The commands, in the order of the help text.
const COMMANDS: &[&dyn Command] = &[
    &command("explain", |args: &explain::Explain, _| explain::run(args)),
    &command("info", |args: &info::Info, _| info::run(args)),
    &command("replay", |args: &replay::Replay, _| replay::run(args)),
    &command("advise", |args: &advise::Advise, _| advise::run(args)),
    &command("compare", |args: &compare::Compare, _| compare::run(args)),
    &command("diff", |args: &diff::DiffArguments, _| diff::run(args)),
    &command("forecast", |args: &forecast::ForecastArguments, _| forecast::run(args)),
    &command("sweep", |args: &sweep::SweepArguments, _| sweep::run(args)),
    &command("report", |args: &report::ReportArguments, _| report::run(args)).without_json(),
    &command("bench", bench::run),
    &command("completions", |args: &Completions, _| args.run()).without_json(),
];

/// A command of the program.
trait Command {
    fn name(&self) -> &'static str;

    /// Adds the arguments and the help text.
    fn describe(&self, command: clap::Command) -> clap::Command;

    /// Runs the command with the parsed arguments.
    fn run(&self, matches: &mut ArgMatches, loops: &Loops) -> Result<Outcome>;
}

/// A command with arguments of type `A`.
struct CommandOf<A> {
    name: &'static str,
    prints_json: bool,
    run: fn(&A, &Loops) -> Result<Outcome>,
}

const fn command<A>(name: &'static str, run: fn(&A, &Loops) -> Result<Outcome>) -> CommandOf<A> {
    CommandOf { name, prints_json: true, run }
}

impl<A> CommandOf<A> {
    const fn without_json(self) -> Self {
        Self { prints_json: false, ..self }
    }
}

impl<A: Args> Command for CommandOf<A> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self, command: clap::Command) -> clap::Command {
        A::augment_args(command)
    }

    fn run(&self, matches: &mut ArgMatches, loops: &Loops) -> Result<Outcome> {
        let arguments = A::from_arg_matches_mut(matches).unwrap_or_else(|error| exit(error));
        if table::is_json() && !self.prints_json {
            return Err(BadArguments(format!("{} prints no JSON", self.name)).into());
        }
        (self.run)(&arguments, loops)
    }
}

/// Device-memory allocators, chosen by one string and measured on recordings of real programs.
#[derive(Parser)]
#[command(name = "stratalloc", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Program {
    #[command(flatten)]
    table: TableOptions,
    #[command(flatten)]
    view: ViewOptions,
}

/// The end of the help text.
const EXIT_CODES: &str = "Exit codes: 0 done, and every condition holds; 1 a condition does not hold, or a \
    verification found a difference; 2 no answer: the arguments are wrong, or a file cannot be read or \
    judged. Of several recordings, the largest code counts.";

/// Returns the command line with all commands.
fn program() -> clap::Command {
    let commands =
        COMMANDS.iter().map(|command| command.describe(clap::Command::new(command.name())));
    Program::command().subcommands(commands).subcommand_required(true).arg_required_else_help(true)
}

/// Prints an error of the arguments, and exits the process.
fn exit(error: clap::Error) -> ! {
    error.format(&mut program()).exit()
}

/// Runs the command that the program's arguments select. Exits the process if the arguments are invalid or
/// ask for help.
pub(crate) fn run(loops: &Loops) -> Result<Outcome> {
    view::set_colours_of_arguments(std::env::args_os());
    let mut matches = program().get_matches();
    let options = Program::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| exit(error));
    view::set(options.view);
    table::set_options(&options.table);
    let selected = matches.remove_subcommand().and_then(|(name, matches)| {
        Some((COMMANDS.iter().find(|command| command.name() == name)?, matches))
    });
    match selected {
        Some((command, mut matches)) => command.run(&mut matches, loops),
        None => exit(clap::Error::new(clap::error::ErrorKind::MissingSubcommand)),
    }
}

/// Print a shell's completion script for this program; write it to where the shell looks for it.
#[derive(Args)]
struct Completions {
    shell: clap_complete::Shell,
}

impl Completions {
    fn run(&self) -> Result<Outcome> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut program(), "stratalloc", &mut text);
        out().write_all(&text)?;
        Ok(Outcome::Good)
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
