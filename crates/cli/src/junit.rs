//! Results of conditions as a JUnit file, which CI systems display.

use std::fmt::Write;
use std::path::Path;

use stratalloc::config::shown;

use super::assertion::Judged;
use super::outcome::{Outcome, Result};
use super::show::shown_path;

/// The answer for one condition on one recording.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The recording, or the recordings that are compared.
    pub(crate) name: String,
    pub(crate) answer: Judged,
}

/// Writes a JUnit file with one test case for each condition.
pub(crate) fn write(file: &Path, command: &str, cases: &[Case]) -> Result<()> {
    stratalloc::files::write(file, text(command, cases)?.as_bytes())
        .map_err(|error| format!("{}: {error}", shown_path(file)).into())
}

fn text(command: &str, cases: &[Case]) -> Result<String, std::fmt::Error> {
    let count = |outcome| cases.iter().filter(|case| case.answer.outcome == outcome).count();
    let counts = format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\"",
        cases.len(),
        count(Outcome::Failed),
        count(Outcome::Unjudged)
    );
    let suite = format!("stratalloc {command}");
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    writeln!(text, "<testsuites {counts}>\n  <testsuite name=\"{suite}\" {counts}>")?;
    for Case { name, answer } in cases {
        let (name, condition) = (escaped(name), escaped(&answer.condition));
        let sentence = escaped(&answer.sentence);
        write!(text, "    <testcase classname=\"{suite}.{name}\" name=\"{condition}\"")?;
        let (element, why) = match answer.outcome {
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
        let case =
            |answer: Judged| Case { name: "run \"<1>\" & \u{1b}\u{ffff}".to_owned(), answer };
        let answer = |condition: &str, outcome| Judged {
            condition: condition.to_owned(),
            outcome,
            sentence: "No: 3 > 2.".to_owned(),
        };
        let cases = [
            case(answer("needs<=1GiB", Outcome::Failed)),
            case(answer("needs>1B", Outcome::Good)),
            case(Judged::unjudged("needs<1B", "it is cut off")),
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
