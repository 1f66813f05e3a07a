//! Operations on an allocator, as data that is generated at random and can be shortened.
//!
//! Many sizes are boundaries of the rounding rules or close to one. A pick is taken modulo the number of
//! elements, so every list of operations is legal and stays legal when some are removed.

use stratalloc::size::RoundupDivisions;

use crate::common::prelude::*;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    Allocate {
        bytes: u64,
        stream: u8,
    },
    Free {
        pick: u16,
    },
    RecordStream {
        pick: u16,
        stream: u8,
    },
    FinishStream {
        stream: u8,
    },
    FinishEvent {
        pick: u8,
    },
    ProcessEvents,
    EmptyCache,
    SetLimitMib {
        mib: Option<u8>,
    },
    SetFraction {
        percent: u8,
    },
    Apply {
        tuning: Tuning,
    },
    ResetPeaks,
    ResetAccumulated,
    /// Makes calls of every kind that must be refused and change nothing.
    Misuse {
        pick: u16,
    },
}

/// A configuration as small numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tuning {
    pub(crate) max_split_mib: Option<u8>,
    pub(crate) rounding_mib: Option<u8>,
    pub(crate) large_segment_mib: u8,
    pub(crate) collect_percent: Option<u8>,
    pub(crate) divisions: u8,
    pub(crate) unlocked: bool,
    pub(crate) throws: bool,
    pub(crate) as_pytorch: bool,
    pub(crate) expandable: bool,
}

impl Tuning {
    /// The default settings.
    pub(crate) const PLAIN: Self = Self {
        max_split_mib: None,
        rounding_mib: None,
        large_segment_mib: 20,
        collect_percent: None,
        divisions: 0,
        unlocked: false,
        throws: false,
        as_pytorch: false,
        expandable: false,
    };

    /// Converts these numbers to settings.
    pub(crate) fn settings(self, segments: Segments) -> Settings {
        let large = u64::from(self.large_segment_mib) * MIB;
        let bytes = |mib: Option<u8>| mib.map(|mib| (u64::from(mib) * MIB).max(large));
        Settings {
            large_segment_bytes: large,
            max_split_bytes: bytes(self.max_split_mib),
            max_non_split_rounding_bytes: bytes(self.rounding_mib),
            garbage_collection_threshold: self.collect_percent.map(|p| f64::from(p) / 100.0),
            roundup: RoundupDivisions::new([u64::from(self.divisions); 16])
                .expect("only powers of two are chosen"),
            release_lock_on_device_allocate: self.unlocked,
            throw_on_device_oom: self.throws,
            compat: if self.as_pytorch { Compat::PyTorch } else { Compat::Default },
            expandable_segments: segments.expandable(self.expandable),
            ..Settings::default()
        }
    }
}

fn choose<T: Copy>(g: &mut Gen, from: &[T]) -> T {
    *g.choose(from).expect("there is a choice")
}

/// Returns true in one of `n` cases.
fn once_in(g: &mut Gen, n: u8) -> bool {
    u8::arbitrary(g) % n == 0
}

impl Arbitrary for Tuning {
    fn arbitrary(g: &mut Gen) -> Self {
        let mut tuning = Self::PLAIN;
        if once_in(g, 2) {
            tuning.max_split_mib = Some(choose(g, &[12, 20, 24, 40]));
        }
        if once_in(g, 3) {
            tuning.rounding_mib = Some(choose(g, &[20, 30]));
        }
        if once_in(g, 3) {
            tuning.large_segment_mib = choose(g, &[11, 12, 40]);
        }
        if once_in(g, 3) {
            tuning.collect_percent = Some(choose(g, &[1, 30, 60, 90]));
        }
        if once_in(g, 3) {
            tuning.divisions = choose(g, &[1, 2, 4, 16]);
        }
        tuning.unlocked = once_in(g, 3);
        tuning.throws = once_in(g, 10);
        tuning.as_pytorch = once_in(g, 3);
        tuning.expandable = once_in(g, 2);
        tuning
    }

