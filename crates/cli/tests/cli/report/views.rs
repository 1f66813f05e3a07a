//! The views of a page in a browser: ranges, steps, temporary blocks, comparisons, and what a reader keeps.

use stratalloc_analysis::lives::{Block, Lives};
use stratalloc_analysis::{Memory, lives_of};
use stratalloc_recording::{Limits, reader};

use super::super::advise::recording_that_begins_late;
use super::super::*;
use super::browser::{USUAL, Window, awaited, chromium, opened};
use super::made;
use crate::common::prelude::*;

const VIEWS: &str = include_str!("views.js");

/// The windows: each width with one of the two colour schemes; in a full run, with both.
fn windows() -> Vec<Window> {
    let all = [(390, true), (1440, false), (2560, true), (390, false), (1440, true), (2560, false)];
    let few = if runs(1) == 1 { 3 } else { all.len() };
    all[..few].iter().map(|&(width, is_dark)| Window { width, is_dark }).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Checks what must hold for the views of every recording.
fn is_well(json: &Value) {
    assert_eq!(json["problems"], serde_json::json!([]), "{json:#}");
    for seen in list(&json["recordings"]) {
        for name in ["barriers", "poorRows", "tooWide"] {
            assert_eq!(seen[name], serde_json::json!([]), "{name}: {}", seen["name"]);
        }
        assert_eq!(seen["links"], true, "{}", seen["name"]);
        let ranges = list(&seen["ranges"]);
        for range in ranges.iter().filter(|range| range["isGone"].is_null()) {
            assert!(range["isPressed"] == true && range["isByCategory"] == true, "{range:#}");
            let rows = range["rows"].as_u64().expect("a number");
            assert_eq!(range["blocks"] == 0, rows == 0, "{range:#}");
            assert!(range["csv"].as_u64() >= Some(rows + 2), "{range:#}");
            let text = range["text"].as_str().expect("a text");
            assert!(text.contains(" between event ") && text.contains("live bytes "), "{text}");
        }
        if let Some(last) = ranges.last() {
            assert_eq!(last["isGone"], true, "{last:#}");
        }
        for compared in list(&seen["compared"]) {
            let is_good = ["isSum", "isShown", "csv"].iter().all(|name| compared[name] == true);
            assert!(is_good, "{compared:#}");
        }
        let kept = &seen["kept"];
        for picture in list(&kept["pictures"]) {
            assert!(picture["isXml"] == true && picture["scripts"] == 0, "{picture:#}");
            assert!(picture["parts"].as_u64() > Some(4), "{picture:#}");
            assert!(picture["colours"].as_u64() > Some(3), "{picture:#}");
        }
        assert_eq!(kept["formula"], "'=1+1,\"\"\"\",-5,\"a,b\nc\"\r\n");
        assert_eq!(kept["answer"]["trace"], seen["name"]);
        let files = list(&kept["files"]);
        let is_kind = |kind: &str| files.iter().any(|file| file[0] == kind);
        let kinds = ["image/svg+xml", "text/csv", "application/json"];
        assert!(kinds.iter().all(|kind| is_kind(kind)), "{kept:#}");
        let address = &seen["address"];
        if !address.is_null() {
            assert_eq!(address["restored"], address["wanted"], "{address:#}");
            assert_eq!(address["isShown"], true, "{address:#}");
            let refused = serde_json::json!(
                {"zoom": [0, 1], "range": null, "by": "state", "holders": "0"}
            );
            assert_eq!(address["refused"], refused, "{address:#}");
        }
    }
}

#[test]
fn every_control_of_the_views_works_narrow_and_wide_light_and_dark() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("views");
    let page = folder.path("page.html");
    let files = [
        trace("unet.frac045"),
        folder.file("late.json", &recording_that_begins_late()),
        super::super::growth::leak(&folder, 12),
        folder.file("hostile.json", &made::hostile()),
        folder.file("no_history.json", &made::without_history()),
    ];
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    ok(&[&["report", "--quick", "-o", &page][..], &files].concat());
    for window in windows() {
        let json = opened(&browser, &folder, &page, window, VIEWS);
        is_well(&json);
        let seen = list(&json["recordings"]);
        let of = |name: &str| seen.iter().find(|seen| seen["name"] == name).expect("it is shown");
        let leak = of("kept-12");
        let (steps, first) = (&leak["steps"], &leak["steps"]["first"]);
        assert_eq!((&steps["count"], &steps["csv"]), (&20.into(), &22.into()), "{steps:#}");
        assert!(steps["holders"] == "range" && first["isDrawn"] == true, "{steps:#}");
        assert!(
            first["text"].as_str().is_some_and(|text| text.contains("(+12.0 MiB)")),
            "{steps:#}"
        );
        let growth = steps["growth"].as_str().expect("a text");
        assert!(growth.contains("job.py:12 step") && growth.contains("1 block a step"), "{growth}");
        let temporary = &leak["temporary"];
        let text = temporary["text"].as_str().expect("a text");
        assert!(text.starts_with("In 20 steps, 40 of 60 blocks were freed"), "{text}");
        assert_eq!(temporary["isWhole"], true, "{temporary:#}");
        assert!(temporary["first"][0].as_str().is_some_and(|row| row.contains("2,000 MiB")));
        let compared = list(&of("unet.frac045")["compared"]);
        let with = |other: &'static str| compared.iter().filter(move |one| one["other"] == other);
        assert!(with("0").all(|one| one["isCanvas"] == false && one["needs"] == ""));
        assert!(with("2").all(|one| one["isCanvas"] == true), "{compared:#?}");
        assert!(
            with("2").all(|one| one["needs"].as_str().is_some_and(|n| n.contains("as recorded")))
        );
        assert!(of("no_history")["steps"].is_null() && of("no_history")["temporary"].is_null());
    }
}

