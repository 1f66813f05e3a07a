//! Exit codes of the program, and its output streams.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use super::view;
use stratalloc::config::shown;

/// The result of a command or of a condition. Of several results, the largest decides the exit code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// The work is done, and every condition holds: exit code 0.
    #[default]
    Good,
    /// A condition does not hold, or a verification found a difference: exit code 1.
    Failed,
    /// There is no answer: the arguments are wrong, or an input cannot be read or judged. Exit code 2. It
    /// takes precedence over 1, because the other inputs do not show which answer is missing.
    Unjudged,
}

impl Outcome {
    /// Returns the outcome of a condition.
    pub(crate) fn of(holds: bool) -> Self {
        if holds { Self::Good } else { Self::Failed }
    }

    /// Returns whether the condition holds; `None` if it cannot be judged.
    pub(crate) fn holds(self) -> Option<bool> {
        match self {
            Self::Good => Some(true),
            Self::Failed => Some(false),
            Self::Unjudged => None,
        }
    }
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Good => Self::SUCCESS,
            Outcome::Failed => Self::from(1),
            Outcome::Unjudged => Self::from(2),
        }
    }
}

/// A result whose error is printed unchanged.
pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// An error for arguments that contradict each other.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadArguments(pub(crate) String);

/// Parses a share of a device's memory.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    fraction.ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

/// Returns standard output. Unlike `println!`, writing to it reports failures instead of panicking.
pub(crate) fn out() -> impl Write {
    io::stdout().lock()
}

/// Prints lines on standard error, without control characters. Ignores a failure to print; the exit code
/// still reports the error.
pub(crate) fn write_stderr(lines: impl Display) {
    let line = |line: &str| view::wrapped_for_stderr(&shown(line));
    let clean: Vec<String> = lines.to_string().split('\n').map(line).collect();
    let _ = writeln!(io::stderr(), "{}", clean.join("\n"));
}

/// Prints a note about a result on standard error, unless the user wants none.
pub(crate) fn write_note(note: impl Display) {
    if !view::current().is_quiet() {
        write_stderr(format_args!("note: {note}"));
    }
}

/// Prints a warning on standard error, unless the user wants none.
pub(crate) fn write_warning(warning: impl Display) {
    if !view::current().is_quiet() {
        write_stderr(format_args!("warning: {warning}"));
    }
}

/// Ignores that the reader of the output closed the pipe. Commands that check conditions call this, so
/// that the exit code still shows the result.
pub(crate) fn unless_closed<E: Into<Box<dyn Error>>>(printed: Result<(), E>) -> Result<()> {
    match printed.map_err(Into::into) {
        Err(error) if is_closed_pipe(&*error) => Ok(()),
        printed => printed,
    }
}

/// Returns true if the error only means that the reader of the output closed the pipe.
pub(crate) fn is_closed_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let broken = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
        || error
            .downcast_ref::<serde_json::Error>()
            .is_some_and(|e| e.io_error_kind() == Some(io::ErrorKind::BrokenPipe))
}
