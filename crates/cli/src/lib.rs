//! The command line, as a library. A program that registers its own strategies and calls [`main`] has
//! every command for these strategies too.
//!
//! Each subcommand has a file; see `--help`. The benchmark cases are in [`cases`], so that other
//! benchmarks can use them.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod account;
mod advise;
mod assertion;
mod bench;
mod compare;
mod device;
mod diff;

mod explain;
mod files;
mod forecast;
mod info;
mod junit;
mod outcome;
mod recordings;
mod replay;
mod report;
mod settings;
mod show;
mod size;
mod sweep;
mod table;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{ArgAction, CommandFactory, Parser, Subcommand};

#[doc(hidden)]
pub use bench::{cases, loops::Loops};
use outcome::{Outcome, is_closed_pipe, write_stderr};

/// Device-memory allocators, chosen by one string and measured on recordings of real programs.
#[derive(Parser)]
#[command(name = "stratalloc", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    table: table::TableOptions,
    #[command(subcommand)]
    command: Command,
}

/// The end of the help text.
const EXIT_CODES: &str = "Exit codes: 0 done, and every condition holds; 1 a condition does not hold, or a \
    verification found a difference; 2 no answer: the arguments are wrong, or a file cannot be read or \
    judged. Of several recordings, the largest code counts.";

#[derive(Subcommand)]
enum Command {
    /// Show the keys of a configuration, their values and where they come from.
    Explain(explain::Explain),
    /// List the devices and strategies of this machine, and their features; or the owners of a device's
    /// memory.
    #[command(after_help = "Example: stratalloc info --pid 4242")]
    Info(info::Info),
    /// Repeat recordings on an allocator.
    Replay(replay::Replay),
    /// Find the setting with which a recorded program needs less memory, and explain its need.
    Advise(advise::Advise),
    /// Compare strategies on the same recordings.
    Compare(compare::Compare),
    /// Compare two recordings of one program: which code holds more memory, and the first request that
    /// differs.
    #[command(
        override_usage = "stratalloc diff [OPTIONS] <A> <B>",
        after_help = "Example: stratalloc diff yesterday.pickle today.pickle --assert \"needs<=+2%\"",
        mut_arg("files", |files| files.num_args(2).action(ArgAction::Set).value_names(["A", "B"]))
    )]
    Diff(diff::DiffArguments),
    /// Forecast the memory that a program needs at a size at which it was not recorded.
    #[command(
        override_usage = "stratalloc forecast [OPTIONS] --for <NAME=VALUE> <NAME=VALUE:TRACE>...",
        after_help = "Example: stratalloc forecast batch=2:a.pickle batch=4:b.pickle batch=6:c.pickle --for batch=24 \
                      --fits 80GiB",
        mut_arg("files", |files| {
            files.value_name("NAME=VALUE:TRACE").help(
                "Two or three recordings of one program, each with the value that a parameter had, such as \
                 batch=2:a.pickle",
            )
        })
    )]
    Forecast(forecast::ForecastArguments),
    /// Analyse the recordings of many ranks: those with equal requests once, and which ranks differ.
    #[command(
        after_help = "Example: stratalloc sweep --quick --state sweep.state --output sweep.html ranks/*.pickle"
    )]
    Sweep(sweep::SweepArguments),
    /// Write a page for a browser that shows how memory was used.
    Report(report::Report),
    /// Time the hot path, and the floors of this machine.
    Bench(bench::Bench),
    /// Print a shell's completion script for this program; write it to where the shell looks for it.
    Completions(Completions),
}

/// Arguments of `completions`.
#[derive(clap::Args)]
struct Completions {
    shell: clap_complete::Shell,
}

impl Completions {
    fn run(&self) -> io::Result<Outcome> {
        let mut command = Arguments::command();
        let name = command.get_name().to_owned();
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut text);
        outcome::out().write_all(&text)?;
        Ok(Outcome::Good)
    }
}

impl Command {
    /// Makes the command print JSON. Returns the command's name if it cannot print JSON.
    fn print_json(&mut self) -> Result<(), &'static str> {
        match self {
            Self::Replay(args) => args.json = true,
            Self::Advise(args) => args.json = true,
            Self::Compare(args) => args.json = true,
            Self::Diff(args) => args.json = true,
            Self::Forecast(args) => args.json = true,
            Self::Sweep(args) => args.json = true,
            Self::Bench(args) => args.json = true,
            Self::Explain(args) => args.json = true,
            Self::Info(args) => args.json = true,
            Self::Report(_) => return Err("report"),
            Self::Completions(_) => return Err("completions"),
        }
        Ok(())
    }
}

/// Runs the command given by the program's arguments, with the strategies registered so far. Reads the
/// arguments and the environment. Writes results to standard output and errors to standard error. Exits
/// the process itself if the arguments are invalid or ask for help.
///
/// ```no_run
/// # use stratalloc::registry;
/// fn main() -> std::process::ExitCode {
///     // registry::register("mine", ...) before anything is built.
///     stratalloc_cli::main()
/// }
/// ```
#[inline]
#[must_use]
pub fn main() -> ExitCode {
    run(&Loops::here())
}

/// Runs like [`main`], with benchmark loops that the caller has instantiated.
#[doc(hidden)]
#[must_use]
pub fn run(loops: &Loops) -> ExitCode {
    stratalloc::diagnostics::log_by_environment();
    stratalloc_analysis::advise_on_oom();
    let mut arguments = Arguments::parse();
    table::set_options(&arguments.table);
    if arguments.table.format == Some(table::Format::Json)
        && let Err(command) = arguments.command.print_json()
    {
        write_stderr(format_args!("stratalloc: {command} prints no JSON"));
        return Outcome::Unjudged.into();
    }
    let outcome = match &arguments.command {
        Command::Explain(args) => explain::run(args),
        Command::Info(args) => info::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Advise(args) => advise::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Forecast(args) => forecast::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Report(args) => report::run(args),
        Command::Bench(args) => bench::run(args, loops),
        Command::Completions(args) => args.run().map_err(Into::into),
    };
    match outcome {
        Ok(outcome) => match table::missing_column() {
            Some(name) if outcome == Outcome::Good => {
                write_stderr(format_args!("stratalloc: --sort: no column is called {name}"));
                Outcome::Unjudged.into()
            }
            _ => outcome.into(),
        },
        Err(error) if is_closed_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            write_stderr(format_args!("stratalloc: {error}"));
            Outcome::Unjudged.into()
        }
    }
}
