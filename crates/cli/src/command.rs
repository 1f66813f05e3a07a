//! The commands of the program, and the command line that selects one.
//!
//! A command has a file of its own, with the type of its arguments and a function that runs it, and a row
//! of [`COMMANDS`]. The doc comment of the type is the command's text in the program's help. Options that
//! several commands have are in `options`.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, ValueHint};

use super::bench::loops::Loops;
use super::defaults::{self, Defaults};
use super::help::{self, ExitCodes};
use super::manual::{Completions, Man};
use super::outcome::{BadArguments, Outcome, Result};
use super::table::{self, TableOptions};
use super::tips;
use super::view::{self, ViewOptions};
use super::{advise, bench, compare, diff, explain, forecast, info, replay, report, sweep};

/// The name of the program.
pub(crate) const NAME: &str = "stratalloc";

/// The commands, in the order of the help text: first those that most users want.
const COMMANDS: &[&dyn Command] = &[
    &command("advise", |args: &advise::Advise, _| advise::run(args))
        .exits(ExitCodes::Conditions)
        .examples(&[
            "stratalloc advise run.pickle",
            "stratalloc advise --quick --fits 24GiB run.pickle",
            "stratalloc advise --assert \"needs<=40GiB\" --junit gate.xml run.pickle",
        ]),
    &command("report", |args: &report::ReportArguments, _| report::run(args))
        .prints("the same answer as JSON: stratalloc advise --json")
        .examples(&[
            "stratalloc report --open run.pickle",
            "stratalloc report --no-search -o page.html rank0.pickle rank1.pickle",
        ]),
    &command("diff", |args: &diff::DiffArguments, _| diff::run(args))
        .exits(ExitCodes::Conditions)
        .examples(&["stratalloc diff yesterday.pickle today.pickle --assert \"needs<=+2%\""]),
    &command("forecast", |args: &forecast::ForecastArguments, _| forecast::run(args)).examples(&[
        "stratalloc forecast batch=2:a.pickle batch=4:b.pickle --for batch=24",
        "stratalloc forecast seq=512:a.pickle seq=1024:b.pickle --for seq=4096 --fits 80GiB",
    ]),
    &command("sweep", |args: &sweep::SweepArguments, _| sweep::run(args))
        .examples(&["stratalloc sweep --quick --state sweep.state -o sweep.html ranks/*.pickle"]),
    &command("compare", |args: &compare::Compare, _| compare::run(args)).examples(&[
        "stratalloc compare run.pickle",
        "stratalloc compare --conf expandable_segments:True --torch 2.8 run.pickle",
    ]),
    &command("replay", |args: &replay::Replay, _| replay::run(args))
        .exits(ExitCodes::Verification)
        .examples(&[
            "stratalloc replay --verify run.pickle",
            "stratalloc replay --conf max_split_size_mb:64 --total-memory 24GiB run.pickle",
        ]),
    &command("explain", |args: &explain::Explain, _| explain::run(args)).examples(&[
        "stratalloc explain max_split_size_mb:64,expandable_segments:True",
        "stratalloc explain --all",
    ]),
    &command("info", |args: &info::Info, _| info::run(args))
        .examples(&["stratalloc info", "stratalloc info --pid 4242"]),
    &command("bench", bench::run).examples(&["stratalloc bench --conf backend:native --case pair"]),
    &command("completions", |args: &Completions, _| args.run())
        .prints("its output is for shells")
        .examples(&["stratalloc completions bash ~/.local/share/bash-completion/completions"]),
    &command("man", |args: &Man, _| args.run())
        .prints("its output is for man")
        .examples(&["stratalloc man ~/.local/share/man/man1"]),
];

/// The options of tables and of JSON.
const RESULT_OPTIONS: [&str; 4] = ["json", "format", "sort", "wide"];

/// A command of the program.
trait Command {
    fn name(&self) -> &'static str;

    /// Returns what the command prints instead of tables and JSON; `None` if it prints these.
    fn prints_instead(&self) -> Option<&'static str>;

    /// Adds the arguments and the help text.
    fn describe(&self, command: clap::Command) -> clap::Command;

    /// Runs the command with the parsed arguments.
    fn run(&self, matches: &mut ArgMatches, loops: &Loops) -> Result<Outcome>;
}

/// A command with arguments of type `A`.
struct CommandOf<A> {
    name: &'static str,
    prints_instead: Option<&'static str>,
    exits: ExitCodes,
    examples: &'static [&'static str],
    run: fn(&A, &Loops) -> Result<Outcome>,
}

const fn command<A>(name: &'static str, run: fn(&A, &Loops) -> Result<Outcome>) -> CommandOf<A> {
    CommandOf { name, prints_instead: None, exits: ExitCodes::Done, examples: &[], run }
}

impl<A> CommandOf<A> {
    /// The command prints no table and no JSON; `instead` is a hint.
    const fn prints(self, instead: &'static str) -> Self {
        Self { prints_instead: Some(instead), ..self }
    }

    const fn exits(self, exits: ExitCodes) -> Self {
        Self { exits, ..self }
    }

    const fn examples(self, examples: &'static [&'static str]) -> Self {
        Self { examples, ..self }
    }
}

