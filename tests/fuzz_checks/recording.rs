//! Checks for recordings of any format: reading stays within its memory limit, errors are printable, and
//! the requests can be replayed on any allocator.

use std::sync::Arc;

use stratalloc::config::{Compat, Config, KeyTable, LayerSetting};
use stratalloc::error::AllocError;
use stratalloc::registry::{self, BuildOptions};
use stratalloc_recording::reader::{Failure, Limits, MEMORY_FACTOR, read_bytes};
use stratalloc_recording::{Op, ReplayError, Silent, Trace, TraceError, Workload, run, verify};
use stratalloc_sim::{EventMode, Sim, SimOptions};

use super::memory::peak_of;

/// The maximum number of decoded bytes.
const DECODED_MAX: u64 = 256 << 10;
/// Memory for buffers and tables that does not depend on the input.
const FIXED_BYTES: u64 = 1 << 20;
/// The maximum length of an error message.
const MESSAGE_MAX_BYTES: usize = 2000;
/// The memory of the device on which recordings are replayed.
const TOTAL_BYTES: u64 = 16 << 30;

/// Reads `bytes` and returns the recording, if they are a valid one.
pub(super) fn read(bytes: &[u8]) -> Option<Trace> {
    let limits = Limits { decoded_bytes: DECODED_MAX, ..Limits::default() };
    let (result, peak) = peak_of(|| read_bytes("input", bytes, &limits, None));
    let packed = [b"\xfd7zXZ\0".as_slice(), b"\x1f\x8b", b"\x28\xb5\x2f\xfd"];
    let is_skippable = bytes.get(1..4) == Some(b"\x2a\x4d\x18");
    let is_packed = is_skippable || packed.iter().any(|magic| bytes.starts_with(magic));
    let decoded = if is_packed { DECODED_MAX } else { bytes.len() as u64 };
    let most = i64::try_from(decoded * MEMORY_FACTOR + FIXED_BYTES).expect("a small number");
    assert!(peak <= most, "{peak} bytes for {decoded} decoded ones");
    match result {
        Ok(trace) => Some(trace),
        Err(error) => {
            refused(&error, decoded);
            None
        }
    }
}

fn refused(error: &TraceError, decoded: u64) {
    let message = error.to_string();
    assert!(message.len() <= MESSAGE_MAX_BYTES, "{} bytes", message.len());
    assert!(!message.contains(char::is_control), "{message:?}");
    match &error.failure {
        Failure::Read { at, .. } | Failure::Pickle { at, .. } | Failure::Json { at, .. } => {
            assert!(*at <= decoded, "{message}, of {decoded}")
        }
        Failure::TooLarge { limit_bytes } => assert_eq!(*limit_bytes, DECODED_MAX),
        _ => {}
    }
}

/// Verifies the recording decision by decision, then replays its requests on another allocator.
pub(super) fn repeat(trace: &Trace) {
    let config = Config::parse(&trace.conf, &KeyTable::default()).ok();
    let config = config.filter(is_harmless).unwrap_or_default();
    if let Ok(verification) =
        verify(trace, &config.clone().with_compat(Compat::PyTorch), TOTAL_BYTES, None)
    {
        lawful(&verification.workload);
        if !verification.is_exact() {
            assert!(verification.first_mismatch.is_some(), "a difference is reported");
        }
    }
    let workload = Workload::of(trace, TOTAL_BYTES);
    lawful(&workload);
    let options = SimOptions {
        total_bytes: TOTAL_BYTES,
        event_mode: EventMode::Manual,
        ..SimOptions::default()
    };
    let sim = Arc::new(Sim::new(options));
    let Ok(allocator) = registry::build(&config, sim.clone(), BuildOptions::default()) else {
        return;
    };
    match run(&workload, &allocator, Some(sim.clone()), 2, &Silent) {
        Ok(run) => {
            let requests = |op: &Op| op.is_request();
            let requests = workload.ops.iter().filter(requests).count() as u64;
            assert_eq!(run.allocations + run.ooms, requests);
            assert!(run.frees <= run.allocations);
        }
        // A block of 0 bytes cannot be allocated, although a recording may contain one.
        Err(ReplayError::Alloc(AllocError::ZeroBytes)) => {
            let nothing = |op: Op| matches!(op, Op::Allocate { bytes: 0, .. });
            assert!(workload.ops.iter().any(nothing), "{workload:?}");
        }
        Err(error) => panic!("{error}: {error:?}"),
    }
    drop(allocator);
    let held = sim.held();
    assert!(held.is_nothing(), "{held:?}");
}

/// Returns true if the configuration selects `backend:native` without a layer that writes a file or injects
/// faults.
fn is_harmless(config: &Config) -> bool {
    let harmless =
        |layer: &LayerSetting| !matches!(layer, LayerSetting::Log { .. } | LayerSetting::Fault(_));
    config.settings().backend == "native" && config.settings().layers.iter().all(harmless)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Unborn,
    Live,
    Draining,
    Over,
}

/// Checks that every block is first allocated, then freed at most once. The free of a block in use by other
/// streams completes at most once.
fn lawful(workload: &Workload) {
    let mut blocks = vec![Life::Unborn; workload.blocks as usize];
    let mut step = |id: u32, from: Life, to: Life| {
        let block = &mut blocks[id as usize];
        assert!(*block == from, "block {id} in {workload:?}");
        *block = to;
    };
    let mut empty_caches = 0;
    for op in workload.ops.iter() {
        match op {
            Op::Allocate { id, .. } => step(id, Life::Unborn, Life::Live),
            Op::AllocateFailing { id, .. } => step(id, Life::Unborn, Life::Over),
            Op::Free { id } => step(id, Life::Live, Life::Over),
            Op::FreeInUse { id, .. } => step(id, Life::Live, Life::Draining),
            Op::Finished { id } => step(id, Life::Draining, Life::Over),
            Op::EmptyCache => empty_caches += 1,
        }
    }
    assert_eq!(empty_caches, workload.empty_caches);
    assert!(workload.seeded <= workload.blocks);
}
