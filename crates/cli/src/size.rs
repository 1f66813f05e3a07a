//! The sizes of options, such as `24GiB`.
//!
//! All units are binary, because PyTorch and nvidia-smi print GiB and MiB, and a card "of 24 GB" has 24 GiB.
//! The sizes in configuration strings have a syntax of their own: see `stratalloc::config::Size`.

use stratalloc::size::{EIB, GIB, KIB, MIB, TIB};

use super::outcome::Result;

/// The units and their bytes. Upper and lower case are the same.
const UNITS: [(&[&str], u64); 5] = [
    (&["b"], 1),
    (&["k", "kb", "kib"], KIB),
    (&["m", "mb", "mib"], MIB),
    (&["g", "gb", "gib"], GIB),
    (&["t", "tb", "tib"], TIB),
];

/// The most digits behind the point of a size.
const DECIMALS_MAX: usize = 9;

/// A size, or a share of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Amount {
    /// In bytes.
    Bytes(u64),
    /// A percentage of the memory of the device.
    Percent(f64),
}

impl Amount {
    /// Parses a size as [`size`] does, or a percentage such as `80%`.
    ///
    /// # Errors
    ///
    /// A description of the expected text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some(number) = text.trim().strip_suffix('%') else {
            return size(text).map(Self::Bytes);
        };
        let percent = percent(number.trim_end()).filter(|percent| *percent > 0.0);
        let percent = percent.ok_or_else(|| {
            format!("expected a size, as 24GiB, or a share, as 80%, not {text:?}")
        })?;
        Ok(Self::Percent(percent))
    }

    /// Returns the size in bytes. `total_bytes` is the memory of the device, if it is known.
    ///
    /// # Errors
    ///
    /// A reason, if the amount is a share and the memory of the device is not known.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "devices are far smaller than 2^52 bytes, and percentages are positive"
    )]
    pub(crate) fn bytes(self, total_bytes: Option<u64>) -> Result<u64, String> {
        match (self, total_bytes) {
            (Self::Bytes(bytes), _) => Ok(bytes),
            (Self::Percent(percent), Some(total)) => Ok((total as f64 * percent / 100.0) as u64),
            (Self::Percent(percent), None) => Err(format!(
                "{percent}% is a share of a device whose memory is not known: --total-memory sets it, or a size \
                 such as 24GiB replaces the share"
            )),
        }
    }
}

/// Parses a size in bytes: a number and a unit, such as `24GiB`, `24 gb`, `1.5G`, `512m` or `100B`.
///
/// # Errors
///
/// A description of the expected text. A number without a unit is an error.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    if unit == "%" {
        return Err(format!(
            "{text} is a share of what is not known here: expected a size, as 24GiB"
        ));
    }
    if number.is_empty() {
        return Err(format!("expected a size with its unit, as 24GiB or 512MiB, not {text:?}"));
    }
    if unit.is_empty() {
        let is_zero = number.bytes().all(|byte| byte == b'0' || byte == b'.');
        return Err(match (is_zero, number.contains('.')) {
            (true, _) => "expected a size above 0 with its unit, as 24GiB or 24B".to_owned(),
            (_, true) => format!("{number} has no unit: write {number}GiB or {number}MiB"),
            (_, false) => format!("{number} has no unit: write {number}GiB or {number}B"),
        });
    }
    let known =
        UNITS.iter().find(|(names, _)| names.iter().any(|name| unit.eq_ignore_ascii_case(name)));
    let Some((_, unit_bytes)) = known else {
        return Err(format!(
            "{unit:?} is no unit of a size: write {number}GiB, {number}MiB or {number}KiB"
        ));
    };
    let bytes = scaled(number, *unit_bytes).ok_or_else(|| {
        format!("{number:?} is no number: expected digits and at most {DECIMALS_MAX} decimals, as 1.5GiB")
    })?;
    match u64::try_from(bytes) {
        Ok(bytes) if (1..=EIB).contains(&bytes) => Ok(bytes),
        _ => Err(format!("{text} is out of range: expected a size from 1B to 1048576TiB")),
    }
}

/// Returns a number of units in bytes, rounded up. `None` if it is no number, or if bytes have decimals.
fn scaled(number: &str, unit_bytes: u64) -> Option<u128> {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let has_point = whole.len() < number.len();
    if has_point && (decimals.is_empty() || decimals.len() > DECIMALS_MAX || unit_bytes == 1) {
        return None;
    }
    let scale = 10_u128.pow(u32::try_from(decimals.len()).ok()?);
    let digits: u128 = format!("{whole}{decimals}").parse().ok()?;
    (!whole.is_empty()).then_some(())?;
    Some(digits.checked_mul(unit_bytes.into())?.div_ceil(scale))
}

/// Parses a percentage without its sign: digits, with or without decimals.
pub(crate) fn percent(number: &str) -> Option<f64> {
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    number.parse().ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc_recording::Limits;

    #[test]
    fn every_common_form_of_a_size_is_accepted_with_binary_units() {
        for text in ["24GiB", "24GB", "24gb", "24G", "24g", "24 GiB", " 24gib ", "24.0GB", "024G"] {
            assert_eq!(size(text), Ok(24 * GIB), "{text}");
        }
        for (text, bytes) in [
            ("512MiB", 512 * MIB),
            ("512M", 512 * MIB),
            ("24B", 24),
            ("24 b", 24),
            ("1.5GiB", 3 * GIB / 2),
            ("0.1K", 103),
            ("1.000000001G", GIB + 2),
            ("2tb", 2 * TIB),
            ("1048576TiB", EIB),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size("4GiB"), Ok(Limits::default().decoded_bytes));
    }

    #[test]
    fn an_error_shows_the_form_to_write() {
        for (text, part) in [
            ("24", "24 has no unit: write 24GiB or 24B"),
            ("6.3", "6.3 has no unit: write 6.3GiB or 6.3MiB"),
            ("0", "24GiB or 24B"),
            ("0GiB", "out of range"),
            ("24Gi", "\"Gi\" is no unit of a size: write 24GiB"),
            ("24Gbit", "write 24GiB"),
            ("1.5B", "\"1.5\" is no number"),
            ("1.G", "is no number"),
            (".5G", "is no number"),
            ("1.2.3G", "is no number"),
            ("1.0000000001G", "is no number"),
            ("-1G", "expected a size with its unit"),
            ("", "expected a size with its unit"),
            ("much", "expected a size with its unit"),
            ("80%", "80% is a share"),
            ("1048577TiB", "out of range"),
            ("999999999999999999999999999999999999999999G", "is no number"),
        ] {
            let error = size(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_share_needs_the_memory_of_the_device() {
        let share = Amount::parse("80%").unwrap();
        assert_eq!(share.bytes(Some(10 * GIB)), Ok(8 * GIB));
        assert!(share.bytes(None).unwrap_err().contains("--total-memory sets it"));
        assert_eq!(Amount::parse("24gb").unwrap().bytes(None), Ok(24 * GIB));
        for wrong in ["0%", "%", "-5%", "inf%", "1e3%"] {
            assert!(Amount::parse(wrong).is_err(), "{wrong}");
        }
    }
}
