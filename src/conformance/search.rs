//! Runs scripts until one fails, and looks for the shortest that still does.

use std::any::Any;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use quickcheck::Arbitrary;

use super::bed::{Bed, Step};
use super::laws::Law;
use super::machine::Machine;
use super::script::{Op, Script};
use super::{Build, Checked, Options};
use crate::driver::Driver;

/// How the words begin when a constructor refuses.
pub(super) const NOT_BUILT: &str = "it was not built: ";

/// So many scripts are tried on the way to the shortest.
const SHRINK_MAX: usize = 3000;

/// What was seen, and what was done before.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    pub(super) what: String,
    pub(super) lines: Vec<String>,
    pub(super) seed: u64,
}

/// What one run found: nothing, or what is wrong and the lines that led there.
pub(super) type Trial<'a, O = Op> = &'a dyn Fn(&Script<O>) -> Result<(), (String, Vec<String>)>;

/// Tries random scripts; the first that fails is made as short as it can be.
pub(super) fn scripts<O: Arbitrary>(
    options: &Options,
    keep: fn(&O) -> bool,
    trial: Trial<'_, O>,
) -> Result<(), Broken> {
    for n in 0..options.scripts {
        let seed = options.seed.wrapping_add(n);
        let script = Script::random(seed, options.longest, keep);
        if let Err(first) = trial(&script) {
            // A real device may be lost for good: what fails then for a script of nothing is something else.
            let (what, lines) = match trial(&Script::default()) {
                Err((other, _)) if other != first.0 => first,
                _ => shortest(script, first, trial),
            };
            return Err(Broken { what, lines, seed });
        }
    }
    Ok(())
}

/// Random histories of a test's own operations, of at most `longest` each. Panics with the shortest that
/// fails.
///
/// # Panics
///
/// When `run` finds something wrong or panics.
pub fn histories<O: Arbitrary + Debug>(
    histories: u64,
    longest: usize,
    run: impl Fn(&[O]) -> Checked,
) {
    // Other histories each time: what fails is printed whole.
    let seed = RandomState::new().hash_one(longest);
    let options = Options { scripts: histories, longest, seed, ..Options::default() };
    let found = scripts(&options, |_| true, &|script: &Script<O>| {
        let lines = || script.ops.iter().map(|op| format!("{op:?}")).collect();
        guarded(|| run(&script.ops)).map_err(|what| (what, lines()))
    });
    if let Err(Broken { what, lines, .. }) = found {
        panic!("{what}\nafter:\n  {}", lines.join(",\n  "));
    }
}

fn shortest<O: Arbitrary>(
    mut script: Script<O>,
    mut found: (String, Vec<String>),
    trial: Trial<'_, O>,
) -> (String, Vec<String>) {
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

/// Runs `work` on a new bed. A panic inside is something that is wrong like any other.
pub(super) fn on_a_bed(
    machine: &dyn Machine,
    driver: Arc<dyn Driver>,
    build: &Build<'_>,
    work: &dyn Fn(&mut Bed<'_>) -> Checked,
) -> Result<(), (String, Vec<String>)> {
    let built = guarded(|| Bed::new(machine, driver, build));
    let mut bed = built.map_err(|what| (what, Vec::new()))?;
    match catch_unwind(AssertUnwindSafe(|| work(&mut bed))) {
        Ok(done) => {
            let lines = std::mem::take(&mut bed.lines);
            let gone = guarded(|| {
                drop(bed);
                Ok(())
            });
            done.and(gone).map_err(|what| (what, lines))
        }
        Err(panic) => {
            let lines = std::mem::take(&mut bed.lines);
            // Nobody knows what state it is in.
            std::mem::forget(bed);
            Err((told(&*panic), lines))
        }
    }
}

/// Runs something that may panic.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(told(&*panic)))
}

pub(super) fn told(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panicked: {}", text.unwrap_or("with no words"))
}

/// Performs a script and looks at the laws after each step.
pub(super) fn follow(bed: &mut Bed<'_>, script: &Script, laws: &[Law]) -> Checked {
    for op in &script.ops {
        let step = bed.perform(op)?;
        laws.iter().try_for_each(|law| law(bed, &step))?;
    }
    laws.iter().try_for_each(|law| law(bed, &Step::Ended))
}
