//! Results of conditions as a JUnit file, which CI systems display.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use stratalloc::config::shown;

use super::files;
use super::outcome::{BadArguments, Result};
use super::show::shown_path;

/// The result of one condition on one recording.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The recording, or the recordings that are compared.
    pub(crate) name: String,
    /// The condition.
    pub(crate) condition: String,
    pub(crate) holds: bool,
    /// The figures, as a sentence.
    pub(crate) sentence: String,
}

/// Returns an error if the file cannot be written: because there are no conditions, or because it is one of
/// the recordings.
pub(crate) fn check(
    file: Option<&Path>,
    has_conditions: bool,
    recordings: &[PathBuf],
) -> Result<(), BadArguments> {
    let Some(file) = file else { return Ok(()) };
    if !has_conditions {
        let why = "--junit writes the results of conditions: --assert adds one";
        return Err(BadArguments(why.to_owned()));
    }
    files::spare(recordings, file)
}

/// Writes a JUnit file with one test case for each condition.
pub(crate) fn write(file: &Path, command: &str, cases: &[Case]) -> Result<()> {
    std::fs::write(file, text(command, cases)?)
        .map_err(|error| format!("{}: {error}", shown_path(file)).into())
}

fn text(command: &str, cases: &[Case]) -> Result<String, std::fmt::Error> {
    let failures = cases.iter().filter(|case| !case.holds).count();
    let counts = format!("tests=\"{}\" failures=\"{failures}\"", cases.len());
    let suite = format!("stratalloc {command}");
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    writeln!(text, "<testsuites {counts}>\n  <testsuite name=\"{suite}\" {counts}>")?;
    for case in cases {
        let (name, condition) = (escaped(&case.name), escaped(&case.condition));
        let sentence = escaped(&case.sentence);
        write!(text, "    <testcase classname=\"{suite}.{name}\" name=\"{condition}\"")?;
        match case.holds {
            true => writeln!(text, "/>")?,
            false => writeln!(
                text,
                ">\n      <failure message=\"{sentence}\">{condition} does not hold for {name}. \
                 {sentence}</failure>\n    </testcase>"
            )?,
        }
    }
    writeln!(text, "  </testsuite>\n</testsuites>")?;
    Ok(text)
}

/// Escapes a text for XML. Control characters and characters that XML forbids become `?`.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in shown(text).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => escaped.push('?'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_condition_is_a_test_case_with_escaped_figures() {
        let case = |condition: &str, holds| Case {
            name: "run \"<1>\" & \u{1b}\u{ffff}".to_owned(),
            condition: condition.to_owned(),
            holds,
            sentence: "No: 3 > 2.".to_owned(),
        };
        let cases = [case("needs<=1GiB", false), case("needs>1", true)];
        let name = "run &quot;&lt;1&gt;&quot; &amp; ??";
        assert_eq!(
            text("advise", &cases).unwrap(),
            format!(
                r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="2" failures="1">
  <testsuite name="stratalloc advise" tests="2" failures="1">
    <testcase classname="stratalloc advise.{name}" name="needs&lt;=1GiB">
      <failure message="No: 3 &gt; 2.">needs&lt;=1GiB does not hold for {name}. No: 3 &gt; 2.</failure>
    </testcase>
    <testcase classname="stratalloc advise.{name}" name="needs&gt;1"/>
  </testsuite>
</testsuites>
"#
            )
        );
    }
}
