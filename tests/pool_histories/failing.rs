//! Runs one long history many times, with another driver call failing in each run.

use super::*;

/// Runs one long history once for each driver call and each kind of failure, with that call failing.
pub(super) fn each_failing_call<D: Base>() {
    let script = [
        Op::Create { no_split: false, helps: true, own: false },
        Op::Create { no_split: true, helps: false, own: true },
        Op::OpenThread { pool: 0 },
        Op::Take { bytes: 3 * MIB, stream: 1 },
        Op::Take { bytes: 512, stream: 0 },
        Op::Use { pick: 0, stream: 2 },
        Op::Give { pick: 0 },
        Op::Close { pool: 0 },
        Op::Checkpoint { pool: 0 },
        Op::TakeIn { pool: 1, bytes: 10 * MIB, stream: 0 },
        Op::TakeIn { pool: 0, bytes: 21 * MIB, stream: 1 },
        Op::Begin { pool: 0, announced: true, here: true },
        Op::Take { bytes: MIB, stream: 1 },
        Op::Fork,
        Op::Use { pick: 3, stream: 2 },
        Op::Give { pick: 3 },
        Op::Join,
        Op::Take { bytes: 64 * MIB, stream: 1 },
        Op::End,
        Op::Take { bytes: 512, stream: 1 },
        Op::Restore { pick: 0 },
        Op::Finish,
        Op::Give { pick: 0 },
        Op::Limit { mib: Some(30) },
        Op::Take { bytes: 64 * MIB, stream: 0 },
        Op::Release { pool: 0 },
        Op::EmptyCache,
        Op::Empty { pool: 0 },
    ];
    for segments in [Segments::Fixed, Segments::Expandable] {
        let mut calls = 0;
        let plan = |at, kind| FaultPlan { at, kind, repeat: false, only: None };
        let mut at = 0;
        loop {
            for kind in [DriverErrorKind::OutOfMemory, DriverErrorKind::Other] {
                let mut history = History::<D>::new(segments);
                history.fixture.device.arm(plan(at, kind));
                for (step, op) in script.iter().enumerate() {
                    let done = history.step(*op);
                    done.unwrap_or_else(|error| panic!("call {at}, step {step}: {error}"));
                }
                calls = history.fixture.device.counted_calls();
                history.end(false).unwrap_or_else(|error| panic!("call {at}: {error}"));
            }
            at += 1;
            if at >= calls {
                break;
            }
        }
        assert!(calls > 20, "{calls}");
    }
}
