//! `report`: the page as a file, and in a browser.

mod browser;
mod drawn;
mod large;
mod made;
mod slider;
mod views;

use super::*;

pub(super) use made::{without_first, without_history};

/// Returns the data of the recordings on a page, from its script elements.
pub(super) fn recordings(page: &str) -> Vec<Value> {
    let parts = page.split("<script type=\"application/json\" class=\"recording\">").skip(1);
    let parts = parts.map(|part| part.split_once("</script>").expect("it ends").0);
    parts.map(|json| serde_json::from_str(json).expect("it is JSON")).collect()
}

fn written(args: &[&str], page: &str) -> String {
    let stdout = ok(args).stdout;
    assert!(stdout.contains(page) && stdout.lines().count() == 1, "{stdout}");
    std::fs::read_to_string(page).expect("it was written")
}

#[test]
fn a_page_has_its_panels_its_data_and_no_address_to_ask() {
    let folder = Folder::new("report");
    let out = folder.path("out.html");
    let path = &trace("multistream.default");
    let conf = "expandable_segments:True,roundup_power2_divisions:4";
    let page = written(&["report", path, "--quick", "--conf", conf, "-o", &out], &out);
    for id in ["timeline", "segments", "holders", "needs", "advice"] {
        assert_eq!(page.matches(&format!("<section id=\"{id}\"")).count(), 1, "{id}");
    }
    assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("src="));
    assert!(page.contains("default-src 'none'") && page.len() < 10_000_000);
    assert!(page.contains("\"format\":\"stratalloc report\",\"version\":4"));
    let [data] = &recordings(&page)[..] else { panic!("one recording") };
    assert_eq!(data["peak_reserved"]["bytes"], 2_187_329_536_u64);
    assert_eq!(data["moments"], Value::Null);
    let rows = data["needs"]["rows"].as_array().unwrap();
    assert!(
        rows.iter().any(|row| row["conf"] == conf)
            && rows.iter().any(|row| row["recorded"] == true)
    );
    // The page must have the same sentences as the output of `advise`.
    let advise = run(&["advise", path, "--quick", "--json"]).json();
    assert_eq!(data["advice"]["sentence"], advise["sentence"]);
    assert_eq!(data["advice"]["unknown"], advise["not_shown"]);
    let (pictures, causes) = (&data["advice"]["pictures"], &advise["causes"]);
    assert_eq!(pictures[0]["sentence"], causes["why"]);
    assert_eq!(pictures[1]["sentence"], causes["peak_reserved"]["why"]);
    assert_eq!(causes["requested_bytes"], data["peak_live"]["bytes"]);
    assert_eq!(causes["peak_reserved"]["reserved_bytes"], data["peak_reserved"]["bytes"]);
    let leftovers = std::fs::read_dir(folder.path("")).unwrap().count();
    assert_eq!(leftovers, 1, "nothing but the page");
}

#[test]
fn the_page_begins_with_the_code_that_holds_most_and_the_peak_without_it() {
    let folder = Folder::new("report-headline");
    let late = folder.file("late.json", &super::advise::recording_that_begins_late());
    let out = folder.path("out.html");
    let page = written(&["report", &late, "--quick", "-o", &out], &out);
    let data = &recordings(&page)[0];
    let headline = |name: &str| data["headline"][name].as_str().unwrap_or_default().to_owned();
    let (memory, code) = (headline("memory"), headline("code"));
    assert!(
        memory.contains("softmax, called by model.py:432 attention holds most: 72.0 MiB"),
        "{memory}"
    );
    assert!(memory.contains("80.0 MiB") && memory.contains("before the recording"), "{memory}");
    assert!(code.contains("would be 140 MiB instead of 212 MiB (34 % less)"), "{code}");
    assert!(code.contains("scaled_dot_product_attention"), "{code}");
    assert!(code.contains("the program's function attention holds 72.0 MiB (34 %)"), "{code}");
    let mib = |mib: u64| mib << 20;
    let categories = data["holders"][0]["categories"].as_array().unwrap();
    let categories: Vec<_> = categories
        .iter()
        .map(|row| (row["category"].as_str().unwrap(), &row["requested_bytes"], &row["blocks"]))
        .collect();
    let before = "unknown: lived before the recording began";
    let expected = [("activations", mib(132), 24), (before, mib(80), 2)];
    let expected =
        expected.map(|(name, bytes, blocks)| (name, Value::from(bytes), Value::from(blocks)));
    assert!(expected.iter().map(|(name, bytes, blocks)| (*name, bytes, blocks)).eq(categories));
    assert_eq!(
        data["holders"][0]["categories_sentence"],
        "The category of 80.0 MiB (38 %) is not known."
    );
    // The rows must have the same names as in `advise`.
    let advise = run(&["advise", &late, "--quick", "--json"]).json();
    let rows = advise["holders"]["by_stack"].as_array().unwrap();
    let list = data["holders"][0]["list"]["stack"].as_array().unwrap();
    let place = |number: &Value| number.as_u64().and_then(|number| usize::try_from(number).ok());
    let label = |stack: &Value| {
        let caller = &data["stacks"]["caller"][place(stack)?];
        Some(data["stacks"]["callers"][place(caller)?][0].clone())
    };
    let labels: Vec<Value> = list.iter().filter_map(label).collect();
    let named = rows.iter().filter(|row| row["lived_before"] == false);
    assert_eq!(labels, named.map(|row| row["asked_for_by"].clone()).collect::<Vec<_>>());
}

