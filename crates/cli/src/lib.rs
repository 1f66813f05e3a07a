//! The command line, as a library. A program that registers its own strategies and calls [`main`] has
//! every command for these strategies too.
//!
//! Each command has a file; `command` lists them. The benchmark cases are in [`cases`], so that other
//! benchmarks can use them.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod account;
mod advise;
mod assertion;
mod bench;
mod chart;
mod command;
mod compare;
mod defaults;
mod device;
mod diff;
mod explain;
mod files;
mod forecast;
mod help;
mod host;
mod info;
mod junit;
mod manual;
mod options;
mod outcome;
mod recordings;
mod replay;
mod report;
mod settings;
mod short;
mod show;
mod size;
mod sweep;
mod table;
mod text;
mod tips;
mod values;
mod view;

use std::process::ExitCode;

#[doc(hidden)]
pub use bench::{cases, loops::Loops};
use outcome::{Outcome, is_closed_pipe, write_stderr};

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
    stratalloc_analysis::advise_on_oom::<host::Host>();
    match command::run(loops) {
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
