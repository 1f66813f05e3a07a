//! Values that shells complete: keys of configurations, and versions of PyTorch.

use std::error::Error;
use std::ffi::OsStr;
use std::str::FromStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Command};

use stratalloc::config::TorchVersion;
use stratalloc::registry;

/// A parser with words that shells complete. It accepts other values too.
#[derive(Clone)]
struct Completed<P> {
    parser: P,
    words: fn() -> Vec<String>,
}

impl<P: TypedValueParser> TypedValueParser for Completed<P> {
    type Value = P::Value;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Self::Value, clap::Error> {
        self.parser.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.words)().into_iter().map(PossibleValue::new)))
    }
}

/// Returns a parser of configuration strings. Shells complete the keys.
pub(crate) fn conf() -> impl TypedValueParser<Value = String> {
    let words = || registry::key_table().names().map(|key| format!("{key}:")).collect();
    Completed { parser: StringValueParser::new(), words }
}

/// Returns a parser of versions of PyTorch. Shells complete the known ones.
pub(crate) fn torch<T>() -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Into<Box<dyn Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    Completed { parser: |text: &str| text.parse::<T>(), words: versions }
}

/// Returns the known versions, oldest first.
fn versions() -> Vec<String> {
    let newest = TorchVersion::nearest(u32::MAX, 0);
    let all = (1..).map(|minor: u32| format!("2.{minor}"));
    let is_known =
        |text: &String| text.parse().is_ok_and(|version: TorchVersion| version <= newest);
    all.take_while(is_known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_complete_the_versions_and_the_keys() {
        let versions = versions();
        assert!(versions.starts_with(&["2.1".to_owned()]) && versions.contains(&"2.15".to_owned()));
        let keys = conf().possible_values().expect("there are some").collect::<Vec<_>>();
        assert!(keys.iter().any(|key| key.get_name() == "max_split_size_mb:"));
    }
}
