//! Every key, its value, where it came from, and what to know about it.

use super::keys::{Acts, BUILT_IN, Key, is_built_in};
use super::layers::LayerSetting;
use super::settings::{CpuSettings, HandleType, PeersSetting, Reserve, Settings};
use super::versions::{Compat, TorchVersion};
use super::{Config, KeyTable, Origin};
use crate::size::{GIB, MIB, RoundupDivisions};

/// One line of an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainRow {
    /// The key.
    pub key: String,
    /// Its value in the syntax of the string.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
    /// What it does, and why it does nothing here if that is so.
    pub note: String,
    /// Why it does nothing here, though it is said.
    pub idle: Option<String>,
    /// The first version of PyTorch that accepts the key; 2.1 if an older one does. `None` if PyTorch has no
    /// such key.
    pub since: Option<TorchVersion>,
}

impl ExplainRow {
    fn new(key: &str, value: String, origin: Origin, meaning: &str, idle: Option<String>) -> Self {
        let why = idle.as_ref().map(|why| format!(" - not in effect as such: {why}"));
        let note = format!("{meaning}{}", why.unwrap_or_default());
        Self { key: key.to_owned(), value, origin, note, idle, since: None }
    }
}

impl Config {
    /// Every built-in key with its value, and users' keys that the text says.
    #[must_use]
    pub fn explain(&self) -> Vec<ExplainRow> {
        self.explain_with(&KeyTable::default())
    }

    /// Every key of the table with its value, what it means, and why it does nothing here if that is
    /// so.
    #[must_use]
    pub fn explain_with(&self, table: &KeyTable) -> Vec<ExplainRow> {
        let settings = &self.settings;
        let built_in = BUILT_IN.iter().map(|key| {
            let (value, origin) = (value_of(settings, key.name), self.origin(key.name));
            let once = if key.is_fixed { "; read once, when an allocator is built" } else { "" };
            let meaning = format!("{}{once}", key.meaning);
            let row = ExplainRow::new(key.name, value, origin, &meaning, idle(settings, key));
            ExplainRow { since: key.since, ..row }
        });
        let declared = table.extra().iter().map(|key| {
            let value = settings.user_value(key.name());
            let idle = value.and(key.owner()).filter(|owner| *owner != settings.backend);
            let idle = idle.map(|owner| format!("backend:{owner} only"));
            let (value, origin) = (value.unwrap_or("unset").to_owned(), self.origin(key.name()));
            ExplainRow::new(key.name(), value, origin, key.meaning(), idle)
        });
        let undeclared = settings.extra.iter().filter(|(key, _)| !table.knows(key));
        let undeclared = undeclared.map(|(key, value)| {
            let meaning = "handed to the strategy that knows it";
            ExplainRow::new(key, value.clone(), self.origin(key), meaning, None)
        });
        built_in.chain(declared).chain(undeclared).collect()
    }

    /// A string that says the same; what it does not mention has its default.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.to_text_over(&Settings::default())
    }

    /// The same for a reader with these defaults.
    pub(crate) fn to_text_over(&self, defaults: &Settings) -> String {
        let told = BUILT_IN.iter().filter(|key| differ(&self.settings, defaults, key.name));
        let mut parts: Vec<String> = told
            .map(|key| format!("{}:{}", key.name, value_of(&self.settings, key.name)))
            .collect();
        parts.extend(self.settings.extra.iter().map(|(key, value)| {
            // Only a list can hold a quote. Everything else is said as a word: a word may look like
            // a list, and be no list that is closed.
            if value.contains('"') {
                format!("{key}:{value}")
            } else {
                format!("{key}:\"{value}\"")
            }
        }));
        parts.join(",")
    }
}