    fn shrink(&self) -> Box<dyn Iterator<Item = Self>> {
        let (own, plain) = (*self, Self::PLAIN);
        let simpler = [
            plain,
            Self { max_split_mib: None, ..own },
            Self { rounding_mib: None, ..own },
            Self { large_segment_mib: plain.large_segment_mib, ..own },
            Self { collect_percent: None, ..own },
            Self { divisions: 0, ..own },
            Self { unlocked: false, ..own },
            Self { throws: false, ..own },
            Self { as_pytorch: false, ..own },
            Self { expandable: false, ..own },
        ];
        Box::new(simpler.into_iter().filter(move |simple| *simple != own))
    }
}

/// Returns a random size. It is often a boundary of the rounding rules, or differs from one by 1 or 512
/// bytes.
fn any_bytes(g: &mut Gen) -> u64 {
    const BOUNDARIES: [u64; 15] = [
        1,
        512,
        1024,
        4096,
        300 * 1024,
        MIB - 512,
        MIB,
        MIB + 512,
        2 * MIB,
        5 * MIB,
        10 * MIB - 512,
        10 * MIB,
        12 * MIB,
        20 * MIB,
        24 * MIB,
    ];
    let around = choose(g, &[-512_i64, -1, 0, 0, 0, 1, 512]);
    match u8::arbitrary(g) % 8 {
        0 => u64::from(u16::arbitrary(g)) * 512 + 1,
        1 => u64::from(u8::arbitrary(g)) * MIB / 8 + 1,
        2 => choose(g, &[1, 511, 512, 513]),
        3 => choose(g, &[20, 24, 36, 40, 44, 60, 200]) * MIB,
        _ => choose(g, &BOUNDARIES).saturating_add_signed(around).max(1),
    }
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let pick = u16::arbitrary(g);
        let stream = u8::arbitrary(g) % 8;
        match u8::arbitrary(g) % 64 {
            0..24 => Self::Allocate { bytes: any_bytes(g), stream },
            24..40 => Self::Free { pick },
            40..46 => Self::RecordStream { pick, stream },
            46..49 => Self::FinishStream { stream },
            49..51 => Self::FinishEvent { pick: u8::arbitrary(g) },
            51 => Self::ProcessEvents,
            52 => Self::EmptyCache,
            53 => Self::SetLimitMib { mib: once_in(g, 3).then(|| choose(g, &[1, 24, 44, 80])) },
            54 => Self::SetFraction { percent: choose(g, &[0, 30, 60, 90, 100]) },
            55..58 => Self::Apply { tuning: Tuning::arbitrary(g) },
            58 => Self::ResetPeaks,
            59 => Self::ResetAccumulated,
            _ => Self::Misuse { pick },
        }
    }

    fn shrink(&self) -> Box<dyn Iterator<Item = Self>> {
        match *self {
            Self::Allocate { bytes, stream } => {
                let simple =
                    [1, MIB + 512, 10 * MIB, 20 * MIB].into_iter().filter(move |b| *b < bytes);
                let smaller = simple.map(move |bytes| Self::Allocate { bytes, stream });
                let first = (stream > 0).then_some(Self::Allocate { bytes, stream: 0 });
                Box::new(first.into_iter().chain(smaller))
            }
            Self::Free { pick } => Box::new(pick.shrink().map(|pick| Self::Free { pick })),
            Self::RecordStream { pick, stream } => {
                Box::new(pick.shrink().map(move |pick| Self::RecordStream { pick, stream }))
            }
            Self::Apply { tuning } => {
                Box::new(tuning.shrink().map(|tuning| Self::Apply { tuning }))
            }
            Self::Misuse { pick } => Box::new(pick.shrink().map(|pick| Self::Misuse { pick })),
            _ => quickcheck::empty_shrinker(),
        }
    }
}
