//! The end of a command's help text: examples and exit codes.

use std::fmt::Write;

use clap::builder::{StyledStr, Styles};

/// The exit codes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitCodes {
    /// Only 0 and 2.
    Done,
    /// 1 if a condition of `--assert` or `--fits` does not hold.
    Conditions,
    /// 1 if `--verify` found a difference.
    Verification,
    /// Those of all commands.
    All,
}

impl ExitCodes {
    /// Returns the meaning of 0 and of 1.
    fn meanings(self) -> (&'static str, Option<&'static str>) {
        let holds = "done, and every condition holds";
        match self {
            Self::Done => ("done", None),
            Self::Conditions => (holds, Some("a condition does not hold")),
            Self::Verification => ("done", Some("--verify found a difference")),
            Self::All => (holds, Some("a condition does not hold, or --verify found a difference")),
        }
    }
}

/// The meaning of exit code 2. No line of an example or of an exit code is longer than 80 columns.
const NO_ANSWER: &str = "no answer: wrong arguments, or a file cannot be read, written or judged";

/// Returns the text below the options.
pub(crate) fn ending(examples: &[&str], codes: ExitCodes) -> StyledStr {
    let header = *Styles::default().get_header();
    let mut text = String::new();
    let title = |text: &mut String, title: &str| {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}{header}{title}:{header:#}");
    };
    if !examples.is_empty() {
        title(&mut text, if examples.len() == 1 { "Example" } else { "Examples" });
        for example in examples {
            let _ = writeln!(text, "  {example}");
        }
    }
    title(&mut text, "Exit codes");
    let (good, failed) = codes.meanings();
    let _ = writeln!(text, "  0  {good}");
    if let Some(failed) = failed {
        let _ = writeln!(text, "  1  {failed}");
    }
    let _ = write!(text, "  2  {NO_ANSWER}");
    StyledStr::from(text)
}
