//! Where the command line's configurations come from.

use stratalloc::config::{
    Config, ConfigError, FromEnvironment, Origin, Span, from_process, nearest_of,
};
use stratalloc::registry::{self, BuildError};
use stratalloc_analysis::{Need, Recording, SearchOptions};
use stratalloc_recording::ReplayError;

use super::host::Host;
use super::outcome::{BadArguments, Result, write_note, write_warning};

/// A configuration string with the parsed configuration.
pub(crate) type NamedConf = (String, Config);

/// A configuration string that could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{origin}: {error}\n{}", error.caret(text))]
pub(crate) struct BadConf {
    origin: String,
    text: String,
    error: Box<ConfigError>,
}

impl BadConf {
    fn new(origin: &str, text: &str, error: ConfigError) -> Self {
        Self { origin: origin.to_owned(), text: text.to_owned(), error: Box::new(error) }
    }

    /// Adds the name of the recording's file to the error.
    pub(crate) fn in_file(self, file: &str) -> Self {
        Self { origin: format!("{file}: {}", self.origin), ..self }
    }
}

/// Parses a configuration string. An unknown backend is an error.
pub(crate) fn parse(source: &str, text: &str) -> Result<Config, BadConf> {
    let parsed = Config::parse(text, &registry::key_table());
    let known = parsed.and_then(|config| check_backend(text, &config).map(|()| config));
    known.map_err(|error| BadConf::new(source, text, error))
}

/// Parses the configuration of a recording. Recordings come from untrusted sources, so their
/// configuration may neither write files nor load code.
pub(crate) fn recorded(text: &str) -> Result<Config> {
    untrusted("the trace's configuration", text)
}

/// Parses a configuration from a file or a variable that the user may not know.
pub(crate) fn from_elsewhere(text: &str) -> Result<Config> {
    untrusted("configuration", text)
}

fn untrusted(source: &str, text: &str) -> Result<Config> {
    let config = parse(source, text)?;
    let settings = config.settings();
    if settings.writes_files() || settings.pluggable.library.is_some() {
        let why = format!("{source} writes a file or loads a library, which only --conf may do");
        return Err(BadArguments(why).into());
    }
    Ok(config)
}

/// Returns the configuration given by environment variables.
pub(crate) fn environment() -> Result<FromEnvironment, BadConf> {
    let from_env = from_process(&registry::key_table()).map_err(|error| BadConf {
        origin: error.variable.to_owned(),
        text: error.text,
        error: error.error,
    })?;
    if let Some((variable, text)) = &from_env.source
        && let Err(error) = check_backend(text, &from_env.config)
    {
        return Err(BadConf::new(variable, text, error));
    }
    Ok(from_env)
}

/// Checks that the backend exists. The library accepts any name when it parses, because a backend may be
/// registered later. Here all backends are registered already.
fn check_backend(text: &str, config: &Config) -> Result<(), ConfigError> {
    let backend = &config.settings().backend;
    let Err(BuildError::UnknownBackend { known, .. }) = registry::check_name(backend) else {
        return Ok(());
    };
    let at = match config.origin("backend") {
        Origin::Text { at } => at,
        Origin::Default | Origin::Code | Origin::Earlier => 0,
    };
    // The backend's name follows its key and a colon, and may be in quotes.
    let from = text.get(at..).and_then(|rest| rest.find(':')).map_or(at, |colon| at + colon);
    let name_at = text.get(from..).and_then(|rest| rest.find(backend.as_str()));
    let span = Span { at: name_at.map_or(at, |name| from + name), len: backend.len() };
    let expected = format!("one of {}", known.join(", "));
    let nearest = nearest_of(backend, known.iter().map(String::as_str));
    Err(ConfigError { key: "backend".to_owned(), span, expected, nearest })
}

/// Prints which keys of a configuration have no effect with its backend. `has_limit` is true if a
/// command-line option sets a limit, which the configuration does not contain.
pub(crate) fn write_idle_keys(config: &Config, has_limit: bool) {
    let keys = registry::key_table();
    // Some keys act with a limit only. Any fraction below 1 is one.
    let limited = || format!("{},per_process_memory_fraction:0.5", config.to_text());
    let limited = has_limit.then(|| Config::parse(limited().trim_start_matches(','), &keys).ok());
    let in_force = limited.flatten().as_ref().unwrap_or(config).explain_with(&keys);
    for (row, in_force) in config.explain_with(&keys).into_iter().zip(in_force) {
        if let (Origin::Text { .. }, Some(why)) = (row.origin, in_force.idle) {
            write_note(format_args!("{} does nothing here: {why}", row.key));
        }
    }
}

/// Searches the need of a recording, with all orders of addresses.
pub(crate) fn need_of(
    recording: &Recording,
    config: &Config,
    options: &SearchOptions,
) -> Result<Need, ReplayError> {
    let host = &Host::default();
    let mut need = Need::search(recording, config, options, host)?;
    need.try_other_addresses(recording, config, options, host)?;
    Ok(need)
}

/// Returns the configurations in `texts`. If there are none, returns that of the environment, or
/// `backend:native`.
pub(crate) fn confs_or_default(texts: &[String]) -> Result<Vec<NamedConf>, BadConf> {
    if !texts.is_empty() {
        let parsed = |text: &String| Ok((text.clone(), parse("--conf", text)?));
        let confs: Vec<_> = texts.iter().map(parsed).collect::<Result<_, _>>()?;
        confs.iter().for_each(|(_, config)| write_idle_keys(config, false));
        return Ok(confs);
    }
    let environment = environment()?;
    for warning in environment.config.warnings() {
        write_warning(warning);
    }
    Ok(match environment.source {
        Some((_, text)) => vec![(text, environment.config)],
        None => vec![("backend:native".to_owned(), Config::default())],
    })
}
