//! How many random histories are run: few for every change, many before a release.

/// `quick` when `STRATALLOC_RUNS` says it or nothing, ten times as many when it says `full`, and so many
/// times as many when it says a number.
///
/// # Panics
///
/// When it says anything else: a misspelt word must not look like a long run that passed.
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
