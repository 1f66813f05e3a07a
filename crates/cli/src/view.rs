//! How results are shown: the width of the lines, the colours and the amount of detail.
//!
//! Results that go into a pipe or a file are not wrapped, so that a sentence stays one line for other
//! programs. The variable `COLUMNS` sets a width there too. Nothing here prints.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use anstream::{AutoStream, ColorChoice};
use clap::{Args, ValueEnum};
use console::Style;
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

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
    /// When to use colours. auto: on a terminal, unless NO_COLOR is set; CLICOLOR_FORCE=1 uses them in pipes
    /// too.
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
    if let Some(colours) = (0..texts.len()).rev().find_map(|at| of_option(&texts[at..])) {
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

/// Wraps a message for standard error.
pub(crate) fn wrapped_for_stderr(text: &str) -> String {
    let columns = columns(&console::Term::stderr(), io::stderr().is_terminal());
    lines(text, "", columns).join("\n")
}

fn lines(text: &str, indent: &str, columns: Option<usize>) -> Vec<String> {
    let options = Options::new(columns.unwrap_or(usize::MAX))
        .initial_indent(indent)
        .subsequent_indent(indent)
        .break_words(false)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    textwrap::wrap(text, options).into_iter().map(std::borrow::Cow::into_owned).collect()
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

/// A colour, by its meaning on the page of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Requested and live.
    Live,
    /// Rounding inside live blocks.
    Rounding,
    /// Waiting for other streams.
    Waiting,
    /// Free parts of split segments.
    Rest,
    /// Completely free segments.
    Idle,
    /// Kept by the driver's pool.
    Driver,
    /// Reserved, whatever it is used for.
    Reserved,
    /// A limit, and a request that failed.
    Limit,
    /// Less important than the rest.
    Dim,
}

impl Tone {
    /// The tones of the causes of reserved memory, in the order of
    /// [`Causes::rows`](stratalloc_analysis::Causes::rows).
    pub(crate) const CAUSES: [Self; 6] =
        [Self::Live, Self::Rounding, Self::Waiting, Self::Rest, Self::Idle, Self::Driver];

    fn style(self) -> Style {
        // Of the 256 colours of terminals, those that are legible on light and on dark ground.
        let colour = match self {
            Self::Live => 33,
            Self::Rounding => 74,
            Self::Waiting => 98,
            Self::Rest => 173,
            Self::Idle => 172,
            Self::Driver => 139,
            Self::Reserved => 245,
            Self::Limit => 160,
            Self::Dim => return Style::new().dim(),
        };
        Style::new().color256(colour)
    }
}

impl View {
    /// Returns a text in a colour.
    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        tone.style().force_styling(self.has_colours).apply_to(text).to_string()
    }

    /// Returns a text in bold.
    pub(crate) fn bold(self, text: &str) -> String {
        Style::new().bold().force_styling(self.has_colours).apply_to(text).to_string()
    }

    /// Returns the lines of a text, broken between words. Words that are longer than a line, such as paths
    /// and settings to paste, stay whole. Every line begins with `indent`.
    pub(crate) fn lines(self, text: &str, indent: &str) -> Vec<String> {
        lines(text, indent, self.columns)
    }

    /// Returns the same lines as one text.
    pub(crate) fn wrapped(self, text: &str, indent: &str) -> String {
        self.lines(text, indent).join("\n")
    }

    /// Returns one line: `begin` and a label. The middle of the label is cut if the line is too long: its
    /// beginning and its end name different code.
    pub(crate) fn cut_label(self, begin: String, label: &str) -> String {
        let room = self.columns.unwrap_or(usize::MAX).saturating_sub(begin.chars().count()).max(8);
        let length = label.chars().count();
        if length <= room {
            return begin + label;
        }
        let head: String = label.chars().take(room / 2).collect();
        let tail: String = label.chars().skip(length - (room - room / 2 - 1)).collect();
        format!("{begin}{head}…{tail}")
    }

    /// Returns a text of one line: its end is cut if it is longer than a line.
    pub(crate) fn cut(self, text: &str) -> String {
        match self.columns.map(|columns| columns.max(8)) {
            Some(columns) if text.chars().count() > columns => {
                let kept: String = text.chars().take(columns - 1).collect();
                format!("{}…", kept.trim_end())
            }
            _ => text.to_owned(),
        }
    }
    /// Returns true if everything is printed.
    pub(crate) fn is_verbose(self) -> bool {
        self.detail == Detail::Verbose
    }

    /// Returns true if notes and progress are left out.
    pub(crate) fn is_quiet(self) -> bool {
        self.detail == Detail::Quiet
    }
}