/// Returns the bytes and blocks of a range, from the lifetimes.
fn bytes_of_range(lives: &Lives, from: u32, to: u32, way: &str) -> (u64, u64) {
    let is_in = |block: &&Block| match way {
        "allocated" => from < block.born && block.born <= to,
        "freed" => from < block.freed && block.freed <= to,
        _ => block.born <= from && to < block.freed,
    };
    let found = lives.blocks.iter().filter(is_in);
    found.fold((0, 0), |sum, block| (sum.0 + block.requested_bytes, sum.1 + 1))
}

#[test]
fn the_holders_of_a_range_are_the_blocks_that_the_events_allocate_and_free_in_it() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("ranges");
    let page = folder.path("page.html");
    let names = ["serve.default", "multistream.expandable", "2.15.0.gcfrac"];
    let paths = names.map(trace);
    ok(&["report", "--quick", &paths[0], &paths[1], &paths[2], "-o", &page]);
    let json = opened(&browser, &folder, &page, USUAL, VIEWS);
    is_well(&json);
    for (path, seen) in paths.iter().zip(list(&json["recordings"])) {
        let read = reader::read(path.as_ref(), &Limits::default()).expect("it is a recording");
        let config =
            stratalloc::config::Config::parse(&read.conf, &stratalloc::registry::key_table());
        let lives = lives_of(&read, config.ok().as_ref(), &Memory::default(), 8);
        let ranges = list(&seen["ranges"]).iter().filter(|range| range["way"].is_string());
        let mut count = 0;
        for range in ranges {
            let moment = |at: usize| u32::try_from(range["range"][at].as_u64().unwrap()).unwrap();
            let way = range["way"].as_str().unwrap();
            let expected = bytes_of_range(&lives, moment(0), moment(1), way);
            let found = (range["bytes"].as_u64().unwrap(), range["blocks"].as_u64().unwrap());
            assert_eq!(found, expected, "{path}: {range:#}");
            assert_eq!(range["missing"], "");
            count += 1;
        }
        assert_eq!(count, 9, "{path}");
    }
}

#[test]
fn a_range_of_a_large_recording_states_which_blocks_are_missing() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("large-range");
    let page = folder.path("page.html");
    ok(&["report", "--quick", "-o", &page, &trace("2.15.0.gcfrac")]);
    let script = "const { recording } = state; const seen = { width: innerWidth, dark: isDark(), problems };\
        recording.moments = [0, recording.events]; chooseHolders('range'); chooseRange(1, recording.events - 1); seen.allocated = byId('holders-missing').textContent;\
        state.rangeWay = 'lived'; drawHolders(); seen.lived = byId('holders-missing').textContent;\
        chooseRange(0, recording.events); seen.whole = byId('holders-missing').textContent;\
        parent.postMessage('RESULT' + JSON.stringify(seen) + 'TLUSER', '*');";
    let json = opened(&browser, &folder, &page, USUAL, script);
    assert_eq!(json["problems"], serde_json::json!([]));
    let text = |name: &str| json[name].as_str().expect("a text").to_owned();
    assert!(text("allocated").contains("The others are missing here."), "{json:#}");
    assert!(text("lived").contains("The others are missing here."), "{json:#}");
    assert!(text("whole").contains("Small blocks that the page draws together"), "{json:#}");
}

/// Runs only if `STRATALLOC_AXE` is the path of axe-core's script.
#[test]
fn axe_finds_no_barrier() {
    let (Some(browser), Some(axe)) = (chromium(), std::env::var_os("STRATALLOC_AXE")) else {
        eprintln!("skipped: no Chromium, or STRATALLOC_AXE is not set");
        return;
    };
    let axe = std::fs::read_to_string(axe).expect("axe-core can be read");
    let folder = Folder::new("axe");
    let page = folder.path("page.html");
    let files = [
        trace("unet.frac045"),
        super::super::growth::leak(&folder, 12),
        folder.file("hostile.json", &made::hostile()),
        folder.file("late.json", &recording_that_begins_late()),
    ];
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    ok(&[&["report", "--quick", "-o", &page][..], &files].concat());
    let script = format!("{axe}</script><script>{}", include_str!("axe.js"));
    for window in windows() {
        let json = awaited(&browser, &folder, &page, window, &script);
        assert_eq!(json["problems"], serde_json::json!([]), "{json:#}");
        assert_eq!(json["violations"], serde_json::json!([]), "{json:#}");
    }
}
