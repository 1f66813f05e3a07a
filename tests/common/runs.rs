//! How many random histories run: few after each change, many before a release.

/// Returns `quick`, multiplied by 10 if `STRATALLOC_RUNS` is `full`, or by the variable's value if that is a
/// whole number above 0. Returns `quick` unchanged if the variable is `quick` or unset.
///
/// # Panics
///
/// If the variable has any other value, so that a misspelt word is not taken for a long run.
pub(crate) fn runs(quick: u64) -> u64 {
    let times = match std::env::var("STRATALLOC_RUNS").as_deref() {
        Err(_) | Ok("quick") => 1,
        Ok("full") => 10,
        Ok(text) => match text.parse() {
            Ok(times) if times >= 1 => times,
            _ => panic!("STRATALLOC_RUNS is {text:?}: expected quick, full or a whole number"),
        },
    };
    quick * times
}
