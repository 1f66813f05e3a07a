//! Codecs: functions that parse a value of one kind from a configuration string, and format it for one.

use std::time::Duration;

use hashbrown::HashSet;

use super::LayerSetting;
use super::bytes::{Size, whole};
use super::error::{ConfigError, Span};
use super::layers::layers;
use super::parse::{Value, pairs, word};
use super::settings::{CpuSettings, HandleType, PeersSetting, PinnedNuma, PinnedRounding, Reserve};
use super::token::Token;
use super::versions::{COMPAT_VALUES, Compat};
use crate::size::{EIB, GIB, MIB, RoundupDivisions};

/// The most bytes of a path or name.
const NAME_MAX_BYTES: usize = 4096;
const WHOLE_MIB: &str = "a whole number of MiB";
const FROM_SEGMENT_RANGE: &str = "a whole number >= large_segment_size_mb";
const HANDLE_TYPES: [(&str, HandleType); 3] = [
    ("unspecified", HandleType::Unspecified),
    ("posix_fd", HandleType::PosixFd),
    ("fabric", HandleType::Fabric),
];
const PEERS_VALUES: [(&str, PeersSetting); 2] =
    [("auto", PeersSetting::Auto), ("none", PeersSetting::None)];
const ROUNDINGS: [(&str, PinnedRounding); 2] =
    [("exact", PinnedRounding::Exact), ("power_of_two", PinnedRounding::PowerOfTwo)];

/// Parses and formats values of one kind.
pub(super) struct Codec<T> {
    pub(super) range: &'static str,
    pub(super) read: fn(&Reader<'_, '_>) -> Result<T, ConfigError>,
    pub(super) show: fn(&T) -> String,
}

pub(super) const BACKEND: Codec<String> =
    Codec { range: "a strategy's name", read: |value| value.backend(), show: String::clone };
