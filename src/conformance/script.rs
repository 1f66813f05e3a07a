//! What can happen to an allocator, as data: random operations that shrink.
//!
//! Picks are taken modulo what there is, so every list of operations is legal and stays legal when
//! parts are taken out. Nothing here knows an allocator: see `bed` for what operations do.

use quickcheck::{Arbitrary, Gen};

/// One operation. Streams are numbers of the test's own streams, picks count live or freed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Asks for a block.
    Allocate {
        /// How many bytes; at least 1.
        bytes: u64,
        /// Which stream.
        stream: u8,
    },
    /// Gives a live block back.
    Free {
        /// Which block.
        pick: u16,
    },
    /// Announces that another stream uses a live block.
    RecordStream {
        /// Which block.
        pick: u16,
        /// Which stream.
        stream: u8,
    },
    /// Finishes all work of a stream.
    Finish {
        /// Which stream.
        stream: u8,
    },
    /// Gives idle memory back to the driver.
    EmptyCache,
    /// Sets peaks to what is current.
    ResetPeaks,
    /// A call that must be refused and change nothing.
    Misuse {
        /// Which sort of call.
        what: Misuse,
        /// Which block.
        pick: u16,
    },
}

/// A call that must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misuse {
    /// A handle of a block that was freed before.
    Freed,
    /// A live block under another allocator's name.
    Foreign,
    /// A live block with a token that nobody made.
    MadeUp,
    /// A request of no bytes.
    ZeroBytes,
    /// A request of more bytes than any device has.
    AbsurdBytes,
}

impl Misuse {
    /// Whether it is a request, not a handle.
    #[must_use]
    pub(super) const fn is_request(self) -> bool {
        matches!(self, Self::ZeroBytes | Self::AbsurdBytes)
    }
}

const MISUSES: [Misuse; 5] =
    [Misuse::Freed, Misuse::Foreign, Misuse::MadeUp, Misuse::ZeroBytes, Misuse::AbsurdBytes];

/// Sizes around the boundaries that allocators like to have.
const SIZES: [u64; 16] = [
    1, 511, 512, 513, 4096, 65_536, 1_048_575, 1_048_576, 1_048_577, 2_097_152, 2_097_153,
    6_291_456, 10_485_760, 12_582_912, 20_971_521, 33_554_432,
];

fn size(g: &mut Gen) -> u64 {
    let near = g.choose(&SIZES).copied().unwrap_or(1);
    if bool::arbitrary(g) { near } else { 1 + u64::arbitrary(g) % near }
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

/// Operations in order.
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
    /// A script of `longest` operations or somewhat fewer, all of which `keep` wants; the same for the
    /// same seed.
    #[must_use]
    pub(super) fn random(seed: u64, longest: usize, keep: fn(&O) -> bool) -> Self {
        let mut g = Gen::from_size_and_seed(longest.max(1), seed);
        let half = longest.div_ceil(2);
        let wanted = (half + usize::arbitrary(&mut g) % half.max(1)).max(1);
        let drawn = std::iter::repeat_with(|| O::arbitrary(&mut g));
        // An unlucky `keep` gives a short script, not an endless search.
        let ops = drawn.take(wanted * 8).filter(keep).take(wanted).collect();
        Self { ops }
    }

    /// Scripts that are a little simpler: with parts taken out, or with one operation made simpler.
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
    /// The same with an end at which every block is freed and one is asked for that needs nearly all of a
    /// device of `device_bytes`: idle memory goes back to the driver then.
    #[must_use]
    pub(super) fn pressed(&self, device_bytes: u64) -> Self {
        let taken = self.ops.iter().filter(|op| matches!(op, Op::Allocate { .. }));
        let frees = taken.map(|_| Op::Free { pick: 0 });
        let large = Op::Allocate { bytes: device_bytes - device_bytes / 8, stream: 0 };
        Self { ops: self.ops.iter().copied().chain(frees).chain([large]).collect() }
    }
}
