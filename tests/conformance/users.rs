//! Allocators of users: a registered Rust type, closures, and a compiled library.

use std::sync::Once;

use stratalloc_conformance::configured;

use super::toy::{Defect, toy};
use crate::common::prelude::*;

/// Registers the toy allocator and builds it by its name, as a configuration string does.
fn registered(driver: Arc<dyn Driver>) -> Constructed {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let make = toy(Defect::None);
        let done = registry::register("toy", move |driver, _| make(driver));
        done.expect("the name is unique");
    });
    configured("backend:toy")(driver)
}

/// Allocates directly from the driver. Keeps blocks that the driver failed to free, and frees them
/// later.
#[derive(Debug)]
struct Straight {
    driver: Arc<dyn Driver>,
    kept: Mutex<Vec<(u64, u64)>>,
}

impl Straight {
    fn allocate(&self, bytes: u64) -> Option<u64> {
        self.driver.allocate(bytes).ok().or_else(|| {
            self.free_all();
            self.driver.allocate(bytes).ok()
        })
    }

    fn free(&self, address: u64, bytes: u64) {
        self.kept.lock().push((address, bytes));
        self.free_all();
    }

    fn free_all(&self) {
        self.kept.lock().retain(|&(address, bytes)| self.driver.free(address, bytes).is_err());
    }
}

impl Drop for Straight {
    fn drop(&mut self) {
        self.free_all();
    }
}

fn closures(driver: Arc<dyn Driver>) -> Constructed {
    let takes = Arc::new(Straight { driver: Arc::clone(&driver), kept: Mutex::default() });
    let gives = Arc::clone(&takes);
    let allocate = move |bytes, _, _| takes.allocate(bytes);
    let free = move |address, bytes, _, _| gives.free(address, bytes);
    let (callbacks, settings) = (Callbacks::new(allocate, free), Settings::default());
    Ok(Box::new(PluggableAllocator::new("closures", driver, callbacks, &settings, 1)))
}

stratalloc_conformance::conformance_tests!(registered_type, registered);
stratalloc_conformance::conformance_tests!(closures_over_the_driver, closures);

#[cfg(target_os = "linux")]
#[test]
fn a_compiled_library_conforms() {
    use std::path::Path;
    use std::process::Command;
    use stratalloc_conformance::{Device, Options, Outcome, Property, run, skip};

    if Command::new("cc").arg("--version").output().is_err() {
        skip::skipped("a_compiled_library_conforms", "no C compiler (cc)");
        return;
    }
    let name = format!("conforming-{}.so", std::process::id());
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/caching.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .arg(source)
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let text = format!(
        "backend:pluggable,library:\"{}\",alloc_fn:caching_alloc,free_fn:caching_free",
        library.display()
    );
    let report = match run("library", &configured(&text), &Options::from_environment().unwrap()) {
        Ok(report) => report,
        Err(failure) => panic!("{failure}"),
    };
    print!("{report}");
    // The library's memory does not come from the device, so the properties of bytes and device memory are
    // not tested.
    let untested: Vec<_> = report
        .outcomes
        .iter()
        .filter(|(_, device, outcome)| {
            *device != Device::Cuda && matches!(outcome, Outcome::NotTested { .. })
        })
        .map(|(property, _, _)| *property)
        .collect();
    for property in [Property::BytesStayIntact, Property::EverythingIsReleased] {
        assert!(untested.contains(&property), "{property}: {report}");
    }
    for property in [Property::ReuseWaitsForWork, Property::RunningOutIsAnError] {
        assert!(!untested.contains(&property), "{property}: {report}");
    }
}