pub(super) const FLAG: Codec<bool> = Codec {
    range: "True or False",
    read: |value| value.flag(),
    show: |on| if *on { "True" } else { "False" }.to_owned(),
};
pub(super) const SEGMENT: Codec<u64> = Codec {
    range: "a whole number > 10",
    read: |value| Ok(value.mib(|n| n > 10, value.range)?.min(EIB / MIB) * MIB),
    show: |bytes| mib(*bytes),
};
pub(super) const FROM_SEGMENT: Codec<Option<u64>> = Codec {
    range: FROM_SEGMENT_RANGE,
    read: |value| value.mib_from_segment(),
    show: |bytes| or(bytes.map(mib), "unlimited"),
};
pub(super) const ROUNDING: Codec<Option<u64>> = Codec {
    range: FROM_SEGMENT_RANGE,
    read: |value| Ok(Some(value.mib_from_segment()?.unwrap_or(u64::MAX / MIB * MIB))),
    show: FROM_SEGMENT.show,
};
pub(super) const MIB_AT_MOST: Codec<Option<u64>> = Codec {
    range: WHOLE_MIB,
    read: |value| Ok(value.mib(|_| true, value.range)?.checked_mul(MIB)),
    show: FROM_SEGMENT.show,
};
pub(super) const ARENA: Codec<Option<u64>> = Codec {
    range: "a whole number of MiB > 0",
    read: |value| Ok(Some(value.mib(|n| n > 0, value.range)?.min(u64::MAX / MIB) * MIB)),
    show: |bytes| or(bytes.map(mib), "off"),
};
pub(super) const THREADS: Codec<u64> = Codec {
    range: "a power of two from 1 to 128",
    read: |value| value.whole(|n| n.is_power_of_two() && n <= 128),
    show: u64::to_string,
};
pub(super) const ALIGNMENT: Codec<u64> = Codec {
    range: "a power of two of bytes from 16 to 2097152",
    read: |value| value.whole(|n| n.is_power_of_two() && CpuSettings::ALIGNMENTS.contains(&n)),
    show: u64::to_string,
};
pub(super) const ENTRIES: Codec<Option<u64>> = Codec {
    range: "a whole number of entries > 0",
    read: |value| value.whole(|n| n > 0).map(Some),
    show: |entries| or(entries.map(|n| n.to_string()), "off"),
};
pub(super) const NODE: Codec<Option<u32>> = Codec {
    range: "a node's number, or any",
    read: |value| value.node(),
    show: |node| or(node.map(|n| n.to_string()), "any"),
};
pub(super) const PINNED_ROUNDING: Codec<PinnedRounding> = Codec {
    range: "exact or power_of_two",
    read: |value| value.one_of(&ROUNDINGS),
    show: |rounding| name_of(&ROUNDINGS, *rounding),
};
pub(super) const PINNED_NUMA: Codec<PinnedNuma> = Codec {
    range: "a node's number, auto or any",
    read: |value| match value.word()?.text {
        "auto" => Ok(PinnedNuma::Auto),
        _ => Ok(value.node()?.map_or(PinnedNuma::Any, PinnedNuma::Node)),
    },
    show: |numa| match numa {
        PinnedNuma::Any => "any".to_owned(),
        PinnedNuma::Auto => "auto".to_owned(),
        PinnedNuma::Node(node) => node.to_string(),
    },
};
pub(super) const THRESHOLD: Codec<Option<f64>> = Codec {
    range: "a number between 0 and 1",
    read: |value| value.number(|x| x > 0.0 && x < 1.0).map(Some),
    show: |threshold| or(threshold.map(|x| x.to_string()), "off"),
};
pub(super) const FRACTION: Codec<f64> = Codec {
    range: "a number from 0 to 1",
    read: |value| value.number(|x| (0.0..=1.0).contains(&x)),
    show: f64::to_string,
};
pub(super) const AGE: Codec<Option<Duration>> = Codec {
    range: "a number of seconds from 0 to 1000000000",
    read: |value| {
        value.number(|x| (0.0..=1e9).contains(&x)).map(|age| Some(Duration::from_secs_f64(age)))
    },
    show: |age| or(age.map(|age| age.as_secs_f64().to_string()), "off"),
};
pub(super) const DIVISIONS: Codec<RoundupDivisions> = Codec {
    range: "a power of two, or [MiB:divisions,...,>:divisions]",
    read: |value| value.divisions(),
    show: divisions,
};
pub(super) const RESERVE: Codec<Option<Reserve>> = Codec {
    range: "a positive fraction, or a size as 40G",
    read: |value| reserve(value, value.word()?).map(Some),
    show: |size| or(size.as_ref().map(reserve_text), "unset"),
};
pub(super) const RESERVES: Codec<Vec<(String, Reserve)>> = Codec {
    range: "[class:reserve,...]",
    read: |value| value.reserves(),
    show: |classes| {
        let parts = classes.iter().map(|(name, size)| format!("\"{name}\":{}", reserve_text(size)));
        format!("[{}]", parts.collect::<Vec<_>>().join(","))
    },
};
pub(super) const LAYERS: Codec<Vec<LayerSetting>> = Codec {
    range: "[limit:8GiB,track,log:\"PATH\",...]",
    read: |value| layers(value.key, value.value),
    show: |layers| {
        let parts: Vec<_> = layers.iter().map(LayerSetting::text).collect();
        format!("[{}]", parts.join(","))
    },
};
pub(super) const HANDLE_TYPE: Codec<HandleType> = Codec {
    range: "unspecified, posix_fd or fabric",
    read: |value| value.one_of(&HANDLE_TYPES),
    show: |kind| name_of(&HANDLE_TYPES, *kind),
};
pub(super) const PEERS: Codec<PeersSetting> = Codec {
    range: "auto or none",
    read: |value| value.one_of(&PEERS_VALUES),
    show: |peers| name_of(&PEERS_VALUES, *peers),
};
pub(super) const COMPAT: Codec<Compat> = Codec {
    range: COMPAT_VALUES,
    read: |value| Ok(value.one_of(&Compat::values().collect::<Vec<_>>())?.in_this_process()),
    show: |compat| compat.name().to_owned(),
};
pub(super) const LIBRARY: Codec<Option<String>> =
    Codec { range: "a file's path", read: |value| value.path().map(Some), show: word_text };
pub(super) const SNAPSHOT: Codec<Option<String>> = Codec {
    range: "a file's path, with %h for the host, %p the process, %d the device",
    ..LIBRARY
};
pub(super) const SYMBOL: Codec<Option<String>> =
    Codec { range: "a function's name", read: |value| value.symbol().map(Some), show: word_text };

