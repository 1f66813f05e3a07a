//! Entries to settings: each key's meaning and range.
//!
//! Source: PyTorch's `PYTORCH_CUDA_ALLOC_CONF`; reset-or-stick rules are in [`reset`].

use std::time::Duration;

use hashbrown::HashSet;

use super::bytes::{Size, whole};
use super::error::{ConfigError, Span};
use super::keys::Known;
use super::layers::layers;
use super::parse::{Entry, Value, pairs, word};
use super::settings::{CpuSettings, HandleType, PeersSetting, Reserve, Settings};
use super::token::Token;
use super::versions::Compat;
use crate::size::{EIB, MIB, RoundupDivisions};

/// Paths and names are shorter than this.
const NAME_MAX_BYTES: usize = 4096;

/// What a new text resets although it does not mention it; everything else sticks.
pub(super) fn reset(settings: &mut Settings) {
    settings.max_split_bytes = None;
    settings.max_non_split_rounding_bytes = None;
    settings.garbage_collection_threshold = None;
    settings.roundup = RoundupDivisions::OFF;
}

/// Applies all entries. The large segment's size comes first, wherever it stands: other keys'
/// ranges depend on it.
pub(super) fn apply(settings: &mut Settings, entries: &[Entry<'_, '_>]) -> Result<(), ConfigError> {
    let (first, rest): (Vec<_>, Vec<_>) =
        entries.iter().partition(|entry| entry.key.name() == "large_segment_size_mb");
    first.into_iter().chain(rest).try_for_each(|entry| apply_one(settings, entry))?;
    check_fills(settings, entries)
}

/// Blocks of `backend:cpu` cannot start as zeros and as junk.
fn check_fills(settings: &Settings, entries: &[Entry<'_, '_>]) -> Result<(), ConfigError> {
    if !(settings.cpu.zero_fill && settings.cpu.junk_fill) {
        return Ok(());
    }
    let fill =
        |entry: &&Entry<'_, '_>| matches!(entry.key.name(), "cpu_zero_fill" | "cpu_junk_fill");
    let last = entries.iter().rev().find(fill);
    let (name, span) = last
        .map_or(("cpu_junk_fill", Span::default()), |entry| (entry.key.name(), entry.value.span));
    Err(ConfigError::new(name, span, "False, because the other fill is True"))
}

