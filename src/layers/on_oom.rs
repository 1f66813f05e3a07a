//! Diagnostics of an out-of-memory error: a snapshot, and settings under which the program would have
//! fitted. The keys `snapshot_on_oom` and `advise_on_oom` add this layer outside all others.
//!
//! The snapshot and the search for settings run on the thread of the request, with no lock held. Each
//! runs at most four times per allocator, so that a program that runs out of memory repeatedly is not
//! delayed each time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::watch::{Watch, Watched};
use crate::allocator::{DeviceAllocator, Recording, Request};
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::history::Snapshot;
use crate::sync::{Global, Rank};
use crate::system;

/// The most snapshots and searches for settings per allocator.
pub(crate) const TIMES_MAX: usize = 4;
/// The most snapshots of one name. A snapshot of an earlier run or of another process is never replaced, and
/// a program that is restarted again and again does not fill the disk.
const NUMBERS_MAX: usize = 100;

/// Searches for settings under which the program of a snapshot would have fitted. Returns them as
/// sentences.
pub type Adviser = fn(&Snapshot) -> Vec<String>;

static ADVISER: Global<Option<Adviser>> = Global::new(Rank::Adviser, None);

/// Sets the adviser of all allocators of this process. By default there is no adviser. Does not wait.
pub fn set_adviser(adviser: Adviser) {
    *ADVISER.lock() = Some(adviser);
}

/// Returns true if an adviser is set.
pub(crate) fn has_adviser() -> bool {
    ADVISER.read().is_some()
}

/// See the [module](self).
#[derive(Debug)]
pub struct OnOom {
    snapshot: Option<String>,
    advises: bool,
    times: AtomicUsize,
}

/// Returns `inner` with diagnostics: snapshots, if a path is given, and advice.
pub(crate) fn on_oom<A: DeviceAllocator>(
    inner: A,
    snapshot: Option<String>,
    advises: bool,
) -> Watched<A, OnOom> {
    Watched::new(inner, OnOom { snapshot, advises, times: AtomicUsize::new(0) })
}

impl OnOom {
    fn explain(&self, report: &mut OutOfMemory, recording: &dyn Recording) {
        let time = self.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |times| {
            (times < TIMES_MAX).then_some(times + 1)
        });
        let Ok(time) = time else { return };
        let snapshot = recording.snapshot();
        if let Some(pattern) = &self.snapshot {
            let path = path(pattern, report);
            let free = (time + 1..=NUMBERS_MAX).map(|number| numbered(&path, number));
            let why = |error| format!("{}: {error}", path.display());
            report.snapshot = Some(snapshot.save_first_free(free).map_err(why));
        }
        let adviser = *ADVISER.read();
        let beyond = |total_bytes| report.segment_bytes.max(report.requested_bytes) > total_bytes;
        let hopeless = report.device_total_bytes.is_some_and(beyond);
        if let Some(advise) = adviser.filter(|_| self.advises && !hopeless) {
            report.hints.extend(advise(&snapshot));
        }
    }
}

/// Returns the path with its placeholders replaced.
fn path(pattern: &str, report: &OutOfMemory) -> PathBuf {
    let process = std::process::id().to_string();
    let path = pattern.replace("%p", &process).replace("%d", &report.device.to_string());
    PathBuf::from(path.replace("%h", &system::host_name()))
}

/// Returns the path of a snapshot: the second gets `.2` before the extension, the third `.3`, and so on.
fn numbered(path: &Path, number: usize) -> PathBuf {
    if number == 1 {
        return path.to_owned();
    }
    let mut name = OsString::from(path.file_stem().unwrap_or_default());
    name.push(format!(".{number}"));
    if let Some(ending) = path.extension() {
        name.push(".");
        name.push(ending);
    }
    path.with_file_name(name)
}

impl Watch for OnOom {
    #[cold]
    fn failed<A: DeviceAllocator>(&self, _: Request, error: AllocError, below: &A) -> AllocResult {
        let mut error = error;
        if let AllocError::OutOfMemory(report) = &mut error
            && let Some(recording) = below.control().recording
        {
            self.explain(report, recording);
        }
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_contain_process_host_device_and_number() {
        let report = OutOfMemory::default();
        let process = std::process::id();
        assert_eq!(
            path("a.d/%p.%d.pickle", &report),
            PathBuf::from(format!("a.d/{process}.0.pickle"))
        );
        let host = path("%h", &report);
        assert!(host.components().count() == 1 && host != Path::new("%h"), "{host:?}");
        let numbered = |path: &str, number| numbered(Path::new(path), number);
        assert_eq!(numbered("a.d/run.pickle", 1), PathBuf::from("a.d/run.pickle"));
        assert_eq!(numbered("a.d/run.pickle", 2), PathBuf::from("a.d/run.2.pickle"));
        assert_eq!(numbered("a.d/run", 4), PathBuf::from("a.d/run.4"));
    }
}
