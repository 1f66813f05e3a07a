//! Exit codes of the program, and its output streams.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use stratalloc::config::shown;

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Exit code 0.
    Good,
    /// The work failed, or a check found a difference: exit code 1.
    Failed,
    /// The arguments were wrong: exit code 2.
    Usage,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Good => Self::SUCCESS,
            Outcome::Failed => Self::from(1),
            Outcome::Usage => Self::from(2),
        }
    }
}

/// A result whose error is printed unchanged.
pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// An error for arguments that contradict each other: exit code 2.
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
    let clean: Vec<String> = lines.to_string().split('\n').map(shown).collect();
    let _ = writeln!(io::stderr(), "{}", clean.join("\n"));
}

/// Runs `act` for each item. If there are several, an error is printed, the remaining items are
/// processed, and the exit code is 1.
pub(crate) fn each<T>(items: &[T], mut act: impl FnMut(&T) -> Result<Outcome>) -> Result<Outcome> {
    if let [item] = items {
        return act(item);
    }
    let mut outcome = Outcome::Good;
    for item in items {
        let done = one_of_several(act(item))?;
        outcome = if done == Outcome::Good { outcome } else { done };
    }
    Ok(outcome)
}

/// Prints an error instead of returning it, so that the remaining items are still processed. An error
/// that means a closed pipe is returned.
pub(crate) fn one_of_several(done: Result<Outcome>) -> Result<Outcome> {
    match done {
        Ok(Outcome::Good) => Ok(Outcome::Good),
        Ok(Outcome::Failed | Outcome::Usage) => Ok(Outcome::Failed),
        Err(error) if is_closed_pipe(&*error) => Err(error),
        Err(error) => {
            write_stderr(format_args!("stratalloc: {error}"));
            Ok(Outcome::Failed)
        }
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
