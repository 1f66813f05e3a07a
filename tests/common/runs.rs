//! The number of random histories: few for every change, many before a release.

/// Returns `quick`, multiplied by 10 if `STRATALLOC_RUNS` is `full`, or by its value if it is a number.
/// If it is `quick` or unset, `quick` is returned unchanged.
///
/// # Panics
///
/// If the variable has any other value: a misspelt word must not look like a long run that passed.
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
