//! `stratalloc forecast`: the memory that a program needs at a size at which it was not recorded.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::config::{Config, TorchVersion, shown};
use stratalloc_analysis::{
    BESIDES, Forecast, ForecastError, Need, Paste, Sample, SearchOptions, Sizes, VALUE_MAX,
    counted_as,
};
use stratalloc_recording::{ReplayError, Trace};

use super::diff::change;
use super::options::ComparedConfs;
use super::outcome::{BadArguments, Outcome, Result, out};
use super::recordings::{Devices, Recordings};
use super::settings::need_of;
use super::show::{
    Align, PYTORCHS, columns, emphasised, is_json, joined, near, paste_json, progress, say,
    shown_conf, shown_path, table, value_or_dash,
};
use super::size::Amount;

/// Forecast the memory that a program needs at a size at which it was not recorded.
#[derive(Args, Debug)]
#[command(
    override_usage = "stratalloc forecast [OPTIONS] --for <NAME=VALUE> <NAME=VALUE:TRACE>...",
    mut_arg("files", |files| {
        files.value_name("NAME=VALUE:TRACE").help(
            "Two or three recordings of one program, each with the value that a parameter had, such as \
             batch=2:a.pickle",
        )
    })
)]
pub(crate) struct ForecastArguments {
    /// Value of the parameter for which to forecast, such as batch=24.
    #[arg(long = "for", value_name = "NAME=VALUE")]
    target: Parameter,
    /// Find the largest value, too, at which the program runs on a device of this size, such as 80GiB, or of
    /// this share of --total-memory, such as 90%.
    #[arg(long, value_name = "SIZE", value_parser = Amount::parse)]
    fits: Option<Amount>,
    #[command(flatten)]
    confs: ComparedConfs,
    #[command(flatten)]
    recordings: Recordings,
}

/// A parameter of the program and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parameter {
    name: String,
    value: u64,
}

impl FromStr for Parameter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{}: expected NAME=VALUE, such as batch=24", shown(text));
        let (name, value) = text.split_once('=').ok_or_else(expected)?;
        let value = value.parse().ok().filter(|value| (1..VALUE_MAX).contains(value));
        match value {
            Some(value) if !name.is_empty() => Ok(Self { name: name.to_owned(), value }),
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", shown(&self.name), self.value)
    }
}

/// The result of one configuration.
struct ForecastConf {
    conf: String,
    is_recorded: bool,
    need: Need,
    largest: Option<u64>,
}

/// The needs at the largest recorded value: forecast from the smaller two, and recorded.
type Check = std::result::Result<[Option<u64>; 2], ForecastError>;

/// Everything to print.
struct Forecasts<'a> {
    target: &'a Parameter,
    torch: Option<TorchVersion>,
    fits: Option<u64>,
    values: Vec<u64>,
    forecast: &'a Forecast,
    check: Option<Check>,
    /// The configuration of `check`.
    check_conf: String,
    rows: Vec<ForecastConf>,
}

pub(crate) fn run(args: &ForecastArguments) -> Result<Outcome> {
    let total_bytes = args.recordings.total_memory;
    let fits =
        args.fits.map(|amount| amount.bytes(total_bytes)).transpose().map_err(BadArguments)?;
    let given = given(&args.recordings.files, &args.target)?;
    let files = given.iter().map(|(_, path)| path.clone()).collect();
    let recordings = args.recordings.of_files(files);
    let confs = args.confs.parsed(&recordings)?;
    let mut samples = Vec::new();
    for (value, path) in given {
        let mut add = |name: &str, trace: Trace| -> Result<Outcome> {
            let recording = recordings.with_history(name, trace, "no row as recorded")?;
            samples.push(Sample::new(value, recording));
            Ok(Outcome::Good)
        };
        let read = recordings.of_files(vec![path]).each(Devices::First, &mut add)?;
        if read != Outcome::Good {
            return Ok(read);
        }
    }
    let Some((largest, smaller)) = samples.split_last() else { return Ok(Outcome::Unjudged) };
    let forecast = Forecast::of(smaller, largest)?;
    let recorded = &largest.recording;
    let own = recorded.config.clone().map(|own| recorded.trace.as_recorded(own));
    let confs = args.confs.with_recorded(&confs, recorded);
    let recording = forecast.at(args.target.value);
    let bar = progress(confs.len() as u64 + 1, &format!("forecasting {}", args.target));
    let mut rows = Vec::new();
    for (conf, config) in confs {
        let need = need_of(&recording, &config, &SearchOptions::QUICK)?;
        let largest = fits.map(|bytes| forecast.largest(&config, bytes)).transpose()?;
        let is_recorded = own.as_ref().is_some_and(|own| own.settings() == config.settings());
        rows.push(ForecastConf { conf, is_recorded, need, largest: largest.flatten() });
        bar.inc(1);
    }
    rows.sort_by_key(|row| (row.need.needs_bytes.unwrap_or(u64::MAX), !row.is_recorded));
    let check_conf = if own.is_some() { recorded.trace.conf.clone() } else { String::new() };
    let own = own.unwrap_or_default();
    let check = match smaller {
        [smallest, middle] => Some(check([smallest, middle], &forecast, &own)?),
        _ => None,
    };
    bar.inc(1);
    bar.finish_and_clear();
    let found = Forecasts {
        target: &args.target,
        torch: args.confs.torch,
        fits,
        values: samples.iter().map(|sample| sample.value).collect(),
        forecast: &forecast,
        check,
        check_conf,
        rows,
    };
    match is_json() {
        true => writeln!(out(), "{}", found.json())?,
        false => found.write()?,
    }
    Ok(Outcome::Good)
}

