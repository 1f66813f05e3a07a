//! Configuration strings that this library accepts and PyTorch refuses or reads otherwise.
//!
//! Source: PyTorch's `AllocatorConfig`, measured with 2.15.0. Booleans are `True` or `False` and nothing
//! else; whole numbers are read up to the first other character; a double quote is part of a word.

use super::keys::{Key, KeyTable, Known};
use super::parse::{Entry, entries};
use super::read::{FLAG, RESERVE};
use super::token::{Kind, Token};

/// A part of a configuration string that PyTorch does not read as this library does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchNote {
    /// The key.
    pub key: String,
    /// Whether PyTorch has no such key, in any version. Otherwise the value is meant.
    pub lacks_key: bool,
    /// The difference, as a sentence without a full stop.
    pub note: String,
}

/// Returns the parts of a configuration string that PyTorch refuses or reads otherwise, in order. A string
/// that cannot be parsed has none. Keys that only newer versions have are not among them: see
/// [`Config::is_accepted_by`](super::Config::is_accepted_by).
#[must_use]
pub fn torch_notes(text: &str, table: &KeyTable) -> Vec<TorchNote> {
    entries(text, table).unwrap_or_default().iter().filter_map(note).collect()
}

fn note(entry: &Entry<'_, '_>) -> Option<TorchNote> {
    let (key, value) = (entry.key.name(), entry.value.text);
    let built_in = match &entry.key {
        Known::BuiltIn(key) if key.since.is_some() => *key,
        Known::BuiltIn(_) | Known::Extra(_) => {
            let note = format!("PyTorch has no key {key} and stops with a ValueError");
            return Some(TorchNote { key: key.to_owned(), lacks_key: true, note });
        }
    };
    let mut tokens = entry.value.tokens.iter();
    let why = tokens.find_map(|token| refused(built_in, entry.value.is_list, token))?;
    let note = format!("PyTorch does not read {key}:{value} so: {why}");
    Some(TorchNote { key: key.to_owned(), lacks_key: false, note })
}

/// Returns the form that PyTorch accepts, if it refuses this word of a value.
fn refused(key: &Key, is_list: bool, token: &Token<'_>) -> Option<String> {
    let text = token.text;
    match token.kind {
        Kind::Quoted => return Some(format!("it accepts {text} without quotes only")),
        Kind::Word => {}
        Kind::Comma | Kind::Colon | Kind::Open | Kind::Close => return None,
    }
    if key.range == FLAG.range {
        let is_exact = ["True", "False"].contains(&text);
        return (!is_exact).then(|| "it accepts True or False only".to_owned());
    }
    if key.name == "backend" {
        let is_known = ["native", "cudaMallocAsync", "hipMallocAsync"].contains(&text);
        return (!is_known)
            .then(|| "it has the backends native and cudaMallocAsync only".to_owned());
    }
    let is_number = text.parse::<f64>().is_ok();
    let has_unit = text.starts_with(|c: char| c.is_ascii_digit()) && !is_number;
    if key.range == RESERVE.range || (is_list && key.name == "expandable_segments_reserve_by_class")
    {
        let gib = text.strip_suffix(['G', 'g']).is_some_and(|number| number.parse::<f64>().is_ok());
        return (has_unit && !gib).then(|| "it accepts a fraction, or GiB as 8G, only".to_owned());
    }
    // These keys count MiB, so that a unit of MiB changes nothing.
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_mib = ["m", "mb", "mib"].iter().any(|mib| unit.eq_ignore_ascii_case(mib));
    let why = "it takes the leading digits and ignores the unit: write whole MiB";
    (has_unit && !is_mib).then(|| why.to_owned())
}
