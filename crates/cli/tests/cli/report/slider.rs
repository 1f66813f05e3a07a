//! The slider of a page in a browser: at each moment the map is the layout of a replay that ends there.

use stratalloc_recording::{self, Limits, TraceEvent, reader};

use super::super::*;
use super::browser::{USUAL, chromium, opened};
use crate::common::prelude::*;

/// A segment of a map: address, size and parts. A part has an address, a size, a state and the requested
/// bytes.
type Shown = (u64, u64, Vec<(u64, u64, String, u64)>);

fn number(hexadecimal: &Value) -> u64 {
    let text = hexadecimal.as_str().expect("an address");
    u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a number")
}

fn shown(segments: &Value) -> Vec<Shown> {
    let bytes = |value: &Value| value.as_u64().expect("bytes");
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let part = |part: &Value| {
        let state = part[2].as_str().expect("a state").to_owned();
        (number(&part[0]), bytes(&part[1]), state, bytes(&part[3]))
    };
    let segment = |segment: &Value| {
        let parts = list(&segment[2]).iter().map(part).collect();
        (number(&segment[0]), bytes(&segment[1]), parts)
    };
    let mut segments: Vec<Shown> = list(segments).iter().map(segment).collect();
    segments.sort_unstable();
    segments
}

/// Returns the layout of the allocator after an exact replay of the first `moment` events.
fn replayed(name: &str, moment: usize) -> Vec<Shown> {
    let mut trace = reader::read(trace(name).as_ref(), &Limits::default()).expect("it is sound");
    trace.torch = Some(trace.torch_version());
    trace.events.truncate(moment);
    trace.segments.clear();
    let config = Config::parse(&trace.conf, &registry::key_table()).expect("it is valid");
    let found = stratalloc_recording::verify(&trace, &trace.as_recorded(config), 80 * GIB, None);
    let found = found.expect("it can be replayed");
    assert_eq!(found.address_mismatches + found.segment_mismatches, 0, "{name} at {moment}");
    let segments = found.layout.iter().map(|segment| {
        let parts = segment.blocks.iter().map(|block| {
            let (state, requested) = match block.state {
                BlockStateName::ActiveAllocated => ("live", block.requested_bytes),
                BlockStateName::ActivePendingFree => ("waiting", block.requested_bytes),
                _ => ("free", 0),
            };
            (block.address, block.size_bytes, state.to_owned(), requested)
        });
        (segment.address, segment.size_bytes, parts.collect())
    });
    let mut segments: Vec<Shown> = segments.collect();
    segments.sort_unstable();
    segments
}

/// Returns the number that follows a word in the text.
fn behind(text: &str, word: &str) -> usize {
    let (_, rest) = text.split_once(word).unwrap_or_else(|| panic!("{word}: {text}"));
    let digits: String = rest
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == ',')
        .filter(|c| *c != ',')
        .collect();
    digits.parse().unwrap_or_else(|_| panic!("{word}: {text}"))
}

#[test]
fn the_slider_shows_the_layout_of_each_moment_and_blocks_their_neighbours() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("slider");
    let page = folder.path("page.html");
    let names = ["unet.expandable", "multistream.expandable"];
    let [first, second] = names.map(trace);
    ok(&["report", "--quick", &first, &second, "-o", &page]);
    let json = opened(&browser, &folder, &page, USUAL, include_str!("slider.js"));
    assert_eq!(json["problems"], serde_json::json!([]));
    let (mut waiting, mut unmapped) = (0, 0);
    for (name, seen) in names.iter().zip(json["recordings"].as_array().unwrap()) {
        let events = reader::read(trace(name).as_ref(), &Limits::default()).unwrap().events;
        assert_eq!(
            (seen["name"].as_str(), seen["max"].as_str()),
            (Some(*name), Some(&*events.len().to_string()))
        );
        for at in seen["shown"].as_array().unwrap() {
            let moment = usize::try_from(at["moment"].as_u64().unwrap()).unwrap();
            assert_eq!(at["value"], moment.to_string());
            for text in ["label", "sums"] {
                assert_eq!(behind(at[text].as_str().unwrap(), "event "), moment, "{name}");
            }
            let (shown, expected) = (shown(&at["segments"]), replayed(name, moment));
            assert!(shown.len() > 1, "{name} at {moment}");
            assert_eq!(shown, expected, "{name} at {moment}");
            waiting += shown.iter().flat_map(|s| &s.2).filter(|part| part.2 == "waiting").count();
            unmapped += at["unmapped"].as_u64().unwrap();
            assert_eq!(at["isCovered"], true, "{name} at {moment}");
        }
        let few = &seen["few"];
        let missing = few["missing"].as_str().unwrap();
        assert!(few["isSecond"] == true && few["max"] == "2", "{few:#}");
        assert!(missing.starts_with("The recording is large: 3 of "), "{missing}");
        let used = &seen["blocks"];
        assert_eq!(used["largest"].as_array().map(Vec::len), Some(10), "{used:#}");
        assert!(used["isKept"] == true && used["second"]["isFocused"] == true, "{used:#}");
        let text = used["second"]["text"].as_str().unwrap();
        let address = number(&used["second"]["address"]);
        let is = |event: &TraceEvent, action| event.action == action && event.address == address;
        let allocated = behind(text, "allocated at event ");
        assert!(is(&events[allocated - 1], Action::Alloc), "{text}");
        let freed = events[allocated..].iter().position(|event| is(event, Action::FreeRequested));
        match freed {
            Some(at) => assert_eq!(behind(text, "freed at event "), allocated + at + 1, "{text}"),
            None => assert!(text.contains("not freed in the recording"), "{text}"),
        }
        // The first block has no left neighbour; the row behind it in the table is its right neighbour.
        let first = used["first"]["text"].as_str().unwrap();
        assert!(
            first.contains("left neighbour: none (edge of the segment); right neighbour: "),
            "{first}"
        );
        let right =
            &used["first"]["rows"][usize::try_from(used["chosen"].as_u64().unwrap()).unwrap() + 1];
        let right = format!("right neighbour: {}", right[1].as_str().unwrap());
        assert!(first.contains(&right), "{right}: {first}");
    }
    assert!(waiting > 0 && unmapped > 0, "{waiting} {unmapped}");
}
