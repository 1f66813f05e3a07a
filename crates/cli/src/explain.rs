//! `stratalloc explain`: shows the keys that a string sets, those whose defaults change because of them,
//! and the others.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::config::{Config, ExplainRow, Origin, VARIABLES, shown, torch_notes};
use stratalloc::driver::Driver;
use stratalloc::registry::{self, BuildOptions};
use stratalloc_analysis::{counted_as, without_files};
use stratalloc_sim::{EventMode, Sim, SimOptions};

use super::outcome::{Outcome, Result, out, write_stderr};
use super::settings;
use super::show::{columns, is_json, say, table};
use super::{values, view};

/// Show the keys of a configuration, their values and where they come from.
#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// Configuration string, plain or as an assignment: `PYTORCH_CUDA_ALLOC_CONF=...`. Default: the
    /// environment's.
    #[arg(value_parser = values::conf(), hide_possible_values = true)]
    conf: Option<String>,
    /// Print every key, not only those that differ from their default.
    #[arg(long)]
    all: bool,
}

pub(crate) fn run(args: &Explain) -> Result<Outcome> {
    let (variable, text, config) = match &args.conf {
        Some(text) => {
            let (variable, conf) = pasted(text);
            (variable, conf.to_owned(), settings::parse("configuration", conf)?)
        }
        None => {
            let environment = settings::environment()?;
            let (variable, text) = environment.source.unzip();
            (variable, text.unwrap_or_default(), environment.config)
        }
    };
    let source = match (variable, &args.conf) {
        (Some(variable), _) => variable.to_owned(),
        (None, Some(_)) => "the argument".to_owned(),
        (None, None) => "no variable is set".to_owned(),
    };
    let notes = notes_for(variable, &text);
    let mut rows = config.explain_with(&registry::key_table());
    let defaults = Config::default().explain_with(&registry::key_table());
    let differs = |row: &ExplainRow| {
        let default = defaults.iter().find(|default| default.key == row.key);
        default.is_none_or(|default| default.value != row.value)
    };
    // The order of the rows: keys of the string, as in the string; then other keys that are set; then
    // keys whose defaults depend on these.
    rows.sort_by_key(|row| match row.origin {
        Origin::Text { at } => (0, at),
        Origin::Code | Origin::Earlier => (1, 0),
        Origin::Default => (if differs(row) { 2 } else { 3 }, 0),
    });
    let is_all = args.all || view::current().is_verbose();
    let is_shown = |row: &&ExplainRow| is_all || row.origin != Origin::Default || differs(row);
    let unbuilt = why_not_built(&config);
    if is_json() {
        let keys = rows.iter().filter(is_shown).map(key_json).collect::<Vec<_>>();
        let warnings = config.warnings().iter().map(ToString::to_string);
        let warnings: Vec<_> = warnings.chain(notes).collect();
        let json = json!({"source": source, "keys": keys, "warnings": warnings, "error": unbuilt});
        writeln!(out(), "{json}")?;
        return Ok(if unbuilt.is_none() { Outcome::Good } else { Outcome::Unjudged });
    }
    let mut out = out();
    say(&mut out, format_args!("source: {source}"))?;
    let shown_rows: Vec<Vec<String>> = rows.iter().filter(is_shown).map(cells).collect();
    let left = rows.len() - shown_rows.len();
    if shown_rows.is_empty() {
        say(&mut out, "Nothing is set: every key has its default.")?;
    } else {
        table(&mut out, &columns("key | value | from | PyTorch | note"), &shown_rows)?;
    }
    if left > 0 {
        let keys = counted_as(left as u64, "key has its default", "keys have their defaults");
        say(&mut out, format_args!("{keys}: --all shows all."))?;
    }
    for warning in config.warnings() {
        say(&mut out, format_args!("warning: {warning}"))?;
    }
    for note in notes {
        say(&mut out, format_args!("note: {}", shown(&note)))?;
    }
    match unbuilt {
        None => Ok(Outcome::Good),
        Some(why) => {
            write_stderr(format_args!("stratalloc: this cannot be built: {why}"));
            Ok(Outcome::Unjudged)
        }
    }
}

/// Returns what PyTorch refuses or reads otherwise. Keys that PyTorch lacks are included only for a variable
/// that it reads; elsewhere they are as meant for this library.
fn notes_for(variable: Option<&str>, text: &str) -> Vec<String> {
    if variable == Some("ALLOC_CONF") {
        return Vec::new();
    }
    let notes = torch_notes(text, &registry::key_table()).into_iter();
    notes.filter(|note| variable.is_some() || !note.lacks_key).map(|note| note.note).collect()
}

fn origin_of(row: &ExplainRow) -> String {
    match row.origin {
        Origin::Default => "default".to_owned(),
        Origin::Text { at } => format!("byte {at}"),
        Origin::Code => "code".to_owned(),
        Origin::Earlier => "earlier".to_owned(),
    }
}

fn key_json(row: &ExplainRow) -> Value {
    json!({
        "key": row.key,
        "value": row.value,
        "from": origin_of(row),
        "pytorch": row.since.map(|since| since.to_string()),
        "note": row.note,
        "idle": row.idle,
    })
}

fn cells(row: &ExplainRow) -> Vec<String> {
    let origin = origin_of(row);
    let since = row.since.map_or_else(|| "-".to_owned(), |since| format!("{since} on"));
    vec![row.key.clone(), row.value.clone(), origin, since, row.note.clone()]
}

/// Returns the configuration string in a text that the user pasted. If the text is a shell line that sets
/// an environment variable, returns the variable too.
fn pasted(text: &str) -> (Option<&str>, &str) {
    let line = text.trim();
    let line = line.strip_prefix("export ").unwrap_or(line).trim_start();
    let Some((name, value)) = line.split_once('=').filter(|(name, _)| VARIABLES.contains(name))
    else {
        return (None, text);
    };
    let quoted = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    (Some(name), quoted('"').or_else(|| quoted('\'')).unwrap_or(value))
}

/// Returns the reason why a configuration builds no allocator on a simulated device, if there is one.
/// The check loads no code and writes no file. It skips backends that programs register, because it is
/// unknown which device they need.
fn why_not_built(config: &Config) -> Option<String> {
    let settings = config.settings();
    let is_built_in = registry::BUILT_IN.iter().any(|own| own.name == settings.backend);
    if !is_built_in || settings.pluggable.library.is_some() {
        return None;
    }
    let options = SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() };
    let driver: Arc<dyn Driver> = Arc::new(Sim::new(options));
    let built = registry::build(&without_files(config), driver, BuildOptions::default());
    built.err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_shell_is_understood() {
        for line in [
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
            "export PYTORCH_CUDA_ALLOC_CONF=\"max_split_size_mb:64\"",
            " PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64' ",
        ] {
            let expected = (Some("PYTORCH_CUDA_ALLOC_CONF"), "max_split_size_mb:64");
            assert_eq!(pasted(line), expected, "{line}");
        }
        assert_eq!(pasted("HOME=x"), (None, "HOME=x"));
    }
}
