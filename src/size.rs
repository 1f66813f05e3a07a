//! Sizes in bytes, and the rounding rules that determine the size of a block or a segment.
//!
//! Pure arithmetic: no state, no driver, no parsing of configuration. The rules are those of PyTorch's
//! caching allocator, so that the same requests yield the same sizes. Read next: `heap`, which splits
//! blocks by these rules.

/// 1,024 bytes.
pub const KIB: u64 = 1 << 10;
/// 1,024 KiB.
pub const MIB: u64 = 1 << 20;
/// 1,024 MiB.
pub const GIB: u64 = 1 << 30;
/// 1,024 GiB.
pub const TIB: u64 = 1 << 40;
/// 1,024 PiB: the largest request that is accepted.
pub const EIB: u64 = 1 << 60;

/// The size of every block is a multiple of this, and at least this.
pub const MIN_BLOCK_BYTES: u64 = 512;
/// The largest rounded request that the small pool serves.
pub(crate) const SMALL_REQUEST_MAX_BYTES: u64 = MIB;
/// The size of a segment of the small pool.
pub const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// The default size of a segment that several large requests share.
pub(crate) const LARGE_SEGMENT_DEFAULT_BYTES: u64 = 20 * MIB;
/// A request of this rounded size or more gets a segment of its own.
pub(crate) const OWN_SEGMENT_MIN_BYTES: u64 = 10 * MIB;
/// The size of a segment for one request is a multiple of this.
pub(crate) const OWN_SEGMENT_ROUND_BYTES: u64 = 2 * MIB;
/// In fixed segments of the large pool, the rest of a block is split off only if it is larger than
/// this.
#[doc(hidden)]
pub const LARGE_REST_MIN_BYTES: u64 = MIB;
/// The largest request, in bytes. Larger requests fail before they reach a pool.
pub const REQUEST_MAX_BYTES: u64 = EIB;

const _: () = assert!(SMALL_SEGMENT_BYTES.is_multiple_of(MIN_BLOCK_BYTES));
const _: () = assert!(SMALL_REQUEST_MAX_BYTES <= SMALL_SEGMENT_BYTES);
const _: () = assert!(OWN_SEGMENT_MIN_BYTES.is_multiple_of(OWN_SEGMENT_ROUND_BYTES));

/// The two kinds of pool. Requests up to 1 MiB and larger ones never share a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolKind {
    /// Rounded requests up to 1 MiB.
    Small,
    /// Larger rounded requests.
    Large,
}

impl PoolKind {
    /// Both kinds, in the order in which free memory is released: large first.
    pub(crate) const RELEASE_ORDER: [Self; 2] = [Self::Large, Self::Small];

    /// Returns the pool that serves a request of `rounded_bytes`.
    #[inline]
    #[must_use]
    pub const fn of(rounded_bytes: u64) -> Self {
        if rounded_bytes <= SMALL_REQUEST_MAX_BYTES { Self::Small } else { Self::Large }
    }

    /// Returns the pool of a segment of `size_bytes`, for segments whose pool is unknown. Small
    /// segments have one size, so the size determines the pool.
    #[must_use]
    pub const fn of_segment(size_bytes: u64) -> Self {
        if size_bytes <= SMALL_SEGMENT_BYTES { Self::Small } else { Self::Large }
    }

    /// Returns 0 for small and 1 for large, as an index into tables.
    #[inline]
    #[must_use]
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    /// Returns `small` or `large`, as in PyTorch's snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }
}

/// Returns `bytes` rounded up to a multiple of `to`. `to` is not zero.
///
/// Callers pass at most [`REQUEST_MAX_BYTES`] or an address range, so the sum does not overflow.
#[inline]
#[must_use]
#[doc(hidden)]
pub const fn align_up(bytes: u64, to: u64) -> u64 {
    if to.is_power_of_two() { (bytes + (to - 1)) & !(to - 1) } else { bytes.div_ceil(to) * to }
}

/// Returns `bytes` rounded down to a multiple of `to`. `to` is not zero.
#[inline]
#[must_use]
pub(crate) const fn align_down(bytes: u64, to: u64) -> u64 {
    bytes - bytes % to
}

/// How a fraction of a number of bytes becomes a whole number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FractionRounding {
    /// To the nearest byte, so that `n / total` of `total` bytes are `n` bytes.
    Nearest,
    /// Down, as in PyTorch, where `n / total` of `total` bytes may be `n - 1` bytes.
    Truncate,
}

