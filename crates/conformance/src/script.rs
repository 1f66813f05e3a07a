//! Random operations on an allocator, as data that can be shortened.
//!
//! A pick is taken modulo the number of candidates. So every list of operations is legal, and stays legal
//! when operations are removed. See `fixture` for their execution.

use quickcheck::{Arbitrary, Gen};

/// One operation. Streams are indices of the test's streams; picks are indices of live or freed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Allocates a block.
    Allocate {
        /// The size; at least 1.
        bytes: u64,
        /// The stream.
        stream: u8,
    },
    /// Frees a live block.
    Free {
        /// The block.
        pick: u16,
    },
    /// Records that another stream uses a live block.
    RecordStream {
        /// The block.
        pick: u16,
        /// The stream.
        stream: u8,
    },
    /// Finishes all work of a stream.
    Finish {
        /// The stream.
        stream: u8,
    },
    /// Releases cached free memory to the driver.
    EmptyCache,
    /// Resets peaks to the current values.
    ResetPeaks,
    /// Makes an illegal call, which must be refused and change nothing.
    Misuse {
        /// The kind of call.
        what: Misuse,
        /// The block.
        pick: u16,
    },
}

/// An illegal call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misuse {
    /// A free of a block that was freed before.
    Freed,
    /// A handle of a live block with the owner id of another allocator.
    Foreign,
    /// A handle of a live block with a forged token.
    MadeUp,
    /// A request of zero bytes.
    ZeroBytes,
    /// A request of more bytes than any device has.
    AbsurdBytes,
}

impl Misuse {
    /// Returns true if the illegal call is a request, false if it uses a handle.
    #[must_use]
    pub(super) const fn is_request(self) -> bool {
        matches!(self, Self::ZeroBytes | Self::AbsurdBytes)
    }
}

const MISUSES: [Misuse; 5] =
    [Misuse::Freed, Misuse::Foreign, Misuse::MadeUp, Misuse::ZeroBytes, Misuse::AbsurdBytes];

/// Sizes around the boundaries of common allocators.
const SIZES: [u64; 16] = [
    1, 511, 512, 513, 4096, 65_536, 1_048_575, 1_048_576, 1_048_577, 2_097_152, 2_097_153,
    6_291_456, 10_485_760, 12_582_912, 20_971_521, 33_554_432,
];

fn size(g: &mut Gen) -> u64 {
    let near = g.choose(&SIZES).copied().unwrap_or(1);
    if bool::arbitrary(g) { near } else { 1 + u64::arbitrary(g) % near }
}

impl Op {
    /// Returns true unless this is an illegal call or a reset of the peaks.
    pub(super) const fn is_plain(&self) -> bool {
        !matches!(self, Self::Misuse { .. } | Self::ResetPeaks)
    }
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let (pick, stream) = (u16::arbitrary(g), u8::arbitrary(g) % 3);
        match u8::arbitrary(g) % 100 {
            0..40 => Self::Allocate { bytes: size(g), stream },
            40..68 => Self::Free { pick },
            68..78 => Self::RecordStream { pick, stream },
            78..84 => Self::Finish { stream },
            84..88 => Self::EmptyCache,
            88..91 => Self::ResetPeaks,
            _ => {
                let what = g.choose(&MISUSES).copied().unwrap_or(Misuse::Freed);
                Self::Misuse { what, pick }
            }
        }
    }

    fn shrink(&self) -> Box<dyn Iterator<Item = Self>> {
        let own = *self;
        let simpler = match own {
            Self::Allocate { bytes, stream } => vec![
                Self::Allocate { bytes: 1, stream },
                Self::Allocate { bytes: bytes.div_ceil(2), stream },
                Self::Allocate { bytes, stream: 0 },
            ],
            Self::Free { pick } => vec![Self::Free { pick: 0 }, Self::Free { pick: pick / 2 }],
            Self::RecordStream { stream, .. } => {
                vec![Self::RecordStream { pick: 0, stream }]
            }
            Self::Misuse { what, pick } => {
                vec![Self::Misuse { what, pick: 0 }, Self::Misuse { what, pick: pick / 2 }]
            }
            Self::Finish { .. } | Self::EmptyCache | Self::ResetPeaks => Vec::new(),
        };
        Box::new(simpler.into_iter().filter(move |op| *op != own))
    }
}

/// A list of operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Script<O = Op> {
    /// The operations.
    pub(super) ops: Vec<O>,
}

impl<O> Default for Script<O> {
    fn default() -> Self {
        Self { ops: Vec::new() }
    }
}

impl<O: Arbitrary> Script<O> {
    /// Returns a random script of at most `longest` operations, all of which `keep` accepts. The same
    /// seed gives the same script.
    #[must_use]
    pub(super) fn random(seed: u64, longest: usize, keep: fn(&O) -> bool) -> Self {
        let mut g = Gen::from_size_and_seed(longest.max(1), seed);
        let half = longest.div_ceil(2);
        let wanted = (half + usize::arbitrary(&mut g) % half.max(1)).max(1);
        let drawn = std::iter::repeat_with(|| O::arbitrary(&mut g));
        // The search is bounded, because `keep` may accept few operations. The script may then be
        // shorter.
        let ops = drawn.take(wanted * 8).filter(keep).take(wanted).collect();
        Self { ops }
    }

    /// Returns simpler scripts, the shortest first: without a run of operations (all, half of them, and
    /// so on down to a single one), then with one operation simplified.
    pub(super) fn simpler(&self) -> impl Iterator<Item = Self> + '_ {
        let length = self.ops.len();
        let widths = std::iter::successors(Some(length), |width| Some(width / 2));
        let cuts = widths.take_while(|width| *width > 0).flat_map(move |width| {
            (0..length.div_ceil(width)).map(move |n| (n * width, ((n + 1) * width).min(length)))
        });
        let without = cuts.map(|(from, to)| {
            let ops = [&self.ops[..from], &self.ops[to..]].concat();
            Self { ops }
        });
        let eased = self.ops.iter().enumerate().flat_map(move |(at, op)| {
            op.shrink().map(move |simpler| {
                let mut ops = self.ops.clone();
                ops[at] = simpler;
                Self { ops }
            })
        });
        without.chain(eased)
    }
}

impl Script {
    /// Returns the script with an end that frees every block and allocates nearly all of a device of
    /// `device_bytes`, which makes the allocator release idle memory.
    #[must_use]
    pub(super) fn pressed(&self, device_bytes: u64) -> Self {
        let taken = self.ops.iter().filter(|op| matches!(op, Op::Allocate { .. }));
        let frees = taken.map(|_| Op::Free { pick: 0 });
        let large = Op::Allocate { bytes: device_bytes - device_bytes / 8, stream: 0 };
        Self { ops: self.ops.iter().copied().chain(frees).chain([large]).collect() }
    }
}
