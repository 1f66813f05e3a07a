//! The syntax of sizes in configuration strings.

use super::error::{ConfigError, Span};
use crate::size::{EIB, GIB, KIB, MIB, TIB};

/// A size that was parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// The size in bytes, rounded up.
    pub bytes: u64,
    /// Whether the text had a unit. The caller decides what a number without a unit means.
    pub has_unit: bool,
}

/// The units, largest first. Each is 1,024 times the next one, as in PyTorch's `40G`.
const UNITS: [(&str, &str, u64); 5] =
    [("TiB", "T", TIB), ("GiB", "G", GIB), ("MiB", "M", MIB), ("KiB", "K", KIB), ("B", "B", 1)];

impl Size {
    /// Parses `32GiB`, `40G`, `1.5GiB`, `512MiB`, `64K`, `100B` or `100`, in upper or lower case; at most
    /// 1 EiB. Returns `None` for `GB` and similar units, which are ambiguous.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let cut = |unit: &str| {
            let (number, end) = text.split_at_checked(text.len().checked_sub(unit.len())?)?;
            end.eq_ignore_ascii_case(unit).then_some(number)
        };
        let unit = UNITS
            .iter()
            .find_map(|(long, short, bytes)| Some((cut(long).or_else(|| cut(short))?, *bytes)));
        let (number, unit_bytes) = unit.unwrap_or((text, 1));
        let bytes = match number.split_once('.') {
            None => whole(number)?.checked_mul(unit_bytes)?,
            Some(_) if unit_bytes == 1 => return None,
            Some((before, behind)) => {
                whole(before)?;
                whole(behind)?;
                scaled(number.parse().ok()?, unit_bytes)
            }
        };
        (bytes <= EIB).then_some(Self { bytes, has_unit: unit.is_some() })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a positive number; the cast saturates"
)]
fn scaled(number: f64, unit_bytes: u64) -> u64 {
    (number * unit_bytes as f64).ceil() as u64
}

/// Parses a 64-bit number that consists of digits only.
pub(super) fn whole(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

const RANGE: &str = "a size with its unit, as 8GiB, 40G or 512B: from 1B to 1073741824GiB";

/// Parses a size in a configuration string. It must have a unit. (Keys that count MiB need none and use
/// another function.)
pub(super) fn size(key: &str, text: &str, span: Span) -> Result<u64, ConfigError> {
    match Size::parse(text) {
        Some(Size { bytes, has_unit: true }) if bytes > 0 => Ok(bytes),
        Some(Size { has_unit: false, .. }) => {
            let what = format!("{RANGE}; a number needs a unit");
            Err(ConfigError::new(key, span, what))
        }
        _ => Err(ConfigError::new(key, span, RANGE)),
    }
}

/// Formats bytes so that [`size`] can parse them.
pub(crate) fn to_text(bytes: u64) -> String {
    let fits = |unit: u64| bytes > 0 && bytes.is_multiple_of(unit);
    // TiB is skipped, so that the text of existing configurations, which have GiB, does not change.
    let unit = UNITS[1..].iter().find(|(_, _, unit)| fits(*unit));
    unit.map_or_else(|| format!("{bytes}B"), |(name, _, unit)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, KeyTable};

    #[test]
    fn every_form_of_a_size_is_parsed() {
        for (text, bytes) in [
            ("32GiB", 32 * GIB),
            ("40G", 40 * GIB),
            ("8g", 8 * GIB),
            ("512mib", 512 * MIB),
            ("1.5GiB", 3 * GIB / 2),
            ("0.1K", 103),
            ("2T", 2 * TIB),
            ("100B", 100),
            ("1073741824GiB", EIB),
        ] {
            assert_eq!(Size::parse(text), Some(Size { bytes, has_unit: true }), "{text}");
        }
        assert_eq!(Size::parse("100"), Some(Size { bytes: 100, has_unit: false }));
        for text in ["", "G", "8GB", "-1G", "1e3G", "infG", "1.G", ".5G", "1.5", "2 GiB", "8é"] {
            assert_eq!(Size::parse(text), None, "{text}");
        }
        assert_eq!(Size::parse("1073741825GiB"), None);
        assert_eq!(Size::parse("99999999999999999999"), None);
    }

    #[test]
    fn keys_in_mib_accept_units_and_layers_require_one() {
        let parse = |text: &str| Config::parse(text, &KeyTable::default());
        let split = |text: &str| parse(text).unwrap().settings().max_split_bytes;
        assert_eq!(split("max_split_size_mb:1GiB"), Some(GIB));
        assert_eq!(split("max_split_size_mb:32m"), Some(32 * MIB));
        assert_eq!(split("max_split_size_mb:32"), Some(32 * MIB));
        let error = parse("layers:[limit:8]").unwrap_err();
        assert_eq!(error.span.at, 14);
        assert!(error.expected.ends_with("a number needs a unit"), "{error}");
    }

    #[test]
    fn written_sizes_can_be_parsed() {
        for bytes in [1, 1000, 4096, 3 * MIB, 8 * GIB, 2 * TIB, EIB] {
            let at = Span { at: 0, len: 0 };
            assert_eq!(size("layers", &to_text(bytes), at).unwrap(), bytes);
        }
    }
}
