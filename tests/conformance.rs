//! The conformance suite, on everything that the house brings.

use stratalloc::conformance::{Options, configured, run};

#[test]
fn native_conforms() {
    let options = Options::from_environment().unwrap();
    match run("native", &configured("backend:native"), &options) {
        Ok(report) => print!("{report}"),
        Err(failure) => panic!("{failure}"),
    }
}