#[test]
fn without_a_name_the_page_stands_beside_the_first_recording() {
    let folder = Folder::new("report-beside");
    let first = folder.file("run.pickle", &made::without_history());
    let second = folder.file("other.json", &made::without_history());
    let page = folder.path("run.html");
    written(&["report", &first, &second, "--quick"], &page);
    let ended = super::run_with(&["report", "--quick", "-"], "");
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("-o names the page"), "{}", ended.stderr);
}

#[test]
fn text_from_a_recording_is_data_and_no_markup() {
    let folder = Folder::new("report-hostile");
    let file = folder.file(&format!("a{}.json", "<img src=x>"), &made::hostile());
    let out = folder.path("out.html");
    let page = written(&["report", &file, "--quick", "-o", &out], &out);
    assert!(!page.contains("<img") && !page.contains("</script><img"));
    let data = recordings(&page);
    assert_eq!(data[0]["name"], "a<img src=x>");
    let texts = data[0]["stacks"]["texts"].as_array().unwrap();
    assert!(texts.iter().any(|text| text == made::HOSTILE), "{texts:?}");
    let owners = data[0]["account"].as_array().unwrap();
    assert_eq!(owners.len(), 2, "those of the device: {owners:?}");
    assert_eq!(owners[0]["owner"], made::HOSTILE);
}

#[test]
fn each_device_and_each_file_is_on_the_page_and_a_bad_one_stops_no_other() {
    let folder = Folder::new("report-several");
    let two = folder.file("two.json", &made::two_devices());
    let plain = folder.file("plain.json", &made::without_history());
    let (bad, out) = (folder.file("bad.json", "{}"), folder.path("out.html"));
    fails(&["report", &two, &bad, &plain, "--quick", "-o", &out], 2, "bad.json");
    let data = recordings(&std::fs::read_to_string(&out).unwrap());
    let names: Vec<&str> = data.iter().filter_map(|data| data["name"].as_str()).collect();
    assert_eq!(names, ["two device 1", "two device 0", "plain"]);
    assert!(data[2]["notes"][0].as_str().unwrap().contains("no history"), "{}", data[2]["notes"]);
}

#[test]
fn a_page_goes_over_no_recording_and_is_there_only_when_it_is_whole() {
    let folder = Folder::new("report-manners");
    let file = folder.file("keep.json", &made::without_history());
    let content = std::fs::read_to_string(&file).unwrap();
    let roundabout = folder.path("./keep.json");
    for output in [&file, &roundabout] {
        fails(&["report", &file, "-o", output], 2, "would be written over the recording");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), content);
    }
    let old = folder.file("old.html", "an older page");
    let broken = folder.file("broken.json", "{");
    fails(&["report", &broken, "-o", &old], 2, "");
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "an older page");
    ok(&["report", &file, "--quick", "-o", &old]);
    assert!(std::fs::read_to_string(&old).unwrap().starts_with("<!doctype html>"));
    let nowhere = folder.path("no/such/folder/out.html");
    fails(&["report", &file, "-o", &nowhere], 2, "no/such/folder");
    fails(&["report", &file, "-o", "x", "--format", "json"], 2, "");
    let printed = run(&["report", &file, "--quick", "-o", "-"]);
    assert!(printed.stdout.starts_with("<!doctype html>"));
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path("")).unwrap().map(|f| f.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["broken.json", "keep.json", "old.html"]);
}