/// Returns `fraction` of `bytes` as a whole number of bytes. `fraction` is not negative.
///
/// Source of the truncation: PyTorch's `set_per_process_memory_fraction`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the very arithmetic of the source, in doubles; the casts saturate"
)]
#[must_use]
pub(crate) fn fraction_of(fraction: f64, bytes: u64, rounding: FractionRounding) -> u64 {
    let product = fraction * bytes as f64;
    match rounding {
        FractionRounding::Nearest => product.round() as u64,
        FractionRounding::Truncate => product as u64,
    }
}

/// Returns the limit for a fraction in [0, 1] of a memory of `total_bytes`. A fraction of 1 means no
/// limit. Every limit that a fraction sets is calculated here.
#[must_use]
#[doc(hidden)]
pub fn limit_of_fraction(
    fraction: f64,
    total_bytes: u64,
    rounding: FractionRounding,
) -> Option<u64> {
    (fraction < 1.0).then(|| fraction_of(fraction, total_bytes, rounding))
}

/// Returns the fraction of a memory of `total_bytes` for which [`limit_of_fraction`] returns this limit,
/// with either rounding. 1 if the limit is not below `total_bytes`.
#[expect(clippy::cast_precision_loss, reason = "devices have far less than 2^50 bytes")]
#[must_use]
#[doc(hidden)]
pub fn fraction_of_limit(limit_bytes: u64, total_bytes: u64) -> f64 {
    if limit_bytes >= total_bytes {
        return 1.0;
    }
    let fraction = limit_bytes as f64 / total_bytes as f64;
    if fraction_of(fraction, total_bytes, FractionRounding::Truncate) == limit_bytes {
        return fraction;
    }
    // The product is slightly too small to be truncated. A quarter of a byte more changes neither result.
    (limit_bytes as f64 + 0.25) / total_bytes as f64
}

/// `roundup_power2_divisions`: the number of equal steps into which each power-of-two interval is
/// divided. Requests are rounded up to a step.
///
/// Entry `i` applies to sizes from 2^(20+i) up to the next power of two. Sizes below 1 MiB use entry 0,
/// and sizes from 32 GiB on use entry 15. The values 0 and 1 mean that requests are not rounded to
/// steps.
///
/// Source: PyTorch, "Optimizing memory usage with `PYTORCH_CUDA_ALLOC_CONF`".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundupDivisions {
    divisions: [u64; Self::INTERVALS],
    any: bool,
}

impl RoundupDivisions {
    /// The number of power-of-two intervals that have a setting.
    pub(crate) const INTERVALS: usize = 16;
    /// Requests are not rounded to steps.
    pub(crate) const OFF: Self = Self { divisions: [0; Self::INTERVALS], any: false };

    /// Returns the setting for these divisions per interval. `None` if one of them is neither 0 nor a
    /// power of two.
    #[must_use]
    pub fn new(divisions: [u64; Self::INTERVALS]) -> Option<Self> {
        let legal = divisions.iter().all(|&d| d == 0 || d.is_power_of_two());
        legal.then(|| Self { divisions, any: divisions.iter().any(|&d| d > 1) })
    }

    /// Returns the number of divisions of each interval, starting at 1 MiB.
    #[must_use]
    pub const fn divisions(&self) -> &[u64; Self::INTERVALS] {
        &self.divisions
    }

    /// Returns the number of divisions for a request of `bytes`, which is not 0.
    #[must_use]
    pub(crate) const fn for_size(&self, bytes: u64) -> u64 {
        let interval = (bytes.ilog2() as usize).saturating_sub(20);
        let last = Self::INTERVALS - 1;
        self.divisions[if interval < last { interval } else { last }]
    }

    /// Returns the block size for a request of `bytes`: rounded up to a step of its interval if
    /// divisions apply, otherwise to a multiple of 512.
    ///
    /// `bytes` is at most [`REQUEST_MAX_BYTES`].
    #[inline]
    #[must_use]
    pub fn round(&self, bytes: u64) -> u64 {
        if !self.any {
            return if bytes < MIN_BLOCK_BYTES {
                MIN_BLOCK_BYTES
            } else {
                align_up(bytes, MIN_BLOCK_BYTES)
            };
        }
        self.round_to_steps(bytes)
    }

