//! How the program ends, and where its output goes.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::config::shown;

/// How the work went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Exit code 0.
    Good,
    /// The work failed or mismatched: exit code 1.
    Failed,
    /// The caller's words were off: exit code 2.
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

/// A result whose error is shown as it is.
pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The caller's words do not fit together: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadWords(pub(crate) String);

/// A part of a device's memory.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    fraction.ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

/// Standard output, whose failures are reported instead of panicking.
pub(crate) fn out() -> impl Write {
    io::stdout().lock()
}

/// Says lines on the standard error stream, as a terminal may have them. Where that cannot be written nobody
/// is left to be told, and the exit code says the rest.
pub(crate) fn tell(lines: impl Display) {
    let clean: Vec<String> = lines.to_string().split('\n').map(shown).collect();
    let _ = writeln!(io::stderr(), "{}", clean.join("\n"));
}

/// Does something for each item. An error of one of several is told and does not stop the others: the exit
/// code is 1 then.
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

/// Tells an error instead of passing it on, so that what follows is still done. A closed pipe ends all.
pub(crate) fn one_of_several(done: Result<Outcome>) -> Result<Outcome> {
    match done {
        Ok(Outcome::Good) => Ok(Outcome::Good),
        Ok(Outcome::Failed | Outcome::Usage) => Ok(Outcome::Failed),
        Err(error) if is_closed_pipe(&*error) => Err(error),
        Err(error) => {
            tell(format_args!("stratalloc: {error}"));
            Ok(Outcome::Failed)
        }
    }
}

/// Whether the error only says that the reader of our output has closed the pipe.
pub(crate) fn is_closed_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let broken = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
        || error
            .downcast_ref::<serde_json::Error>()
            .is_some_and(|e| e.io_error_kind() == Some(io::ErrorKind::BrokenPipe))
}
