//! Options that several commands share: each has one name, one text and one place in the help text.
//!
//! A command flattens the groups that it can act on behind its own options, in the order of this file, and
//! last `Recordings`. Each group has a heading in the help text.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use stratalloc::config::{Compat, TorchVersion};
use stratalloc_analysis::{AdviceOptions, Recording, TorchBuild};

use super::assertion::{Condition, ConditionBound};
use super::files;
use super::junit::{self, TestCase};
use super::outcome::{BadArguments, Result, write_note};
use super::recordings::Recordings;
use super::settings::NamedConf;
use super::show::shown_conf;
use super::values;

/// The text of `--torch`.
const TORCH: &str = "Version of PyTorch that must accept the settings, such as 2.8 or 2.8.0+rocm6.4. Without it, a search uses the \
    oldest that can have made the recording, and a comparison any";

/// The headings of the groups in the help text.
pub(crate) const CONDITIONS: &str = "Conditions";
const SEARCH: &str = "Settings to search";
pub(crate) const RECORDINGS: &str = "Recording options";

/// The file of a page.
#[derive(Args, Clone, Debug)]
pub(crate) struct PageFile {
    /// Write the page to this file.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Conditions that decide the exit code.
#[derive(Args, Debug)]
#[command(next_help_heading = CONDITIONS)]
pub(crate) struct Conditions<B: ConditionBound> {
    #[arg(long, value_name = "CONDITION", allow_hyphen_values = true, help = B::HELP,
        value_parser = Condition::<B>::from_str)]
    pub(crate) assert: Vec<Condition<B>>,
    /// Write the results of the conditions to this file, in JUnit's format.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

impl<B: ConditionBound> Conditions<B> {
    /// Returns an error if the JUnit file cannot be written: because there are no conditions, or because it
    /// is one of the recordings.
    pub(crate) fn check(&self, has_conditions: bool, recordings: &[PathBuf]) -> Result<()> {
        let Some(file) = &self.junit else { return Ok(()) };
        if !has_conditions {
            let why = "--junit writes the results of conditions: --assert adds one";
            return Err(BadArguments(why.to_owned()).into());
        }
        Ok(files::spare(recordings, file)?)
    }

    /// Writes the JUnit file, if the user wants one.
    pub(crate) fn write(&self, command: &str, cases: &[TestCase]) -> Result<()> {
        self.junit.as_ref().map_or(Ok(()), |file| junit::write(file, command, cases))
    }
}

/// The default of `--seconds`, without and with `--quick`.
const SECONDS: u64 = 60;
const QUICK_SECONDS: u64 = 20;

/// How settings are searched.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = SEARCH)]
pub(crate) struct SearchArguments {
    /// Search only the settings that help most often: at most 20 seconds instead of a minute.
    #[arg(long)]
    quick: bool,
    /// Search the settings of a recording for at most this time. Default: 60, with --quick 20.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    seconds: Option<u64>,
    #[arg(long, value_name = "VERSION", help = TORCH, value_parser = values::torch::<TorchBuild>(),
        hide_possible_values = true)]
    torch: Option<TorchBuild>,
}

impl SearchArguments {
    pub(crate) fn options(&self) -> AdviceOptions {
        let default = if self.quick { QUICK_SECONDS } else { SECONDS };
        let time = Duration::from_secs(self.seconds.unwrap_or(default));
        let is_rocm = self.torch.is_some_and(|build| build.is_rocm);
        let (quick, torch) = (self.quick, self.torch());
        AdviceOptions { quick, time, torch, is_rocm, ..AdviceOptions::default() }
    }

    /// Returns the version of PyTorch that must accept the settings.
    pub(crate) fn torch(&self) -> Option<TorchVersion> {
        self.torch.map(|build| build.version)
    }
}

/// Settings besides those of a search.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = SEARCH)]
pub(crate) struct ExtraConfs {
    /// Configuration to try besides those that are searched. Can be given several times.
    #[arg(long, value_parser = values::conf(), hide_possible_values = true)]
    pub(crate) conf: Vec<String>,
}

/// The configurations that are compared with each other.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = SEARCH)]
pub(crate) struct ComparedConfs {
    /// Configuration to compare. Can be given several times. Default: a useful set and the recorded one.
    #[arg(long, value_parser = values::conf(), hide_possible_values = true)]
    conf: Vec<String>,
    #[arg(long, value_name = "VERSION", help = TORCH, value_parser = values::torch::<TorchVersion>(),
        hide_possible_values = true)]
    pub(crate) torch: Option<TorchVersion>,
}

/// The default configurations. Each of them saves memory for some programs.
const DEFAULT_CONFS: [&str; 7] = [
    "backend:native",
    "backend:native,expandable_segments:True",
    "backend:native,compat:pytorch",
    "backend:native,max_split_size_mb:64",
    "backend:native,max_split_size_mb:256",
    "backend:native,roundup_power2_divisions:8",
    "backend:native,large_segment_size_mb:64",
];

impl ComparedConfs {
    /// Returns true if the user chose no configurations.
    pub(crate) fn are_default(&self) -> bool {
        self.conf.is_empty()
    }

    /// Parses the configurations. Of the default ones, those that the version of PyTorch refuses are left
    /// out; for one that the user chose, a note is printed.
    pub(crate) fn parsed(&self, recordings: &Recordings) -> Result<Vec<NamedConf>> {
        let (are_default, torch) = (self.are_default(), self.torch);
        let chosen = if are_default { &DEFAULT_CONFS.map(str::to_owned)[..] } else { &self.conf };
        let mut confs = recordings.parse_confs(chosen)?;
        confs.retain(|(text, config)| match torch {
            Some(torch) if !config.is_accepted_by(torch) => {
                if !are_default {
                    let text = shown_conf(text);
                    write_note(format_args!("PyTorch {torch} does not accept {text}"));
                }
                !are_default
            }
            _ => true,
        });
        Ok(confs)
    }

    /// Returns the configurations to compare on a recording, each once. If the user chose none, these
    /// include the recorded configuration, with this library's rules and with PyTorch's.
    pub(crate) fn with_recorded(
        &self,
        confs: &[NamedConf],
        recording: &Recording,
    ) -> Vec<NamedConf> {
        let mut all = confs.to_vec();
        if let Some(own) = recording.config.as_ref().filter(|_| self.are_default()) {
            let text = &recording.trace.conf;
            let comma = if text.is_empty() { "" } else { "," };
            all.push((text.clone(), own.clone()));
            let exact = own.clone().with_compat(Compat::PyTorch);
            all.push((format!("{text}{comma}compat:pytorch"), exact));
        }
        let mut once: Vec<NamedConf> = Vec::new();
        for conf in all {
            if once.iter().all(|(_, known)| known.settings() != conf.1.settings()) {
                once.push(conf);
            }
        }
        once
    }
}
