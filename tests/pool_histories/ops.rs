//! The steps of a random history of pools.

use crate::common::prelude::*;

/// One step. A number selects one of the existing elements, modulo how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Take {
        bytes: u64,
        stream: u8,
    },
    TakeIn {
        pool: u8,
        bytes: u64,
        stream: u8,
    },
    Give {
        pick: u8,
    },
    Use {
        pick: u8,
        stream: u8,
    },
    Create {
        no_split: bool,
        helps: bool,
        own: bool,
    },
    Release {
        pool: u8,
    },
    Empty {
        pool: u8,
    },
    OpenThread {
        pool: u8,
    },
    OpenStream {
        pool: u8,
        stream: u8,
    },
    Close {
        pool: u8,
    },
    Checkpoint {
        pool: u8,
    },
    Restore {
        pick: u8,
    },
    /// Begins a capture of the second stream, on this thread or on one that then ends. If `announced`,
    /// its scope opens immediately in the pool; otherwise it never has one.
    Begin {
        pool: u8,
        announced: bool,
        here: bool,
    },
    Fork,
    Join,
    Break,
    End,
    Finish,
    EmptyCache,
    Switch {
        expandable: bool,
        max_split: bool,
        collect: bool,
        reuse: bool,
        compat: bool,
    },
    Limit {
        mib: Option<u8>,
    },
    Fault {
        after: u8,
        lost: bool,
    },
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let sizes = [1, 512, MIB, MIB + 512, 3 * MIB, 10 * MIB, 21 * MIB, 64 * MIB, 100 * KIB];
        let bytes = *g.choose(&sizes).expect("there are sizes");
        let (pool, stream, pick) = (u8::arbitrary(g), u8::arbitrary(g) % 4, u8::arbitrary(g));
        match u8::arbitrary(g) % 48 {
            0..8 => Self::Take { bytes, stream },
            8..16 => Self::TakeIn { pool, bytes, stream },
            16..23 => Self::Give { pick },
            23..26 => Self::Use { pick, stream },
            26 | 27 => Self::Create {
                no_split: u8::arbitrary(g).is_multiple_of(4),
                helps: bool::arbitrary(g),
                own: u8::arbitrary(g).is_multiple_of(4),
            },
            28 => Self::Release { pool },
            29 => Self::Empty { pool },
            30 => Self::OpenThread { pool },
            31 => Self::OpenStream { pool, stream },
            32 | 33 => Self::Close { pool },
            34 | 35 => Self::Checkpoint { pool },
            36 => Self::Restore { pick },
            37 | 38 => {
                Self::Begin { pool, announced: bool::arbitrary(g), here: bool::arbitrary(g) }
            }
            39 => Self::Fork,
            40 => Self::Join,
            41 => *g.choose(&[Self::Break, Self::End]).expect("there are two"),
            42 => Self::End,
            43 => Self::Finish,
            44 => Self::EmptyCache,
            45 => Self::Switch {
                expandable: bool::arbitrary(g),
                max_split: bool::arbitrary(g),
                collect: bool::arbitrary(g),
                reuse: bool::arbitrary(g),
                compat: bool::arbitrary(g),
            },
            46 => Self::Limit { mib: Option::arbitrary(g) },
            _ => Self::Fault { after: pick % 12, lost: bool::arbitrary(g) },
        }
    }
}
