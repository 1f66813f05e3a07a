//! Tips for wrong arguments: where an option, or a command of the Python package, is.

use std::path::Path;

use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands of the Python package, and what to run instead.
const ELSEWHERE: [(&str, &str); 6] = [
    ("run", "it is a command of the Python package: python -m stratalloc run PROGRAM"),
    ("hook", "it is a command of the Python package: python -m stratalloc hook --install"),
    ("preload", "it is a command of the Python package: python -m stratalloc preload"),
    (
        "watch",
        "a program watches itself: stratalloc.watch() in Python, or python -m stratalloc hook --install",
    ),
    ("account", "stratalloc info --pid PID lists the owners of the memory of a device"),
    ("install", "stratalloc.install() in Python replaces PyTorch's allocator"),
];

/// Adds tips to an error of the arguments. `program` has all commands.
pub(crate) fn add(error: &mut clap::Error, program: &Command) {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let Some(name) = text(error, ContextKind::InvalidSubcommand) else { return };
            let elsewhere = ELSEWHERE.iter().find(|(known, _)| *known == name);
            let tip = match elsewhere {
                Some((_, tip)) => (*tip).to_owned(),
                None if Path::new(&name).is_file() => {
                    format!("a command comes first: stratalloc advise {name}")
                }
                None => return,
            };
            error.remove(ContextKind::SuggestedSubcommand);
            set(error, &tip);
        }
        ErrorKind::UnknownArgument => {
            let Some(option) = text(error, ContextKind::InvalidArg) else { return };
            // "to pass '--conf' as a value, use '-- --conf'": no value begins with a dash.
            error.remove(ContextKind::Suggested);
            let commands = commands_with(&option, program);
            if let Some((last, others)) = commands.split_last() {
                let names = match others {
                    [] => last.clone(),
                    _ => format!("{} and {last}", others.join(", ")),
                };
                let option = option.split('=').next().unwrap_or(&option);
                // The usage has the similar option, too.
                error.remove(ContextKind::SuggestedArg);
                if let Some(usage) = usage(error, program) {
                    error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
                }
                set(error, &format!("'{option}' is an option of {names}"));
            }
        }
        _ => {}
    }
}

/// Returns the names of the commands that have an option.
fn commands_with(option: &str, program: &Command) -> Vec<String> {
    let long = option.strip_prefix("--").map(|long| long.split('=').next().unwrap_or(long));
    let short = option.strip_prefix('-').filter(|_| long.is_none());
    let short = short.and_then(|short| short.chars().next());
    let has = |command: &&Command| {
        command.get_arguments().filter(|one| !one.is_hide_set()).any(|one| {
            let is_long = long.is_some_and(|long| one.get_long() == Some(long));
            is_long || (short.is_some() && one.get_short() == short)
        })
    };
    let names = program.get_subcommands().filter(has).map(|command| command.get_name().to_owned());
    names.collect()
}

/// Returns the usage of the command that the usage in an error names.
fn usage(error: &clap::Error, program: &Command) -> Option<StyledStr> {
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else { return None };
    let usage = usage.to_string();
    let mut names = usage.split_whitespace().filter_map(|name| program.find_subcommand(name));
    Some(names.next()?.clone().render_usage())
}

fn set(error: &mut clap::Error, tip: &str) {
    let tip = ContextValue::StyledStrs(vec![StyledStr::from(tip.to_owned())]);
    error.insert(ContextKind::Suggested, tip);
}