fn apply_one(settings: &mut Settings, entry: &Entry<'_, '_>) -> Result<(), ConfigError> {
    let value = &entry.value;
    let key = match &entry.key {
        Known::Extra(key) => {
            if !key.accepts(value.text, value.is_list) {
                return Err(ConfigError::new(key.name(), value.span, key.range()));
            }
            settings.extra.retain(|(known, _)| known != key.name());
            settings.extra.push((key.name().to_owned(), value.text.to_owned()));
            return Ok(());
        }
        Known::BuiltIn(key) => key,
    };
    let read = Reader { key: key.name, range: key.range, value };
    let large_mib = settings.large_segment_bytes / MIB;
    match key.name {
        "backend" => settings.backend = read.backend()?,
        "large_segment_size_mb" => {
            let mib = read.mib(|n| n > 10, read.range)?;
            settings.large_segment_bytes = mib.min(EIB / MIB) * MIB;
        }
        "max_split_size_mb" => settings.max_split_bytes = read.mib_at_least(large_mib)?,
        "max_non_split_rounding_mb" => {
            settings.max_non_split_rounding_bytes =
                Some(read.mib_at_least(large_mib)?.unwrap_or(u64::MAX / MIB * MIB));
        }
        "garbage_collection_threshold" => {
            settings.garbage_collection_threshold = Some(read.number(|x| x > 0.0 && x < 1.0)?);
        }
        "roundup_power2_divisions" => settings.roundup = read.divisions()?,
        "expandable_segments" => settings.expandable_segments = read.flag()?,
        "expandable_segments_ipc" => settings.expandable_segments_ipc = read.flag()?,
        "expandable_segments_handle_type" => {
            settings.expandable_segments_handle_type = read.one_of(&[
                ("unspecified", HandleType::Unspecified),
                ("posix_fd", HandleType::PosixFd),
                ("fabric", HandleType::Fabric),
            ])?;
        }
        "release_lock_on_cudamalloc" => settings.release_lock_on_device_allocate = read.flag()?,
        "graph_capture_record_stream_reuse" => {
            settings.graph_capture_record_stream_reuse = read.flag()?;
        }
        "per_process_memory_fraction" => {
            settings.per_process_memory_fraction = read.number(|x| (0.0..=1.0).contains(&x))?;
        }
        "throw_on_cudamalloc_oom" => settings.throw_on_device_oom = read.flag()?,
        "expandable_segments_reserve" => {
            settings.expandable_reserve = Some(reserve(&read, read.word()?)?);
        }
        "expandable_segments_reserve_by_class" => {
            settings.expandable_reserve_by_class = read.reserves()?;
        }
        "malloc_async_own_pool" => settings.malloc_async_own_pool = read.flag()?,
        "layers" => settings.layers = layers(key.name, value)?,
        "record_history" => settings.history.entries_max = Some(read.whole(|n| n > 0)?),
        "snapshot_on_oom" => settings.history.snapshot_on_oom = Some(read.path()?),
        "advise_on_oom" => settings.history.advise_on_oom = read.flag()?,
        "compat" => {
            let values: Vec<_> = Compat::values().collect();
            settings.compat = read.one_of(&values)?.in_this_process();
        }
        "peers" => {
            settings.peers =
                read.one_of(&[("auto", PeersSetting::Auto), ("none", PeersSetting::None)])?;
        }
        _ => match settings.pluggable.place(key.name) {
            Some(place) => *place = Some(read.name_of_code()?),
            None if key.name.starts_with("cpu_") => apply_cpu(&mut settings.cpu, &read)?,
            None => apply_pinned(settings, &read)?,
        },
    }
    Ok(())
}

fn apply_cpu(cpu: &mut CpuSettings, read: &Reader<'_, '_>) -> Result<(), ConfigError> {
    match read.key {
        "cpu_alignment" => {
            let legal = |n: u64| n.is_power_of_two() && CpuSettings::ALIGNMENTS.contains(&n);
            cpu.alignment_bytes = read.whole(legal)?;
        }
        "cpu_cached_max_mb" => {
            cpu.cached_max_bytes = read.mib(|_| true, read.range)?.checked_mul(MIB)
        }
        "cpu_trim_age_s" => {
            let seconds = read.number(|x| (0.0..=1e9).contains(&x))?;
            cpu.trim_age = Some(Duration::from_secs_f64(seconds));
        }
        "cpu_stop_caching_on_oom" => cpu.stop_caching_on_oom = read.flag()?,
        "cpu_huge_pages" => cpu.huge_pages = read.flag()?,
        "cpu_zero_fill" => cpu.zero_fill = read.flag()?,
        "cpu_junk_fill" => cpu.junk_fill = read.flag()?,
        "cpu_numa_node" => cpu.numa_node = read.node()?,
        other => unreachable!("every key of the table is applied: {other}"),
    }
    Ok(())
}

fn apply_pinned(settings: &mut Settings, read: &Reader<'_, '_>) -> Result<(), ConfigError> {
    let pinned = &mut settings.pinned;
    match read.key {
        "pinned_use_background_threads" => pinned.use_background_threads = read.flag()?,
        "pinned_max_round_threshold_mb" => {
            pinned.max_round_threshold_bytes = read.mib(|_| true, read.range)?.checked_mul(MIB);
        }
        "pinned_max_cached_size_mb" => {
            pinned.max_cached_bytes = read.mib(|_| true, read.range)?.checked_mul(MIB);
        }
        "pinned_use_cuda_host_register" => pinned.use_host_register = read.flag()?,
        "pinned_num_register_threads" => {
            pinned.register_threads = read.whole(|n| n.is_power_of_two() && n <= 128)?;
        }
        "pinned_reserve_segment_size_mb" => {
            pinned.reserve_segment_bytes =
                Some(read.mib(|n| n > 0, read.range)?.min(u64::MAX / MIB) * MIB);
        }
        "pinned_free_catch_all" => pinned.free_catch_all = read.flag()?,
        other => unreachable!("every key of the table is applied: {other}"),
    }
    Ok(())
}