/// Returns the values and paths of the recordings, in the order of the values.
fn given(files: &[PathBuf], target: &Parameter) -> Result<Vec<(u64, PathBuf)>> {
    if !(2..=3).contains(&files.len()) {
        let count = files.len();
        let text = format!("forecast takes 2 or 3 recordings as NAME=VALUE:TRACE, not {count}");
        return Err(BadArguments(text).into());
    }
    let mut given = Vec::new();
    for file in files {
        let (parameter, path) = parse_given(file).map_err(BadArguments)?;
        if parameter.name != target.name {
            let text = format!("{parameter} and {target} are different parameters");
            return Err(BadArguments(text).into());
        }
        given.push((parameter.value, path));
    }
    given.sort();
    if given.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(BadArguments("two recordings have the same value".to_owned()).into());
    }
    Ok(given)
}

/// Parses `NAME=VALUE:TRACE`.
fn parse_given(file: &Path) -> Result<(Parameter, PathBuf), String> {
    let expected = || format!("{}: expected NAME=VALUE:TRACE", shown_path(file));
    let (parameter, path) =
        file.to_str().and_then(|text| text.split_once(':')).ok_or_else(expected)?;
    Ok((parameter.parse()?, path.into()))
}

/// Forecasts the largest recorded value from the smaller two, under the recorded configuration.
fn check(
    [smallest, middle]: [&Sample; 2],
    forecast: &Forecast,
    config: &Config,
) -> Result<Check, ReplayError> {
    let value = forecast.base_value;
    let from_two = match Forecast::of(std::slice::from_ref(smallest), middle) {
        Ok(from_two) => from_two,
        Err(error) => return Ok(Err(error)),
    };
    let need = |forecast: &Forecast| need_of(&forecast.at(value), config, &SearchOptions::QUICK);
    Ok(Ok([need(&from_two)?.needs_bytes, need(forecast)?.needs_bytes]))
}

/// The text for a value at which a request fails on every device that is tried.
fn runs_nowhere() -> String {
    "runs on no device of up to 8 TiB".to_owned()
}

/// Formats values as "2, 4 and 6".
fn listed(values: &[u64]) -> String {
    let texts: Vec<String> = values.iter().map(u64::to_string).collect();
    match texts.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => texts.concat(),
    }
}

