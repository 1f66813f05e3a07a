//! How results are shown: the width of the lines, the colours and the amount of detail.
//!
//! Results that go into a pipe or a file are not wrapped, so that a sentence stays one line for other
//! programs. The variable `COLUMNS` sets a width there too. Nothing here prints.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use anstream::{AutoStream, ColorChoice};
use clap::{Args, ValueEnum};

/// Options that every command has.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Output options")]
pub(crate) struct ViewOptions {
    /// Print everything that is known, such as handles of streams and the remaining tables.
    #[arg(short, long, global = true)]
    verbose: bool,
    /// Print results and errors only: no notes, no warnings and no progress.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// When to use colours. auto: on a terminal, unless NO_COLOR is set; CLICOLOR_FORCE=1 uses them in pipes too.
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "WHEN",
        default_value_t,
        hide_possible_values = true
    )]
    color: Colours,
}

/// When colours are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Colours {
    #[default]
    Auto,
    Always,
    Never,
}

impl Colours {
    /// Makes this the choice of all streams.
    fn write_global(self) {
        let choice = match self {
            Self::Auto => ColorChoice::Auto,
            Self::Always => ColorChoice::Always,
            Self::Never => ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// The amount of detail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Detail {
    /// No notes and no progress.
    Quiet,
    #[default]
    Normal,
    /// Everything.
    Verbose,
}

/// How results are shown on standard output.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct View {
    /// The maximum width of a line; `None` if lines are not wrapped.
    pub(crate) columns: Option<usize>,
    /// Whether standard output shows colours.
    pub(crate) has_colours: bool,
    /// The amount of detail.
    pub(crate) detail: Detail,
}

static VIEW: OnceLock<View> = OnceLock::new();

/// Sets the colours of errors in the arguments and of the help text, which are printed before the options
/// are known.
pub(crate) fn set_colours_of_arguments(arguments: impl Iterator<Item = OsString>) {
    let texts: Vec<String> = arguments.filter_map(|one| one.into_string().ok()).collect();
    let of_option = |pair: &[String]| match pair[0].strip_prefix("--color") {
        Some("") => Colours::from_str(pair.get(1)?, true).ok(),
        Some(rest) => Colours::from_str(rest.strip_prefix('=')?, true).ok(),
        None => None,
    };
    let ends = (0..texts.len()).map(|at| &texts[at..]);
    if let Some(colours) = ends.filter_map(of_option).last() {
        colours.write_global();
    }
}

/// Sets the view by the options and the environment. Only the first call has an effect.
pub(crate) fn set(options: ViewOptions) {
    options.color.write_global();
    let has_colours = AutoStream::choice(&io::stdout()) != ColorChoice::Never;
    console::set_colors_enabled(has_colours);
    console::set_colors_enabled_stderr(AutoStream::choice(&io::stderr()) != ColorChoice::Never);
    let detail = match options {
        ViewOptions { quiet: true, .. } => Detail::Quiet,
        ViewOptions { verbose: true, .. } => Detail::Verbose,
        _ => Detail::Normal,
    };
    let columns = columns(&console::Term::stdout(), io::stdout().is_terminal());
    let _ = VIEW.set(View { columns, has_colours, detail });
}

/// Returns the view of this run.
pub(crate) fn current() -> View {
    VIEW.get().copied().unwrap_or_default()
}

/// Returns the width of lines on a stream: `COLUMNS`, else the width of its terminal, which is 80 if it
/// is unknown.
fn columns(term: &console::Term, is_terminal: bool) -> Option<usize> {
    let from_env = || std::env::var("COLUMNS").ok()?.parse().ok();
    let of_terminal = || {
        let known = term.size_checked().map(|(_, columns)| usize::from(columns));
        known.filter(|columns| *columns > 0).unwrap_or(80)
    };
    let set: Option<usize> = from_env().filter(|columns| *columns > 0);
    set.or_else(|| is_terminal.then(of_terminal))
}

impl View {
    /// Returns true if everything is printed.
    pub(crate) fn is_verbose(self) -> bool {
        self.detail == Detail::Verbose
    }

    /// Returns true if notes and progress are left out.
    pub(crate) fn is_quiet(self) -> bool {
        self.detail == Detail::Quiet
    }
}
