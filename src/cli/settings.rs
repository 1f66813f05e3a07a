//! Where the command line's configurations come from.

use std::fmt;

use crate::config::{Config, ConfigError, FromEnvironment, KeyTable, from_environment};

/// A string that could not be used, as it is shown.
#[derive(Debug)]
pub(crate) struct BadConf {
    source: String,
    text: String,
    error: Box<ConfigError>,
}

impl fmt::Display for BadConf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n{}", self.source, self.error, self.error.caret(&self.text))
    }
}

impl std::error::Error for BadConf {}

/// The keys that are known here.
pub(crate) fn keys() -> KeyTable {
    crate::registry::key_table()
}

/// Parses one string.
pub(crate) fn parse(source: &str, text: &str) -> Result<Config, BadConf> {
    Config::parse(text, &keys()).map_err(|error| BadConf {
        source: source.to_owned(),
        text: text.to_owned(),
        error: Box::new(error),
    })
}

/// What the environment says.
pub(crate) fn environment() -> Result<FromEnvironment, BadConf> {
    from_environment(&keys(), |name| std::env::var(name).ok()).map_err(|error| BadConf {
        source: error.variable.to_owned(),
        text: error.text,
        error: error.error,
    })
}

/// The strings that were given, or the environment's, or `backend:native`.
pub(crate) fn confs_or_default(given: &[String]) -> Result<Vec<(String, Config)>, BadConf> {
    if !given.is_empty() {
        return given.iter().map(|text| Ok((text.clone(), parse("--conf", text)?))).collect();
    }
    let environment = environment()?;
    Ok(match environment.source {
        Some((_, text)) => vec![(text, environment.config)],
        None => vec![("backend:native".to_owned(), Config::default())],
    })
}
