//! The variables that may hold the string, and which of them counts.

use super::{Config, ConfigError, ConfigWarning, KeyTable, Span};

/// The variables in the order in which they are looked at: the first that is set counts, the others
/// are ignored. After ours, PyTorch's names in PyTorch's order.
pub const VARIABLES: [&str; 4] =
    ["ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// What the environment says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FromEnvironment {
    /// The configuration; the default if no variable is set.
    pub config: Config,
    /// The variable that counts, and its text.
    pub source: Option<(&'static str, String)>,
}

/// A variable whose text could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {error}")]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// Its text.
    pub text: String,
    /// What is wrong with it.
    #[source]
    pub error: Box<ConfigError>,
}

/// The configuration of this process's environment.
///
/// # Errors
///
/// [`EnvironmentError`] when the variable that counts holds a text that cannot be used, or no text.
pub fn from_process(table: &KeyTable) -> Result<FromEnvironment, EnvironmentError> {
    let set = VARIABLES.iter().find_map(|name| Some((*name, std::env::var_os(name)?)));
    if let Some((variable, bytes)) = set
        && let Err(error) = str::from_utf8(bytes.as_encoded_bytes())
    {
        let text = bytes.to_string_lossy().into_owned();
        let at = error.valid_up_to();
        let span = Span { at, len: char::REPLACEMENT_CHARACTER.len_utf8() };
        let error = Box::new(ConfigError::new("", span, "text in UTF-8"));
        return Err(EnvironmentError { variable, text, error });
    }
    // Of one that does not count it is enough that it differs.
    let lossy = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    from_environment(table, lossy)
}

/// The configuration of an environment; `lookup` gives a variable's text.
///
/// # Errors
///
/// [`EnvironmentError`] when the variable that counts holds a text that cannot be used.
pub fn from_environment(
    table: &KeyTable,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<FromEnvironment, EnvironmentError> {
    let mut set = VARIABLES.iter().filter_map(|name| lookup(name).map(|text| (*name, text)));
    let Some((variable, text)) = set.next() else { return Ok(FromEnvironment::default()) };
    let mut config = match Config::parse(&text, table) {
        Ok(config) => config,
        Err(error) => return Err(EnvironmentError { variable, text, error: Box::new(error) }),
    };
    for (ignored, other) in set {
        if other != text {
            config.warnings.push(ConfigWarning::Disagreement { used: variable, ignored });
        }
    }
    Ok(FromEnvironment { config, source: Some((variable, text)) })
}
