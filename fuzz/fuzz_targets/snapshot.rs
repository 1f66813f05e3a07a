//! A target of libFuzzer: passes each input to the check of the same name in `tests/fuzz_checks`.

#![no_main]

#[path = "../../tests/fuzz_checks/mod.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| checks::snapshot(bytes));
