//! Configuration strings. A parsed string must equal itself after it is written and parsed again, and an
//! error must point at its position in the string.
//!
//! An allocator is built from the first line of the input. The rest is a second string, applied while
//! blocks are live.

use std::sync::{Arc, LazyLock};

use stratalloc::allocator::{DeviceAllocator, Request};
use stratalloc::config::{
    Config, ConfigError, ConfigWarning, KeyTable, LayerSetting, Origin, Settings, UserKey,
};
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc_sim::{Sim, SimOptions};
use unicode_width::UnicodeWidthChar;

/// The maximum length of an error message.
const MESSAGE_MAX_BYTES: usize = 1200;

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (first, second) = text.split_once('\n').unwrap_or((&text, ""));
    static TABLE: LazyLock<KeyTable> = LazyLock::new(table);
    let Some(config) = parsed(&Config::default(), first, &TABLE) else { return };
    let later = parsed(&config, second, &TABLE);
    live(&config, later.as_ref());
}

/// Returns the table of built-in keys, with one user-declared key of each kind added.
fn table() -> KeyTable {
    let balanced = |text: &str| text.matches('[').count() == text.matches(']').count();
    KeyTable::default()
        .with(UserKey::flag("arena_flag", "a flag"))
        .with(UserKey::whole("arena_whole", 0..=u64::MAX, "a number"))
        .with(UserKey::number("arena_number", -1.0..=1e300, "a number"))
        .with(UserKey::one_of("arena_mode", &["fast", "[slow]", "größe"], "a word"))
        .with(UserKey::checked("arena_list", "brackets in pairs", "a list", balanced))
        .with(UserKey::anything("arena_any", "anything"))
}

fn parsed(before: &Config, text: &str, table: &KeyTable) -> Option<Config> {
    match before.updated(text, table) {
        Ok(config) => {
            accepted(&config, text, table);
            Some(config)
        }
        Err(error) => {
            refused(&error, text);
            assert_eq!(before.updated(text, table), Err(error), "the same each time");
            None
        }
    }
}

fn accepted(config: &Config, text: &str, table: &KeyTable) {
    let printed = config.to_text();
    let again = Config::parse(&printed, table);
    let again = again.unwrap_or_else(|error| panic!("{printed:?} is not read back: {error}"));
    assert_eq!(sorted(again.settings()), sorted(config.settings()), "{printed:?}");
    assert_eq!(again.to_text(), printed);
    let in_range = Config::from_settings(config.settings().clone());
    assert_eq!(in_range.settings(), config.settings(), "what is parsed is in range");
    for row in config.explain_with(table) {
        assert!(!row.value.is_empty() || row.key.starts_with("arena"), "{row:?}");
        if let Origin::Text { at } = row.origin {
            let word = text[at..].trim_start_matches('"');
            let is_known = table.names().any(|name| name == row.key);
            assert!(!word.is_empty() && is_known, "{row:?} at {at}");
        }
    }
    for warning in config.warnings() {
        let ConfigWarning::Repeated { earlier_at, last_at, .. } = warning else { continue };
        assert!(earlier_at < last_at && *last_at < text.len(), "{warning:?}");
    }
}

/// Returns the settings with users' keys sorted by name, because their order has no meaning.
fn sorted(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.extra.sort();
    settings
}

fn refused(error: &ConfigError, text: &str) {
    let (at, end) = (error.span.at, error.span.at + error.span.len);
    assert!(end <= text.len(), "{error:?} in {} bytes", text.len());
    assert!(text.is_char_boundary(at) && text.is_char_boundary(end), "{error:?}");
    let message = error.to_string();
    assert!(message.len() <= MESSAGE_MAX_BYTES, "{} bytes", message.len());
    assert!(!message.contains(char::is_control), "{message:?}");
    let caret = error.caret(text);
    let [line, marks] = caret.split('\n').collect::<Vec<_>>()[..] else {
        panic!("two lines: {caret:?}")
    };
    let shown = |line: &str| -> usize {
        let width = |c: char| c.width().unwrap_or_else(|| panic!("{c:?} has no place in a line"));
        line.chars().map(width).sum()
    };
    assert!(shown(line) <= 280 && marks.len() <= 280, "{caret}");
    let carets = marks.trim_start_matches(' ');
    assert!(!carets.is_empty() && carets.bytes().all(|byte| byte == b'^'), "{caret}");
    // The carets begin and end at the edge of a character. The last one may also be just behind the line.
    let indent = marks.len() - carets.len();
    let starts: Vec<usize> = (0..=line.len())
        .filter(|at| line.is_char_boundary(*at))
        .map(|at| shown(&line[..at]))
        .collect();
    assert!(starts.contains(&indent), "{caret}");
    assert!(starts.contains(&marks.len()) || marks.len() == shown(line) + 1, "{caret}");
}

/// Builds the configured allocator on a simulated device, uses it and applies the second configuration.
fn live(config: &Config, later: Option<&Config>) {
    let settings = config.settings();
    // Configurations with a log file or a foreign library are skipped, because the input would choose
    // the file.
    let writes = |layer: &LayerSetting| matches!(layer, LayerSetting::Log { .. });
    if settings.backend == "pluggable" || settings.layers.iter().any(writes) {
        return;
    }
    let options = SimOptions { total_bytes: 2 << 30, ..SimOptions::default() };
    let sim = Arc::new(Sim::new(options));
    let Ok(allocator) = registry::build(config, sim.clone(), BuildOptions::default()) else {
        return;
    };
    let sizes = [1, 513, (1 << 20) + 1, 12 << 20, 300 << 20, 1 << 62, u64::MAX];
    let mut blocks = Vec::new();
    for round in 0..2 {
        for bytes in sizes {
            let block = allocator.allocate(Request::new(bytes, StreamId(round)));
            blocks.extend(block.inspect(|block| assert!(block.size_bytes() >= bytes.min(1 << 62))));
        }
        if let (0, Some(later), Some(caching)) = (round, later, allocator.control().caching) {
            // The driver may refuse the change; the blocks stay live either way.
            let _ = caching.apply(later);
        }
    }
    for block in blocks {
        let freed = allocator.free(block);
        assert!(freed.is_ok(), "{freed:?}");
    }
    drop(allocator);
    assert!(sim.held().is_nothing(), "{:?}", sim.held());
}