    fn round_to_steps(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK_BYTES {
            return MIN_BLOCK_BYTES;
        }
        let divisions = self.for_size(bytes);
        if divisions <= 1 || bytes <= MIN_BLOCK_BYTES.saturating_mul(divisions) {
            return align_up(bytes, MIN_BLOCK_BYTES);
        }
        if bytes.is_power_of_two() {
            return bytes;
        }
        let floor = 1 << bytes.ilog2();
        let step = floor >> divisions.ilog2();
        if step == 0 { floor << 1 } else { align_up(bytes, step) }
    }
}

impl Default for RoundupDivisions {
    fn default() -> Self {
        Self::OFF
    }
}

/// Returns the size of the segment to allocate for a request of `rounded_bytes`.
///
/// A request of 1 to 10 MiB gets a segment that further requests share. A driver call costs far more
/// than the unused bytes, and these can serve the next request.
#[must_use]
pub const fn segment_bytes(rounded_bytes: u64, large_segment_bytes: u64) -> u64 {
    if rounded_bytes <= SMALL_REQUEST_MAX_BYTES {
        SMALL_SEGMENT_BYTES
    } else if rounded_bytes < OWN_SEGMENT_MIN_BYTES {
        large_segment_bytes
    } else {
        align_up(rounded_bytes, OWN_SEGMENT_ROUND_BYTES)
    }
}

/// Formats `bytes` for people, with a binary unit. Whole bytes up to 1 KiB, otherwise two decimals.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
pub fn human_bytes(bytes: u64) -> String {
    match bytes {
        0..=KIB => format!("{bytes} bytes"),
        b if b <= MIB => format!("{:.2} KiB", b as f64 / KIB as f64),
        b if b <= GIB => format!("{:.2} MiB", b as f64 / MIB as f64),
        // As in PyTorch's messages, GiB is the unit up to 1 EiB. PyTorch refuses larger requests.
        b if b < EIB => format!("{:.2} GiB", b as f64 / GIB as f64),
        b => format!("{:.2} EiB", b as f64 / EIB as f64),
    }
}

/// Formats `bytes` like [`human_bytes`], with the number of bytes behind it.
#[must_use]
pub(crate) fn exact_bytes(bytes: u64) -> String {
    match bytes {
        0..=KIB => human_bytes(bytes),
        _ => format!("{} ({bytes} bytes)", human_bytes(bytes)),
    }
}

