//! The environment variables that may hold the configuration string, and their precedence.

use super::{Config, ConfigError, ConfigWarning, KeyTable, Span};

/// The variables in order of precedence. The first one that is set is used, and the others are ignored.
/// This library's own variable comes first, then PyTorch's variables in PyTorch's order.
pub const VARIABLES: [&str; 4] =
    ["ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// The configuration found in the environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FromEnvironment {
    /// The configuration. The default one if no variable is set.
    pub config: Config,
    /// The variable that was used, and its text.
    pub source: Option<(&'static str, String)>,
}

/// A variable with an invalid text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {error}")]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// The text of the variable.
    pub text: String,
    /// The error, with its position in the text.
    #[source]
    pub error: Box<ConfigError>,
}

/// Returns the configuration of this process's environment.
///
/// # Errors
///
/// [`EnvironmentError`] when the text of the variable in use is invalid, or is not UTF-8.
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
    // Lossy: the text in use is UTF-8 (checked above), and the others are only compared with it.
    let lossy = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    from_environment(table, lossy)
}

/// Returns the configuration from environment variables. `lookup` returns the text of a variable.
///
/// # Errors
///
/// [`EnvironmentError`] when the text of the variable in use is invalid.
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