/// Whether the string says a key differently of these settings than of the others.
pub(super) fn differ(settings: &Settings, other: &Settings, key: &str) -> bool {
    match key {
        // Its default follows another key, so that it counts whether it was set.
        "max_non_split_rounding_mb" => {
            settings.max_non_split_rounding_bytes != other.max_non_split_rounding_bytes
        }
        // A path that code says may look like more layers.
        "layers" => settings.layers != other.layers,
        _ => value_of(settings, key) != value_of(other, key),
    }
}

/// A key's value in the syntax of the string; `unlimited`, `off` or `unset` where there is none.
fn value_of(settings: &Settings, key: &str) -> String {
    let flag = |on: bool| if on { "True" } else { "False" }.to_owned();
    let mib = |bytes: u64| (bytes / MIB).to_string();
    let or = |bytes: Option<u64>, none: &str| bytes.map_or_else(|| none.to_owned(), mib);
    let pinned = &settings.pinned;
    match key {
        "backend" => settings.backend.clone(),
        "large_segment_size_mb" => mib(settings.large_segment_bytes),
        "max_split_size_mb" => or(settings.max_split_bytes, "unlimited"),
        "max_non_split_rounding_mb" => mib(settings.non_split_rounding_bytes()),
        "garbage_collection_threshold" => settings
            .garbage_collection_threshold
            .map_or_else(|| "off".to_owned(), |x| x.to_string()),
        "roundup_power2_divisions" => divisions(&settings.roundup),
        "expandable_segments_ipc" => flag(settings.expandable_segments_ipc),
        "expandable_segments" => flag(settings.expandable_segments),
        "expandable_segments_handle_type" => match settings.expandable_segments_handle_type {
            HandleType::Unspecified => "unspecified".to_owned(),
            HandleType::PosixFd => "posix_fd".to_owned(),
            HandleType::Fabric => "fabric".to_owned(),
        },
        "release_lock_on_cudamalloc" => flag(settings.release_lock_on_device_allocate),
        "graph_capture_record_stream_reuse" => flag(settings.graph_capture_record_stream_reuse),
        "per_process_memory_fraction" => settings.per_process_memory_fraction.to_string(),
        "throw_on_cudamalloc_oom" => flag(settings.throw_on_device_oom),
        "expandable_segments_reserve" => {
            settings.expandable_reserve.map_or_else(|| "unset".to_owned(), reserve)
        }
        "expandable_segments_reserve_by_class" => {
            let classes = &settings.expandable_reserve_by_class;
            let parts: Vec<_> = classes
                .iter()
                .map(|(name, size)| format!("\"{name}\":{}", reserve(*size)))
                .collect();
            format!("[{}]", parts.join(","))
        }
        "malloc_async_own_pool" => flag(settings.malloc_async_own_pool),
        "layers" => {
            let parts: Vec<_> = settings.layers.iter().map(LayerSetting::text).collect();
            format!("[{}]", parts.join(","))
        }
        "pinned_use_background_threads" => flag(pinned.use_background_threads),
        "pinned_max_round_threshold_mb" => or(pinned.max_round_threshold_bytes, "unlimited"),
        "pinned_max_cached_size_mb" => or(pinned.max_cached_bytes, "unlimited"),
        "pinned_use_cuda_host_register" => flag(pinned.use_host_register),
        "pinned_num_register_threads" => pinned.register_threads.to_string(),
        "pinned_reserve_segment_size_mb" => or(pinned.reserve_segment_bytes, "off"),
        "pinned_free_catch_all" => flag(pinned.free_catch_all),
        "compat" => settings.compat.name().to_owned(),
        "record_history" => {
            let max = settings.history.entries_max;
            max.map_or_else(|| "off".to_owned(), |max| max.to_string())
        }
        "snapshot_on_oom" => {
            let path = settings.history.snapshot_on_oom.as_deref();
            path.map_or_else(|| "unset".to_owned(), word)
        }
        "advise_on_oom" => flag(settings.history.advise_on_oom),
        "peers" => match settings.peers {
            PeersSetting::Auto => "auto".to_owned(),
            PeersSetting::None => "none".to_owned(),
        },
        cpu if cpu.starts_with("cpu_") => cpu_value(&settings.cpu, cpu),
        other => {
            let mut pluggable = settings.pluggable.clone();
            let place = pluggable.place(other).expect("every key of the table has a value");
            place.as_deref().map_or_else(|| "unset".to_owned(), word)
        }
    }
}