impl<A: Args> Command for CommandOf<A> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prints_instead(&self) -> Option<&'static str> {
        self.prints_instead
    }

    fn describe(&self, command: clap::Command) -> clap::Command {
        let command = A::augment_args(command);
        // Shells offer files for values without a hint.
        let command = command.mut_args(|arg| {
            let takes_other =
                arg.get_value_hint() == ValueHint::Unknown && arg.get_action().takes_values();
            if takes_other { arg.value_hint(ValueHint::Other) } else { arg }
        });
        command.after_help(help::ending(self.examples, self.exits))
    }

    fn run(&self, matches: &mut ArgMatches, loops: &Loops) -> Result<Outcome> {
        let arguments = A::from_arg_matches_mut(matches).unwrap_or_else(|error| exit(error));
        (self.run)(&arguments, loops)
    }
}

/// Device-memory allocators, chosen by one string and measured on recordings of real programs.
#[derive(Parser)]
#[command(name = NAME, version, max_term_width = 100)]
struct Program {
    #[command(flatten)]
    table: TableOptions,
    #[command(flatten)]
    view: ViewOptions,
}

/// The examples of the program's help text.
const EXAMPLES: [&str; 3] = [
    "stratalloc advise run.pickle         which setting and which code to change",
    "stratalloc report --open run.pickle  a page that shows the memory over time",
    "stratalloc help advise               the options of a command",
];

/// Returns the command line with all commands.
pub(crate) fn program() -> clap::Command {
    program_of(described().collect())
}

/// Returns the command line with the defaults of the environment and of the file.
fn program_with(defaults: &Defaults) -> Result<clap::Command> {
    let with_defaults = |command| match defaults::are_for(&command) {
        true => defaults.set(command),
        false => Ok(command),
    };
    Ok(program_of(described().map(with_defaults).collect::<Result<_>>()?))
}

fn described() -> impl Iterator<Item = clap::Command> {
    COMMANDS.iter().map(|command| command.describe(clap::Command::new(command.name())))
}

fn program_of(commands: Vec<clap::Command>) -> clap::Command {
    let mut program = Program::command()
        .subcommands(commands)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(help::ending(&EXAMPLES, ExitCodes::All));
    // Commands get the options of all commands when the program is built. Those that a command refuses are
    // not offered.
    program.build();
    let refuses = |name: &str| {
        COMMANDS.iter().any(|command| command.name() == name && command.prints_instead().is_some())
    };
    program.mut_subcommands(|command| match refuses(command.get_name()) {
        true => command.mut_args(|arg| {
            let is_refused = RESULT_OPTIONS.contains(&arg.get_id().as_str());
            if is_refused { arg.hide(true) } else { arg }
        }),
        false => command,
    })
}

/// Prints an error of the arguments with its tips, and exits the process.
fn exit(mut error: clap::Error) -> ! {
    let mut program = program();
    tips::add(&mut error, &program);
    error.format(&mut program).exit()
}

/// Runs the command that the program's arguments select. Exits the process if the arguments are invalid or
/// ask for help.
pub(crate) fn run(loops: &Loops) -> Result<Outcome> {
    view::set_colours_of_arguments(std::env::args_os());
    let matches_of = |program: clap::Command| {
        program.try_get_matches().unwrap_or_else(|mut error| {
            tips::add(&mut error, &self::program());
            error.exit()
        })
    };
    let plain = program();
    let mut matches = matches_of(plain.clone());
    let selected = matches.subcommand_name().and_then(|name| plain.find_subcommand(name));
    if selected.is_some_and(defaults::are_for) {
        let defaults = Defaults::read()?;
        if !defaults.is_empty() {
            matches = matches_of(program_with(&defaults)?);
        }
        set_options(&mut matches);
        if view::current().is_verbose()
            && let Some((_, matches)) = matches.subcommand()
        {
            defaults.write_used(matches);
        }
    } else {
        set_options(&mut matches);
    }
    let selected = matches.remove_subcommand().and_then(|(name, matches)| {
        Some((COMMANDS.iter().find(|command| command.name() == name)?, matches))
    });
    match selected {
        Some((command, mut matches)) => {
            refuse_result_options(*command, &matches)?;
            command.run(&mut matches, loops)
        }
        None => exit(clap::Error::new(clap::error::ErrorKind::MissingSubcommand)),
    }
}

/// Sets the options of all commands.
fn set_options(matches: &mut ArgMatches) {
    let options = Program::from_arg_matches_mut(matches).unwrap_or_else(|error| exit(error));
    view::set(options.view);
    table::set_options(&options.table);
}

/// Returns an error if an option of tables is given to a command that prints none.
fn refuse_result_options(command: &dyn Command, matches: &ArgMatches) -> Result<()> {
    let Some(instead) = command.prints_instead() else { return Ok(()) };
    let is_given = |id: &&&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    RESULT_OPTIONS.iter().find(is_given).map_or(Ok(()), |option| {
        let name = command.name();
        Err(BadArguments(format!("--{option} is no option of {name}; {instead}")).into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_all_commands_are_consistent() {
        program().debug_assert();
    }
}
