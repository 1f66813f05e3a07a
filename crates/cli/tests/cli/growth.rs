//! Growth from step to step, in text, JSON and on the page.

use super::made::{MIB, Made};
use super::{Folder, ok, report};

/// Writes the recording of a program that keeps 12 MiB of each of 20 steps, and returns its path.
pub(super) fn leak(folder: &Folder, kept_mib: u64) -> String {
    let mut made = Made::default();
    made.segment(0, 400 * MIB);
    let mut next = 150 * MIB;
    for _ in 0..20 {
        for (line, address, mib) in [(10, 0, 100), (11, 100 * MIB, 50)] {
            made.alloc(address, mib * MIB);
            made.at_line(line);
        }
        if kept_mib > 0 {
            made.alloc(next, kept_mib * MIB);
            made.at_line(12);
            next += kept_mib * MIB;
        }
        made.free(0, 100 * MIB);
        made.free(100 * MIB, 50 * MIB);
    }
    let path = folder.path(&format!("kept-{kept_mib}.json"));
    std::fs::write(&path, made.json()).expect("the folder is there");
    path
}

#[test]
fn growth_is_in_the_text_the_json_and_on_the_page() {
    let folder = Folder::new("growth");
    let path = leak(&folder, 12);
    let begin = "Live memory grows by 12.0 MiB a step, 240 MiB over 20 steps: job.py:12 step, 1 block a step. ";
    let text = ok(&["advise", &path, "--quick"]).stdout;
    assert!(text.contains(begin), "{text}");
    let row = "12.0  240  20  1 block a step  job.py:12 step";
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.lines().any(|line| squeezed(line) == squeezed(row)), "{text}");
    let json = ok(&["advise", &path, "--quick", "--json"]).json();
    assert_eq!(
        (&json["headline"], &json["growth"]["bytes_per_step"]),
        (&"growth".into(), &(12 * MIB).into())
    );
    assert!(json["sentence"].as_str().unwrap().starts_with(begin));
    assert!(json["growth"]["steps_left"].is_null());
    let page = folder.path("page.html");
    ok(&["report", &path, "--quick", "-o", &page]);
    let data = &report::recordings(&std::fs::read_to_string(&page).unwrap())[0];
    assert_eq!(data["growth"]["sentence"], json["growth"]["sentence"]);
    assert_eq!(data["growth"]["live"], json["growth"]["live_at_ends"]);
    assert_eq!(data["growth"]["rows"][0][4], "job.py:12 step");
}

#[test]
fn the_steps_that_fit_are_counted_if_the_memory_is_known() {
    let folder = Folder::new("growth-left");
    let path = leak(&folder, 12);
    let json = ok(&["advise", &path, "--quick", "--json", "--total-memory", "1GiB"]).json();
    // 390 MiB are live at the peak of the last step.
    assert_eq!(json["growth"]["steps_left"], 52);
    let sentence = json["sentence"].as_str().unwrap();
    assert!(
        sentence.contains("At this rate, at most 52 more steps fit under the limit. "),
        "{sentence}"
    );
    // No request failed when the recording was made.
    let json = ok(&["advise", &path, "--quick", "--json", "--total-memory", "320MiB"]).json();
    let sentence = json["growth"]["sentence"].as_str().unwrap();
    assert!(sentence.contains(" steps before a request fails under the limit: "), "{sentence}");
}

#[test]
fn a_steady_program_has_no_section_about_growth() {
    let folder = Folder::new("growth-none");
    let path = leak(&folder, 0);
    let text = ok(&["advise", &path, "--quick"]).stdout;
    assert!(!text.contains("grow") && !text.contains("a step"), "{text}");
    let json = ok(&["advise", &path, "--quick", "--json"]).json();
    assert_eq!(
        (&json["growth"]["steps"], &json["growth"]["is_growing"]),
        (&20.into(), &false.into())
    );
    assert_ne!(json["headline"], "growth");
}