fn cpu_value(cpu: &CpuSettings, key: &str) -> String {
    let flag = |on: bool| if on { "True" } else { "False" }.to_owned();
    let or = |value: Option<String>, none: &str| value.unwrap_or_else(|| none.to_owned());
    match key {
        "cpu_alignment" => cpu.alignment_bytes.to_string(),
        "cpu_cached_max_mb" => {
            or(cpu.cached_max_bytes.map(|bytes| (bytes / MIB).to_string()), "unlimited")
        }
        "cpu_trim_age_s" => or(cpu.trim_age.map(|age| age.as_secs_f64().to_string()), "off"),
        "cpu_stop_caching_on_oom" => flag(cpu.stop_caching_on_oom),
        "cpu_huge_pages" => flag(cpu.huge_pages),
        "cpu_zero_fill" => flag(cpu.zero_fill),
        "cpu_junk_fill" => flag(cpu.junk_fill),
        "cpu_numa_node" => or(cpu.numa_node.map(|node| node.to_string()), "any"),
        other => unreachable!("every key of the table has a value: {other}"),
    }
}

/// A word as the string has to say it; in quotes also where it could be taken for no value.
fn word(text: &str) -> String {
    let plain = !text.contains(|c: char| ",:[]\"".contains(c) || c.is_whitespace());
    if plain && text != "unset" { text.to_owned() } else { format!("\"{text}\"") }
}

fn reserve(reserve: Reserve) -> String {
    match reserve {
        Reserve::Fraction(fraction) => fraction.to_string(),
        #[expect(clippy::cast_precision_loss, reason = "shown to people")]
        Reserve::Bytes(bytes) => format!("{}G", bytes as f64 / GIB as f64),
    }
}

fn divisions(roundup: &RoundupDivisions) -> String {
    let all = roundup.divisions();
    if all.iter().all(|d| *d == 0) {
        return "off".to_owned();
    }
    if all.iter().all(|d| *d == all[0]) {
        return all[0].to_string();
    }
    let parts: Vec<_> =
        all.iter().enumerate().map(|(interval, d)| format!("{}:{d}", 1u64 << interval)).collect();
    format!("[{}]", parts.join(","))
}

/// Why a key that says something does nothing here.
fn idle(settings: &Settings, key: &Key) -> Option<String> {
    if value_of(settings, key.name) == value_of(&Settings::default(), key.name) {
        return None;
    }
    let backend = settings.backend.as_str();
    match key.acts {
        Acts::NotYet => Some("parsed and checked; not yet acted on".to_owned()),
        Acts::Always => None,
        _ if !is_built_in(backend) => Some("as its strategy reads it".to_owned()),
        acts if !acts.reaches(backend) => Some(format!("{} only", acts.whose())),
        Acts::Expandable if !settings.expandable_segments => {
            Some("acts with expandable_segments:True only".to_owned())
        }
        _ => match key.name {
            "garbage_collection_threshold" if settings.per_process_memory_fraction >= 1.0 => {
                Some("acts once a memory limit is set".to_owned())
            }
            "max_non_split_rounding_mb" if settings.max_split_bytes.is_none() => {
                Some("acts with max_split_size_mb only".to_owned())
            }
            "max_split_size_mb" | "max_non_split_rounding_mb"
                if settings.expandable_segments && settings.compat == Compat::Default =>
            {
                Some("expandable segments heed it with compat:pytorch only".to_owned())
            }
            "throw_on_cudamalloc_oom" if settings.per_process_memory_fraction < 1.0 => {
                Some("the fraction's limit refuses first".to_owned())
            }
            _ => None,
        },
    }
}