/// Returns the function that formats sizes in a message which compares `left` with `right`:
/// [`human_bytes`], or [`exact_bytes`] if the rounded texts would show no difference.
#[must_use]
pub(crate) fn bytes_that_compare(left: u64, right: u64) -> fn(u64) -> String {
    if left != right && human_bytes(left) == human_bytes(right) { exact_bytes } else { human_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(d: u64) -> RoundupDivisions {
        RoundupDivisions::new([d; 16]).unwrap()
    }

    #[test]
    fn requests_are_rounded_up_to_512_bytes() {
        let plain = RoundupDivisions::OFF;
        for (bytes, rounded) in [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB)] {
            assert_eq!(plain.round(bytes), rounded);
        }
        assert_eq!(plain.round(REQUEST_MAX_BYTES), REQUEST_MAX_BYTES);
    }

    #[test]
    fn fractions_are_rounded_or_truncated_and_all_is_no_limit() {
        use FractionRounding::{Nearest, Truncate};
        assert_eq!([Nearest, Truncate].map(|rounding| fraction_of(0.1, 999, rounding)), [100, 99]);
        for rounding in [Nearest, Truncate] {
            assert_eq!(fraction_of(2.0, u64::MAX, rounding), u64::MAX);
            assert_eq!(limit_of_fraction(0.0, GIB, rounding), Some(0));
            assert_eq!(limit_of_fraction(0.5, GIB, rounding), Some(GIB / 2));
            assert_eq!(limit_of_fraction(1.0, GIB, rounding), None);
        }
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "the usual way to calculate a fraction")]
    fn bytes_divided_by_the_total_are_a_limit_of_these_bytes() {
        let totals = [GIB, 16_945_512_448, 150_109_880_320, 540_000_000_123, 1 << 45];
        let limits = || (0..2000u64).map(|i| i * 2 * MIB).chain((1..2000).map(|i| i * 7_654_321));
        let mut truncated = 0;
        for total_bytes in totals {
            for limit_bytes in limits().filter(|bytes| *bytes < total_bytes) {
                let fraction = limit_bytes as f64 / total_bytes as f64;
                let limit = |rounding| limit_of_fraction(fraction, total_bytes, rounding);
                assert_eq!(limit(FractionRounding::Nearest), Some(limit_bytes));
                truncated += u64::from(limit(FractionRounding::Truncate) != Some(limit_bytes));
            }
        }
        assert!(truncated > 100, "truncation loses a byte of {truncated} limits");
    }

    #[test]
    fn a_limit_in_bytes_equals_that_of_its_fraction() {
        let totals = [GIB, 16_945_512_448, 150_109_880_320, 540_000_000_123, 1 << 45];
        for total_bytes in totals {
            let some = [0, 1, 20 * MIB, 6442 * MIB + 1, total_bytes - 1].into_iter();
            for limit_bytes in some.chain((0..2000).map(|i| i * 7_654_321)) {
                let limit_bytes = limit_bytes.min(total_bytes - 1);
                let fraction = fraction_of_limit(limit_bytes, total_bytes);
                for rounding in [FractionRounding::Nearest, FractionRounding::Truncate] {
                    let limit = limit_of_fraction(fraction, total_bytes, rounding);
                    assert_eq!(limit, Some(limit_bytes), "of {total_bytes}, {rounding:?}");
                }
            }
            assert_eq!(fraction_of_limit(total_bytes, total_bytes), 1.0);
        }
    }

    #[test]
    fn sizes_that_are_compared_never_look_equal() {
        let shown = |left, right| [left, right].map(bytes_that_compare(left, right));
        assert_eq!(shown(340 * MIB, 341 * MIB), ["340.00 MiB", "341.00 MiB"]);
        assert_eq!(
            shown(340 * MIB, 340 * MIB - 1),
            ["340.00 MiB (356515840 bytes)", "340.00 MiB (356515839 bytes)"]
        );
        assert_eq!(shown(7, 7), ["7 bytes", "7 bytes"]);
    }

    #[test]
    fn divided_intervals_round_to_the_next_step() {
        assert_eq!(divided(4).round(1200), 1536, "1,200 is below 512 x 4: plain rounding");
        assert_eq!(divided(4).round(84 * MIB), 96 * MIB);
        assert_eq!(divided(8).round(84 * MIB), 88 * MIB);
        assert_eq!(divided(2).round(400 * MIB), 512 * MIB);
        assert_eq!(divided(8).round(64 * MIB), 64 * MIB, "a power of two stays");
        assert_eq!(divided(1).round(1025), 1536, "one division is none");
        assert_eq!(divided(1 << 63).round(REQUEST_MAX_BYTES - 1), REQUEST_MAX_BYTES);
    }

    #[test]
    fn rounding_is_idempotent_and_never_shrinks() {
        for d in [0, 1, 2, 4, 8, 16, 64] {
            for bytes in (1..4096).chain((1..200).map(|i| i * 777_777)) {
                let rounded = divided(d).round(bytes);
                assert!(rounded >= bytes);
                assert_eq!(divided(d).round(rounded), rounded);
            }
        }
    }

    #[test]
    fn divisions_other_than_powers_of_two_are_refused() {
        let mut divisions = [0; 16];
        divisions[3] = 3;
        assert_eq!(RoundupDivisions::new(divisions), None);
    }

    #[test]
    fn segments_have_three_sizes() {
        let of = |rounded| segment_bytes(rounded, LARGE_SEGMENT_DEFAULT_BYTES);
        assert_eq!(of(512), 2 * MIB);
        assert_eq!(of(MIB), 2 * MIB);
        assert_eq!(of(MIB + 512), 20 * MIB);
        assert_eq!(of(10 * MIB - 512), 20 * MIB);
        assert_eq!(of(10 * MIB), 10 * MIB);
        assert_eq!(of(10 * MIB + 512), 12 * MIB);
    }

    #[test]
    fn sizes_for_people_have_two_decimals() {
        assert_eq!(human_bytes(1000), "1000 bytes");
        assert_eq!(human_bytes(1536), "1.50 KiB");
        assert_eq!(human_bytes(800_000_000 * GIB), "800000000.00 GiB");
        assert_eq!(human_bytes(1 << 60), "1.00 EiB");
        assert_eq!(human_bytes(u64::MAX), "16.00 EiB");
    }
}
