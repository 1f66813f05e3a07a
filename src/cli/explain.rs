//! `stratalloc explain`: every key, its value, where it came from.

use std::error::Error;
use std::io::Write;

use clap::Args;

use crate::config::Origin;

use super::outcome::{Outcome, out};
use super::settings;
use super::show::{Side, table};

/// Arguments of `explain`.
#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// A configuration string. Default: the environment's.
    conf: Option<String>,
}

pub(crate) fn run(args: &Explain) -> Result<Outcome, Box<dyn Error>> {
    let (source, config) = match &args.conf {
        Some(text) => ("the argument".to_owned(), settings::parse("configuration", text)?),
        None => {
            let environment = settings::environment()?;
            let source = environment.source.map_or("no variable is set", |(variable, _)| variable);
            (source.to_owned(), environment.config)
        }
    };
    let mut out = out();
    writeln!(out, "source: {source}")?;
    let mut keys = config.explain_with(&settings::keys());
    // What somebody said comes first.
    keys.sort_by_key(|row| row.origin == Origin::Default);
    let rows: Vec<Vec<String>> = keys
        .into_iter()
        .map(|row| {
            let origin = match row.origin {
                Origin::Default => "default".to_owned(),
                Origin::Text { at } => format!("byte {at}"),
                Origin::Code => "code".to_owned(),
                Origin::Earlier => "earlier".to_owned(),
            };
            vec![row.key, row.value, origin, row.note]
        })
        .collect();
    let heading =
        [("key", Side::Left), ("value", Side::Left), ("from", Side::Left), ("note", Side::Left)];
    table(&mut out, &heading, &rows)?;
    for warning in config.warnings() {
        writeln!(out, "warning: {warning}")?;
    }
    Ok(Outcome::Good)
}