impl Forecasts<'_> {
    fn write(&self) -> io::Result<()> {
        let mut out = out();
        writeln!(out, "{}", emphasised(self.sentence()))?;
        if let Some(text) = self.largest() {
            writeln!(out, "{}", emphasised(&text))?;
        }
        writeln!(out)?;
        let largest = format!("largest {}", shown(&self.target.name));
        let mut heading = columns("configuration | needs MiB:");
        heading.extend(self.fits.map(|_| (largest.as_str(), Align::Right)));
        let cells = self.rows.iter().map(|row| {
            let needs = row.need.needs_bytes.map(near);
            let needs = needs.unwrap_or_else(|| "none fits".to_owned());
            let mut cells = vec![shown_conf(&row.conf), needs];
            cells.extend(self.fits.map(|_| value_or_dash(row.largest)));
            cells
        });
        table(&mut out, &heading, &cells.collect::<Vec<_>>())?;
        if self.rows.iter().any(|row| row.conf.contains("compat:")) {
            say(&mut out, PYTORCHS)?;
        }
        say(
            &mut out,
            format_args!("needs: the smallest device on which no request fails. {BESIDES}"),
        )?;
        writeln!(out)?;
        self.facts().iter().try_for_each(|fact| say(&mut out, fact))
    }

    fn sentence(&self) -> String {
        let target = self.target;
        let need =
            |row: &ForecastConf| row.need.needs_bytes.map(|bytes| format!("{} MiB", near(bytes)));
        let [best, ..] = self.rows.as_slice() else { return String::new() };
        let Some(least) = need(best) else { return format!("{target} {}.", runs_nowhere()) };
        let with = Paste::of(&best.conf, self.torch);
        match self.rows.iter().find(|row| row.is_recorded) {
            Some(recorded) if recorded.need.needs_bytes != best.need.needs_bytes => {
                let needs = need(recorded).map(|needs| format!("needs {needs}"));
                let recorded = needs.unwrap_or_else(runs_nowhere);
                format!(
                    "{target} {recorded} under the recorded configuration, {least} with {with}."
                )
            }
            _ => format!("{target} needs {least} with {with}."),
        }
    }

    /// Returns the sentence about the largest values that fit.
    fn largest(&self) -> Option<String> {
        let (name, fits) = (shown(&self.target.name), format!("{} MiB", near(self.fits?)));
        // The first of equal rows.
        let best = self.rows.iter().rev().max_by_key(|row| (row.largest, row.is_recorded))?;
        let Some(most) = best.largest else {
            return Some(format!("In {fits} it does not run even with {name}=1."));
        };
        let with = Paste::of(&best.conf, self.torch);
        Some(match self.rows.iter().find(|row| row.is_recorded) {
            Some(recorded) if recorded.largest != best.largest => {
                let recorded = value_or_dash(recorded.largest);
                format!(
                    "In {fits} the largest {name} is {recorded} under the recorded configuration, {most} \
                     with {with}."
                )
            }
            _ => format!("In {fits} the largest {name} is {most}, with {with}."),
        })
    }

    fn facts(&self) -> Vec<String> {
        let (forecast, name) = (self.forecast, shown(&self.target.name));
        let [smaller @ .., largest] = self.values.as_slice() else { return Vec::new() };
        let (smaller, all) = (listed(smaller), listed(&self.values));
        let requests = |sizes: Sizes| {
            let requests = counted_as(sizes.requests, "request", "requests");
            format!("{requests} ({} MiB together)", near(sizes.bytes))
        };
        let mut facts = vec![format!(
            "Recorded at {name}={all}: {}, of which {} grow with {name}.",
            requests(forecast.all),
            requests(forecast.growing)
        )];
        if forecast.before.requests > 0 {
            let blocks = counted_as(forecast.before.requests, "block", "blocks");
            facts.push(format!(
                "{blocks} ({} MiB together) lived before the recordings began and are equal in all: their sizes are \
                 taken as constant.",
                near(forecast.before.bytes)
            ));
        }
        let only = format!("; their sizes are taken as proportional to {name}");
        for (sizes, begin, end) in [
            (forecast.only_largest, format!("Only at {name}={largest}"), only.as_str()),
            (
                forecast.not_affine,
                "Not on a line through the three sizes".to_owned(),
                "; the larger two are used",
            ),
            (forecast.missing, format!("Not at {name}={largest}, and left out"), ""),
        ] {
            facts.extend(
                (sizes.requests > 0).then(|| format!("{begin}: {}{end}.", requests(sizes))),
            );
        }
        facts.push(match &self.check {
            None => "Not checked: a third recording would show the error.".to_owned(),
            Some(Err(error)) => format!("Not checked with {name}={smaller} alone: {error}."),
            Some(Ok([Some(forecast), Some(recorded)])) => format!(
                "Check under {}: from {name}={smaller} alone, {name}={largest} needs {} MiB; recorded, {} MiB ({}).",
                shown_conf(&self.check_conf),
                near(*forecast),
                near(*recorded),
                change([*recorded, *forecast])
            ),
            Some(Ok(_)) => format!("Not checked: {name}={largest} {}.", runs_nowhere()),
        });
        facts
    }

    fn json(&self) -> Value {
        let forecast = self.forecast;
        let sizes = |sizes: Sizes| json!({"requests": sizes.requests, "bytes": sizes.bytes});
        let needs = self.check.as_ref().and_then(|check| check.as_ref().ok());
        let error = self.check.as_ref().and_then(|check| check.as_ref().err());
        let rows = self.rows.iter().map(|row| {
            let row_json = json!({
                "conf": row.conf,
                "is_recorded": row.is_recorded,
                "needs_bytes": row.need.needs_bytes,
                "largest": row.largest,
            });
            joined([row_json, paste_json(&Paste::of(&row.conf, self.torch))])
        });
        json!({
            "parameter": self.target.name,
            "value": self.target.value,
            "recorded_values": self.values,
            "all": sizes(forecast.all),
            "growing": sizes(forecast.growing),
            "only_largest": sizes(forecast.only_largest),
            "not_affine": sizes(forecast.not_affine),
            "missing": sizes(forecast.missing),
            "before": json!({"blocks": forecast.before.requests, "bytes": forecast.before.bytes}),
            "check": {
                "forecast_bytes": needs.map(|needs| needs[0]),
                "recorded_bytes": needs.map(|needs| needs[1]),
                "error": error.map(ToString::to_string),
            },
            "fits_bytes": self.fits,
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}
