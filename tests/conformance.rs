//! The conformance suite, on everything that the house brings, and on allocators that are broken on purpose.

#[path = "conformance/broken.rs"]
mod broken;
#[path = "conformance/toy.rs"]
mod toy;

use stratalloc::conformance::{Options, configured, run};

#[test]
fn native_conforms() {
    let options = Options::from_environment().unwrap();
    match run("native", &configured("backend:native"), &options) {
        Ok(report) => print!("{report}"),
        Err(failure) => panic!("{failure}"),
    }
}