/// Reads one key's value.
struct Reader<'v, 't> {
    key: &'static str,
    range: &'static str,
    value: &'v Value<'t>,
}

impl<'v, 't> Reader<'v, 't> {
    fn wrong(&self, span: Span) -> ConfigError {
        ConfigError::new(self.key, span, self.range)
    }

    fn word(&self) -> Result<&'v Token<'t>, ConfigError> {
        word(self.key, self.value, self.range)
    }

    fn whole(&self, legal: impl Fn(u64) -> bool) -> Result<u64, ConfigError> {
        let token = self.word()?;
        let number = whole(token.text).filter(|n| legal(*n));
        number.ok_or_else(|| self.wrong(token.span))
    }

    /// A number of MiB, or a size with its unit that is one.
    fn mib(&self, legal: impl Fn(u64) -> bool, range: &str) -> Result<u64, ConfigError> {
        let token = self.word()?;
        let sized = || {
            let size = Size::parse(token.text).filter(|size| size.has_unit)?;
            size.bytes.is_multiple_of(MIB).then_some(size.bytes / MIB)
        };
        let mib = whole(token.text).or_else(sized).filter(|n| legal(*n));
        mib.ok_or_else(|| {
            const UNITS: [&str; 9] = ["kib", "mib", "gib", "kb", "mb", "gb", "k", "m", "g"];
            let unit = token.text.trim_start_matches(|c: char| c.is_ascii_digit());
            let has_unit =
                unit.len() < token.text.len() && UNITS.iter().any(|u| unit.eq_ignore_ascii_case(u));
            let hint = if has_unit { ", or whole MiB with their unit as 64MiB" } else { "" };
            ConfigError::new(self.key, token.span, format!("{range}{hint}"))
        })
    }

    /// Mebibytes as bytes; `None` when there are more than 64 bits can count: unlimited.
    fn mib_at_least(&self, least: u64) -> Result<Option<u64>, ConfigError> {
        let mib = self.mib(|n| n >= least, &format!("a whole number >= {least}"))?;
        Ok(mib.checked_mul(MIB))
    }

    fn number(&self, legal: impl Fn(f64) -> bool) -> Result<f64, ConfigError> {
        let token = self.word()?;
        let number = token.text.parse().ok().filter(|x| legal(*x));
        number.ok_or_else(|| self.wrong(token.span))
    }

    fn flag(&self) -> Result<bool, ConfigError> {
        let token = self.word()?;
        match token.text {
            text if text.eq_ignore_ascii_case("true") => Ok(true),
            text if text.eq_ignore_ascii_case("false") => Ok(false),
            other => Err(self.wrong(token.span).or_nearest(other, &["True", "False"])),
        }
    }

    fn backend(&self) -> Result<String, ConfigError> {
        let token = self.word()?;
        let text = token.text;
        let legal = text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        if !legal {
            return Err(self.wrong(token.span));
        }
        Ok(if text == "hipMallocAsync" { "cudaMallocAsync" } else { text }.to_owned())
    }

    /// A node's number; `None` for any.
    fn node(&self) -> Result<Option<u32>, ConfigError> {
        let token = self.word()?;
        if token.text == "any" {
            return Ok(None);
        }
        let node = whole(token.text).and_then(|node| u32::try_from(node).ok());
        node.map(Some).ok_or_else(|| self.wrong(token.span))
    }

    /// A path that the system takes.
    fn path(&self) -> Result<String, ConfigError> {
        let token = self.word()?;
        let legal = (1..NAME_MAX_BYTES).contains(&token.text.len()) && !token.text.contains('\0');
        if legal { Ok(token.text.to_owned()) } else { Err(self.wrong(token.span)) }
    }

