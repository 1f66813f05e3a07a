//! Defaults of options from the environment and from the file `stratalloc.toml`.
//!
//! A job of CI repeats the same options in every command. A variable or a line of the file replaces the
//! default of an option, so an option precedes both, and a variable precedes the file. The file is the one
//! in the working folder; no other folder is searched. It may come from elsewhere, as a recording does: it is
//! bounded, an unknown key is an error, and its configurations neither write files nor load code.

use std::fmt::Display;
use std::io::Read;
use std::path::Path;

use clap::builder::OsStr;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use stratalloc::config::{nearest_of, shown};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::outcome::{BadArguments, Result, write_note};
use super::settings;

/// The name of the file.
const FILE: &str = "stratalloc.toml";
/// The most bytes that the file may have.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// An option with a default from the environment or the file.
struct Key {
    /// The name of the option, which is that of the key in the file.
    name: &'static str,
    /// The environment variable.
    variable: &'static str,
    /// A value, for messages.
    example: &'static str,
    form: Form,
}

/// The form of a value in the file. Text is always accepted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    WholeNumber,
    Number,
    List,
}

const fn key(name: &'static str, variable: &'static str, example: &'static str, form: Form) -> Key {
    Key { name, variable, example, form }
}

const KEYS: [Key; 7] = [
    key("torch", "STRATALLOC_TORCH", "\"2.8\"", Form::Text),
    key("total-memory", "STRATALLOC_TOTAL_MEMORY", "\"80GiB\"", Form::Text),
    key("memory-fraction", "STRATALLOC_MEMORY_FRACTION", "0.9", Form::Number),
    key("recorded-device", "STRATALLOC_RECORDED_DEVICE", "0", Form::WholeNumber),
    key("max-input", "STRATALLOC_MAX_INPUT", "\"8GiB\"", Form::Text),
    key("seconds", "STRATALLOC_SECONDS", "120", Form::WholeNumber),
    key("conf", "STRATALLOC_CONF", "[\"expandable_segments:True\"]", Form::List),
];

/// The default of an option.
struct OptionDefault {
    key: &'static Key,
    values: Vec<String>,
    /// The variable, or the file and the line, for messages.
    origin: String,
}

/// The defaults of this run.
pub(crate) struct Defaults(Vec<OptionDefault>);

impl Defaults {
    /// Reads the environment and the file.
    ///
    /// # Errors
    ///
    /// The file, the line and the reason, if the file cannot be used.
    pub(crate) fn read() -> Result<Self> {
        let of_file = match read_file(Path::new(FILE))? {
            Some(text) => of_file(&text)?,
            None => Vec::new(),
        };
        let mut all = Vec::new();
        for key in &KEYS {
            // An empty variable is treated as one that is not set, as jobs of CI often set such.
            match std::env::var_os(key.variable).filter(|text| !text.is_empty()) {
                Some(text) => {
                    let text = text.into_string().map_err(|_| {
                        BadArguments(format!("{}: expected text in UTF-8", key.variable))
                    })?;
                    all.push(OptionDefault {
                        key,
                        values: vec![text],
                        origin: key.variable.to_owned(),
                    });
                }
                None => {
                    all.extend(of_file.iter().find(|one| one.key.name == key.name).map(|one| {
                        OptionDefault {
                            key,
                            values: one.values.clone(),
                            origin: one.origin.clone(),
                        }
                    }))
                }
            }
        }
        for one in all.iter().filter(|one| one.key.form == Form::List) {
            one.check_confs()?;
        }
        Ok(Self(all))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sets the defaults of the options that a command has.
    ///
    /// # Errors
    ///
    /// The origin and the reason, if an option refuses its value.
    pub(crate) fn set(&self, mut command: Command) -> Result<Command> {
        for default in &self.0 {
            let Some(arg) = command.get_arguments().find(|arg| default.is_for(arg)) else {
                continue;
            };
            default.check(arg)?;
            let id = arg.get_id().clone();
            let values: Vec<OsStr> = default.values.iter().map(OsStr::from).collect();
            command = command.mut_arg(id, |arg| arg.default_values(values));
        }
        Ok(command)
    }

    /// Prints which defaults were used.
    pub(crate) fn write_used(&self, matches: &ArgMatches) {
        for default in &self.0 {
            let id = default.key.name.replace('-', "_");
            let is_known = matches.ids().any(|known| known.as_str() == id);
            if is_known && matches.value_source(&id) == Some(ValueSource::DefaultValue) {
                let OptionDefault { key, values, origin } = default;
                write_note(format_args!("{origin}: --{} {}", key.name, values.join(" ")));
            }
        }
    }
}

/// Returns true for commands whose options have defaults: those that read recordings.
pub(crate) fn are_for(command: &Command) -> bool {
    command.get_arguments().any(|arg| arg.get_id() == "max_input")
}

impl OptionDefault {
    /// Returns true for the option of this name. An option that takes one configuration replaces the recorded
    /// one, so only lists of configurations have a default.
    fn is_for(&self, arg: &Arg) -> bool {
        let is_list = matches!(arg.get_action(), ArgAction::Append);
        arg.get_long() == Some(self.key.name) && (self.key.form == Form::List) == is_list
    }

