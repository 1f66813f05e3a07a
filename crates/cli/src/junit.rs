//! Results of conditions as a JUnit file, which CI systems display.

use std::fmt::Write;
use std::path::Path;

use stratalloc::config::shown;

use super::assertion::Judgement;
use super::outcome::{Outcome, Result};
use super::show::shown_path;

/// The judgement for one condition on one recording.
#[derive(Clone, Debug)]
pub(crate) struct TestCase {
    /// The recording, or the recordings that are compared.
    pub(crate) name: String,
    pub(crate) judgement: Judgement,
}

/// Writes a JUnit file with one test case for each condition.
pub(crate) fn write(file: &Path, command: &str, cases: &[TestCase]) -> Result<()> {
    stratalloc::files::write(file, text(command, cases)?.as_bytes())
        .map_err(|error| format!("{}: {error}", shown_path(file)).into())
}

fn text(command: &str, cases: &[TestCase]) -> Result<String, std::fmt::Error> {
    let count = |outcome| cases.iter().filter(|case| case.judgement.outcome == outcome).count();
    let counts = format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\"",
        cases.len(),
        count(Outcome::Failed),
        count(Outcome::Unjudged)
    );
    let suite = format!("stratalloc {command}");
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    writeln!(text, "<testsuites {counts}>\n  <testsuite name=\"{suite}\" {counts}>")?;
    for TestCase { name, judgement } in cases {
        let (name, condition) = (escaped(name), escaped(&judgement.condition));
        let sentence = escaped(&judgement.sentence);
        write!(text, "    <testcase classname=\"{suite}.{name}\" name=\"{condition}\"")?;
        let (element, why) = match judgement.outcome {
            Outcome::Good => {
                writeln!(text, "/>")?;
                continue;
            }
            Outcome::Failed => ("failure", "does not hold for"),
            Outcome::Unjudged => ("error", "has no answer for"),
        };
        writeln!(
            text,
            ">\n      <{element} message=\"{sentence}\">{condition} {why} {name}. \
             {sentence}</{element}>\n    </testcase>"
        )?;
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
        let case = |judgement: Judgement| TestCase {
            name: "run \"<1>\" & \u{1b}\u{ffff}".to_owned(),
            judgement,
        };
        let judgement = |condition: &str, outcome| Judgement {
            condition: condition.to_owned(),
            outcome,
            sentence: "No: 3 > 2.".to_owned(),
        };
        let cases = [
            case(judgement("needs<=1GiB", Outcome::Failed)),
            case(judgement("needs>1B", Outcome::Good)),
            case(Judgement::unjudged("needs<1B", "it is cut off")),
        ];
        let name = "run &quot;&lt;1&gt;&quot; &amp; ??";
        assert_eq!(
            text("advise", &cases).unwrap(),
            format!(
                r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="3" failures="1" errors="1">
  <testsuite name="stratalloc advise" tests="3" failures="1" errors="1">
    <testcase classname="stratalloc advise.{name}" name="needs&lt;=1GiB">
      <failure message="No: 3 &gt; 2.">needs&lt;=1GiB does not hold for {name}. No: 3 &gt; 2.</failure>
    </testcase>
    <testcase classname="stratalloc advise.{name}" name="needs&gt;1B"/>
    <testcase classname="stratalloc advise.{name}" name="needs&lt;1B">
      <error message="It cannot be judged: it is cut off.">needs&lt;1B has no answer for {name}. It cannot be judged: it is cut off.</error>
    </testcase>
  </testsuite>
</testsuites>
"#
            )
        );
    }
}