    /// The path of a library, or the name of a function in one.
    fn name_of_code(&self) -> Result<String, ConfigError> {
        if self.key == "library" {
            return self.path();
        }
        let token = self.word()?;
        let text = token.text;
        let symbol = |text: &str| {
            let part = |c: char| c.is_ascii_alphanumeric() || "_$.".contains(c);
            text.chars().all(part) && !text.starts_with(|c: char| c.is_ascii_digit())
        };
        let legal = (1..NAME_MAX_BYTES).contains(&text.len()) && symbol(text);
        if legal { Ok(text.to_owned()) } else { Err(self.wrong(token.span)) }
    }

    /// What stands for one of these names.
    fn one_of<T: Copy>(&self, named: &[(&str, T)]) -> Result<T, ConfigError> {
        let token = self.word()?;
        match named.iter().find(|(name, _)| *name == token.text) {
            Some((_, value)) => Ok(*value),
            None => {
                let names: Vec<_> = named.iter().map(|(name, _)| *name).collect();
                Err(self.wrong(token.span).or_nearest(token.text, &names))
            }
        }
    }

    /// A single number fills all intervals. In a list the first number also fills the intervals
    /// below it, gaps stay 0, and `>` fills everything above the last number so far.
    fn divisions(&self) -> Result<RoundupDivisions, ConfigError> {
        const LAST: usize = RoundupDivisions::INTERVALS - 1;
        if !self.value.is_list {
            let all = self.whole(u64::is_power_of_two)?;
            return self.checked([all; RoundupDivisions::INTERVALS]);
        }
        let mut divisions = [0; RoundupDivisions::INTERVALS];
        let mut last = 0;
        let mut first = true;
        for (boundary, count) in pairs(self.key, self.value, self.range)? {
            let count =
                whole(count.text).filter(|n| *n == 0 || n.is_power_of_two()).ok_or_else(|| {
                    ConfigError::new(self.key, count.span, "0 or a power of two as divisions")
                })?;
            if boundary.text == ">" {
                divisions[(last + 1).min(LAST + 1)..].fill(count);
                continue;
            }
            let mib = whole(boundary.text).filter(|n| n.is_power_of_two()).ok_or_else(|| {
                ConfigError::new(self.key, boundary.span, "a power of two of MiB, or >")
            })?;
            let interval = (mib.ilog2() as usize).min(LAST);
            if first {
                divisions[..interval].fill(count);
                first = false;
            }
            divisions[interval] = count;
            last = interval;
        }
        self.checked(divisions)
    }

    fn checked(
        &self,
        divisions: [u64; RoundupDivisions::INTERVALS],
    ) -> Result<RoundupDivisions, ConfigError> {
        RoundupDivisions::new(divisions).ok_or_else(|| self.wrong(self.value.span))
    }

    fn reserves(&self) -> Result<Vec<(String, Reserve)>, ConfigError> {
        if !self.value.is_list {
            return Err(self.wrong(self.value.span));
        }
        let mut said = Vec::new();
        for (class, size) in pairs(self.key, self.value, self.range)? {
            said.push((class.text, reserve(self, size)?));
        }
        // The last of equal names counts, where it stands.
        let mut seen = HashSet::new();
        let last = said.into_iter().rev().filter(|(class, _)| seen.insert(*class));
        let mut found: Vec<_> = last.map(|(class, size)| (class.to_owned(), size)).collect();
        found.reverse();
        Ok(found)
    }
}

/// A fraction, or a size with its unit.
fn reserve(read: &Reader<'_, '_>, token: &Token<'_>) -> Result<Reserve, ConfigError> {
    let sized = Size::parse(token.text).filter(|size| size.has_unit && size.bytes > 0);
    let positive = |x: &f64| x.is_finite() && *x > 0.0;
    let fraction = || token.text.parse().ok().filter(positive).map(Reserve::Fraction);
    let found = sized.map(|size| Reserve::Bytes(size.bytes)).or_else(fraction);
    found.ok_or_else(|| {
        let range = "a positive fraction, or a size as 40G";
        ConfigError::new(read.key, token.span, range)
    })
}
