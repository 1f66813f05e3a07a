//! Runs scripts until one fails, and searches for the shortest script that still fails.

use std::any::Any;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use quickcheck::Arbitrary;

use super::fixture::{Fixture, Step};
use super::invariants::Invariant;
use super::machine::Machine;
use super::script::{Op, Script};
use super::{Build, Checked, Options};
use stratalloc::driver::Driver;

/// The prefix of the error when the constructor fails.
pub(super) const NOT_BUILT: &str = "it was not built: ";

/// The maximum number of scripts tried in the search for the shortest.
const SHRINK_MAX: usize = 3000;

/// A violation, and the operations that led to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) what: String,
    pub(super) lines: Vec<String>,
    /// The seed from which the operations were drawn. `None`: the seed of the options.
    pub(super) seed: Option<u64>,
}

impl From<String> for Broken {
    fn from(what: String) -> Self {
        Self { what, ..Self::default() }
    }
}

/// A function that runs one script.
pub(super) type Trial<'a, O = Op> = &'a dyn Fn(&Script<O>) -> Result<(), Broken>;

/// Runs random scripts until one fails, and shortens that one.
pub(super) fn scripts<O: Arbitrary>(
    options: &Options,
    keep: fn(&O) -> bool,
    trial: Trial<'_, O>,
) -> Result<(), Broken> {
    for n in 0..options.scripts {
        let seed = options.seed.wrapping_add(n);
        let script = Script::random(seed, options.longest, keep);
        if let Err(first) = trial(&script) {
            // The failure may have left a real device broken. If an empty script now fails in another way,
            // shortening would search for that other failure, so it is skipped.
            let broken = match trial(&Script::default()) {
                Err(other) if other.what != first.what => first,
                _ => shortest(script, first, trial),
            };
            return Err(Broken { seed: Some(seed), ..broken });
        }
    }
    Ok(())
}

/// Runs random sequences of a test's own operations, of at most `longest` each.
///
/// # Panics
///
/// When `run` returns an error or panics; the message has the shortest failing sequence.
pub fn histories<O: Arbitrary + Debug>(
    histories: u64,
    longest: usize,
    run: impl Fn(&[O]) -> Checked,
) {
    // The seed differs on each run. A repeat does not need it, because a failing sequence is printed in full.
    let seed = RandomState::new().hash_one(longest);
    let options = Options { scripts: histories, longest, seed, ..Options::default() };
    let found = scripts(&options, |_| true, &|script: &Script<O>| {
        let lines = || script.ops.iter().map(|op| format!("{op:?}")).collect();
        guarded(|| run(&script.ops)).map_err(|what| Broken { what, lines: lines(), seed: None })
    });
    if let Err(Broken { what, lines, .. }) = found {
        panic!("{what}\nafter:\n  {}", lines.join(",\n  "));
    }
}

fn shortest<O: Arbitrary>(mut script: Script<O>, mut found: Broken, trial: Trial<'_, O>) -> Broken {
    let mut left = SHRINK_MAX;
    loop {
        let mut candidates = script.simpler().take(left);
        let mut tried = 0;
        let next = candidates.find_map(|simpler| {
            tried += 1;
            trial(&simpler).err().map(|wrong| (simpler, wrong))
        });
        drop(candidates);
        left -= tried.min(left);
        match next {
            Some((simpler, wrong)) if left > 0 => (script, found) = (simpler, wrong),
            Some((_, wrong)) => return wrong,
            None => return found,
        }
    }
}

/// Runs `work` on a new fixture. A panic in it is a failure like any other.
pub(super) fn on_a_fixture<T>(
    machine: &dyn Machine,
    driver: Arc<dyn Driver>,
    build: &Build<'_>,
    work: impl FnOnce(&mut Fixture<'_>) -> Result<T, String>,
) -> Result<T, Broken> {
    let mut fixture = guarded(|| Fixture::new(machine, driver, build))?;
    let done = catch_unwind(AssertUnwindSafe(|| work(&mut fixture)));
    let lines = std::mem::take(&mut fixture.lines);
    let done = match done {
        Ok(done) => {
            let dropped = guarded(|| {
                drop(fixture);
                Ok(())
            });
            done.and_then(|done| dropped.map(|()| done))
        }
        Err(panic) => {
            // Leaked on purpose: dropping the allocator could fail again, because it may be in any
            // state.
            std::mem::forget(fixture);
            Err(panic_message(&*panic))
        }
    };
    done.map_err(|what| Broken { what, lines, seed: None })
}

/// Runs `work` and converts a panic to an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_message(&*panic)))
}

pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panicked: {}", text.unwrap_or("without a message"))
}

/// Runs a script and checks the invariants after each step, and once more at the end.
pub(super) fn follow(
    fixture: &mut Fixture<'_>,
    script: &Script,
    invariants: &[Invariant],
) -> Checked {
    for op in &script.ops {
        let step = fixture.perform(op)?;
        invariants.iter().try_for_each(|invariant| invariant(fixture, &step))?;
    }
    invariants.iter().try_for_each(|invariant| invariant(fixture, &Step::Ended))
}