    /// Returns an error if the option refuses a value.
    fn check(&self, arg: &Arg) -> Result<()> {
        for value in &self.values {
            let alone = arg.clone().help_heading(None).conflicts_with_all(None::<&str>);
            let parsed = Command::new("defaults").no_binary_name(true).arg(alone);
            let option = format!("--{}={value}", self.key.name);
            if let Err(error) = parsed.try_get_matches_from([option]) {
                let reason = error.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                let reason = reason.strip_prefix("error: ").unwrap_or(reason);
                return Err(self.error(reason));
            }
        }
        Ok(())
    }

    /// Returns an error if a configuration cannot be used, writes a file or loads code.
    fn check_confs(&self) -> Result<()> {
        for conf in &self.values {
            settings::from_elsewhere(conf).map_err(|error| self.error(error))?;
        }
        Ok(())
    }

    fn error(&self, reason: impl Display) -> Box<dyn std::error::Error> {
        BadArguments(format!("{}: {}: {reason}", self.origin, self.key.name)).into()
    }
}

/// Returns the text of the file; `None` if there is none.
fn read_file(path: &Path) -> Result<Option<String>> {
    let failed = |error: std::io::Error| BadArguments(format!("{FILE}: {error}"));
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(failed)?,
    };
    if !metadata.is_file() {
        return Err(BadArguments(format!("{FILE}: expected a file")).into());
    }
    let (mut bytes, file) = (Vec::new(), std::fs::File::open(path).map_err(failed)?);
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let most = FILE_BYTES_MAX / 1024;
        return Err(BadArguments(format!("{FILE}: it is larger than {most} KiB")).into());
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|_| BadArguments(format!("{FILE}: expected text in UTF-8")).into())
}

/// Returns the defaults in the text of the file.
fn of_file(text: &str) -> Result<Vec<OptionDefault>> {
    let line = |at: usize| 1 + text.as_bytes().iter().take(at).filter(|one| **one == b'\n').count();
    let place = |at: usize| format!("{FILE}:{}", line(at));
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        BadArguments(format!("{}: {}", place(at), shown(error.message())))
    })?;
    let mut all = Vec::new();
    for (name, value) in table.get_ref() {
        let origin = place(name.span().start);
        let name = name.get_ref().as_ref();
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            let known = KEYS.iter().map(|key| key.name);
            let hint = match nearest_of(name, known.clone()) {
                Some(nearest) => format!("did you mean {nearest}?"),
                None => format!("expected one of {}", known.collect::<Vec<_>>().join(", ")),
            };
            let name = shown(name);
            return Err(BadArguments(format!("{origin}: unknown key {name}: {hint}")).into());
        };
        let values = values(key, value).ok_or_else(|| {
            let (at, name) = (place(value.span().start), key.name);
            let example = key.example;
            BadArguments(format!("{at}: {name}: expected a value such as {name} = {example}"))
        })?;
        all.push(OptionDefault { key, values, origin });
    }
    Ok(all)
}

/// Returns the values of a key as text, if they have its form.
fn values(key: &Key, value: &Spanned<DeValue<'_>>) -> Option<Vec<String>> {
    match (value.get_ref(), key.form) {
        (DeValue::String(text), _) => Some(vec![text.as_ref().to_owned()]),
        (DeValue::Integer(number), Form::WholeNumber | Form::Number) if number.radix() == 10 => {
            Some(vec![number.as_str().to_owned()])
        }
        (DeValue::Float(number), Form::Number) => Some(vec![number.as_str().to_owned()]),
        (DeValue::Array(list), Form::List) => {
            let text = |one: &Spanned<DeValue<'_>>| one.get_ref().as_str().map(str::to_owned);
            list.iter().map(text).collect()
        }
        _ => None,
    }
}