/// The value of one key, with methods that parse it.
pub(super) struct Reader<'v, 't> {
    pub(super) key: &'static str,
    pub(super) range: &'static str,
    pub(super) value: &'v Value<'t>,
    /// `large_segment_size_mb`, which is the minimum of some other keys.
    pub(super) segment_mib: u64,
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

    /// Parses a whole number of MiB. With a unit, the size must be a multiple of 1 MiB.
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

    /// Parses a number of MiB, at least the size of a large segment, and returns it in bytes. Returns
    /// `None` (unlimited) if the number of bytes does not fit in 64 bits.
    fn mib_from_segment(&self) -> Result<Option<u64>, ConfigError> {
        let least = self.segment_mib;
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

    /// Parses the number of a NUMA node. Returns `None` for `any`.
    fn node(&self) -> Result<Option<u32>, ConfigError> {
        let token = self.word()?;
        if token.text == "any" {
            return Ok(None);
        }
        let node = whole(token.text).and_then(|node| u32::try_from(node).ok());
        node.map(Some).ok_or_else(|| self.wrong(token.span))
    }

    /// Parses a path.
    fn path(&self) -> Result<String, ConfigError> {
        let token = self.word()?;
        let legal = (1..NAME_MAX_BYTES).contains(&token.text.len()) && !token.text.contains('\0');
        if legal { Ok(token.text.to_owned()) } else { Err(self.wrong(token.span)) }
    }

    /// Parses the name of a function in a shared library.
    fn symbol(&self) -> Result<String, ConfigError> {
        let token = self.word()?;
        let text = token.text;
        let part = |c: char| c.is_ascii_alphanumeric() || "_$.".contains(c);
        let legal = (1..NAME_MAX_BYTES).contains(&text.len())
            && text.chars().all(part)
            && !text.starts_with(|c: char| c.is_ascii_digit());
        if legal { Ok(text.to_owned()) } else { Err(self.wrong(token.span)) }
    }

    /// Returns the value in `named` whose name the text is.
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

    /// Parses `roundup_power2_divisions`. A single number applies to all intervals. In a list, the
    /// first number also applies to all smaller intervals. An interval between two listed ones gets 0.
    /// `>` applies to all intervals above the last one listed so far.
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
        let mut entries = Vec::new();
        for (class, size) in pairs(self.key, self.value, self.range)? {
            entries.push((class.text, reserve(self, size)?));
        }
        // If a name occurs several times, the last occurrence is kept.
        let mut seen = HashSet::new();
        let last = entries.into_iter().rev().filter(|(class, _)| seen.insert(*class));
        let mut found: Vec<_> = last.map(|(class, size)| (class.to_owned(), size)).collect();
        found.reverse();
        Ok(found)
    }
}

/// Parses a fraction of the device's memory, or a size with a unit.
fn reserve(read: &Reader<'_, '_>, token: &Token<'_>) -> Result<Reserve, ConfigError> {
    let sized = Size::parse(token.text).filter(|size| size.has_unit && size.bytes > 0);
    let positive = |x: &f64| x.is_finite() && *x > 0.0;
    let fraction = || token.text.parse().ok().filter(positive).map(Reserve::Fraction);
    let found = sized.map(|size| Reserve::Bytes(size.bytes)).or_else(fraction);
    found.ok_or_else(|| ConfigError::new(read.key, token.span, RESERVE.range))
}

fn or(value: Option<String>, none: &str) -> String {
    value.unwrap_or_else(|| none.to_owned())
}

pub(super) fn mib(bytes: u64) -> String {
    (bytes / MIB).to_string()
}

fn name_of<T: PartialEq>(named: &[(&str, T)], value: T) -> String {
    let found = named.iter().find(|(_, named)| *named == value);
    found.map_or("", |(name, _)| name).to_owned()
}

/// Formats a word. Quotes it if it could be mistaken for syntax or for a missing value.
fn word_text(text: &Option<String>) -> String {
    let Some(text) = text else { return "unset".to_owned() };
    let plain = !text.contains(|c: char| ",:[]\"".contains(c) || c.is_whitespace());
    if plain && text != "unset" { text.clone() } else { format!("\"{text}\"") }
}

fn reserve_text(reserve: &Reserve) -> String {
    match reserve {
        Reserve::Fraction(fraction) => fraction.to_string(),
        #[expect(clippy::cast_precision_loss, reason = "shown to people")]
        Reserve::Bytes(bytes) => format!("{}G", *bytes as f64 / GIB as f64),
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
