//! Several devices in one recording, and several ranks: which one is first, and the line that compares them.

use super::made::{MIB, Made};
use super::*;

/// Returns one recording with these devices.
fn process(devices: &[Made]) -> String {
    let mut segments = Vec::new();
    let mut traces = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let mut one: Value = device.json().parse().expect("it is JSON");
        for mut segment in one["segments"].as_array().expect("a list").clone() {
            segment["device"] = number.into();
            segments.push(segment);
        }
        traces.push(one["device_traces"][0].take());
    }
    serde_json::json!({"segments": segments, "device_traces": traces}).to_string()
}

/// Returns a device with so many segments of 20 MiB, each with one block of 18 MiB.
fn device(segments: u64) -> Made {
    let mut made = Made::default();
    for at in 0..segments {
        let address = (1 << 40) + (at << 32);
        made.segment(address, 20 * MIB);
        made.alloc(address, 18 * MIB);
    }
    made
}

fn objects(ended: &Ended) -> Vec<Value> {
    let objects = serde_json::Deserializer::from_str(&ended.stdout).into_iter();
    objects.map(|one| one.expect("each line is JSON")).collect()
}

/// Returns the devices of an answer in their order.
fn order(answer: &Value) -> Vec<u64> {
    let devices = answer["devices"].as_array().expect("a list").iter();
    devices.map(|one| one["device"].as_u64().expect("a number")).collect()
}

#[test]
fn the_device_that_failed_is_first_in_every_view() {
    let file = &case("two_devices_second_fails");
    let compared = "2 devices; requests failed on device 1 only. Peaks of reserved and of live bytes: \
                    device 1 20,000 and 20,000 MiB, 1 request failed; device 0 420 and 403 MiB.";
    let advice = ok(&["advise", "--quick", file]).stdout;
    assert!(
        advice.starts_with("2 devices; requests failed on device 1 only.\ndevice  "),
        "{advice}"
    );
    let first = advice.split("\n\n").nth(1).expect("the table is first");
    assert!(first.starts_with("two_devices_second_fails device 1\n"), "{advice}");
    assert_eq!(advice.matches("2 devices; ").count(), 1, "{advice}");
    let answers = objects(&ok(&["advise", "--quick", "--json", file]));
    assert_eq!(answers.iter().map(|one| one["device"].clone()).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(order(&answers[0]), [1, 0]);
    assert_eq!(answers[1]["devices"], answers[0]["devices"]);
    assert_eq!(answers[0]["devices_sentence"], compared);
    for args in [&["compare"][..], &["replay"]] {
        let ended = ok(&[args, &[file]].concat());
        assert!(ended.stdout.starts_with("two_devices_second_fails device 1"), "{}", ended.stdout);
        assert!(ended.stderr.contains(compared), "{}", ended.stderr);
    }
    let folder = Folder::new("devices-page");
    let page = folder.path("page.html");
    ok(&["report", "--quick", "-o", &page, file]);
    let sheets = report::recordings(&std::fs::read_to_string(&page).unwrap());
    assert_eq!(sheets.iter().map(|one| one["device"].clone()).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(sheets[0]["devices_sentence"], compared);
    for args in
        [&["sweep", "--quick", file][..], &["diff", file, file], &["replay", "--at", "10", file]]
    {
        let ended = ok(args);
        assert!(!ended.stdout.contains("420"), "{}", ended.stdout);
    }
    let one = ok(&["advise", "--quick", "--recorded-device", "0", file]);
    assert!(one.stdout.starts_with("two_devices_second_fails\n"), "{}", one.stdout);
}

#[test]
fn without_a_failure_the_device_with_the_most_reserved_bytes_is_first() {
    let mut busy = device(2);
    (0..50).for_each(|_| {
        busy.alloc((1 << 40) + 18 * MIB, MIB);
        busy.free((1 << 40) + 18 * MIB, MIB);
    });
    let folder = Folder::new("three-devices");
    let file = folder.file("three.json", &process(&[busy, device(1), device(7)]));
    let answers = objects(&ok(&["advise", "--quick", "--json", &file]));
    assert_eq!(order(&answers[0]), [2, 0, 1]);
    assert_eq!(answers[0]["trace"], "three device 2");
    let sentence = answers[0]["devices_sentence"].as_str().unwrap();
    assert_eq!(
        sentence,
        "3 devices. Peaks of reserved and of live bytes: device 2 140 and 126 MiB; device 0 40.0 and 37.0 MiB; \
         device 1 20.0 and 18.0 MiB."
    );
    // Another device of the same program may be the one with the most memory.
    let other = folder.file("other.json", &process(&[device(1), device(7), device(2)]));
    let diff = ok(&["diff", &file, &other]);
    assert!(diff.stdout.contains("Nothing differs"), "{}", diff.stdout);
    assert!(diff.stderr.contains("Device 1 is taken"), "{}", diff.stderr);
}

#[test]
fn a_device_with_memory_and_without_events_is_listed_last() {
    let mut silent = device(9);
    silent.forget_entries();
    let folder = Folder::new("silent-device");
    let file = folder.file("job.json", &process(&[silent, device(3)]));
    let advice = ok(&["advise", "--quick", &file]).stdout;
    assert!(advice.contains("180 MiB       162 MiB       0  at the end, no events\n"), "{advice}");
    let of = |number| advice.find(&format!("job device {number}\n")).expect("it is shown");
    assert!(of(1) < of(0) && advice[of(0)..].contains("has no history"), "{advice}");
    // Commands that need events leave it out.
    let compare = ok(&["compare", &file]);
    assert!(!compare.stdout.contains("device 0"), "{}", compare.stdout);
    ok(&["advise", "--quick", "--fits", "1GiB", &file]);
}

#[test]
fn a_device_with_one_event_beside_one_with_many_is_no_ring_of_one_entry() {
    let mut late = device(9);
    late.forget_entries();
    late.alloc((1 << 40) + 18 * MIB, MIB);
    let folder = Folder::new("device-of-one-event");
    let file = folder.file("job.json", &process(&[late, device(3)]));
    let advice = ok(&["advise", "--quick", &file]).stdout;
    // One event shows no peak, although its device has the most memory.
    assert!(advice.contains("180 MiB       163 MiB       0  at the end, no history\n"), "{advice}");
    let of = |number| advice.find(&format!("job device {number}\n")).expect("it is shown");
    let reason = "has no history of this device (1 event, and 6 of another):";
    assert!(of(1) < of(0) && advice[of(0)..].contains(reason), "{advice}");
    assert!(
        advice.contains("Start the recording before the program uses this device."),
        "{advice}"
    );
    let alone = ok(&["advise", "--quick", "--recorded-device", "0", &file]).stdout;
    assert!(alone.contains(reason), "{alone}");
}

#[test]
fn the_rank_that_failed_first_is_named_first() {
    let folder = Folder::new("ranks");
    let rank = |at: u64, fails_after: Option<u64>| {
        let mut made = device(3);
        if let Some(entries) = fails_after {
            (0..entries).for_each(|_| made.entry("snapshot", 0, 0));
            made.out_of_memory(64 * MIB, MIB);
            made.at_line(7);
        }
        folder.file(&format!("rank{at}.json"), &made.json())
    };
    let equal = [rank(0, None), rank(1, None)];
    let of = |files: &[String]| {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        run(&[&["sweep", "--quick"][..], &files].concat()).stdout
    };
    let stdout = of(&equal);
    assert!(
        stdout.starts_with("The peak of reserved bytes is 60.0 MiB in all 2 recordings.\n"),
        "{stdout}"
    );
    let larger = folder.file("rank2.json", &device(5).json());
    let stdout = of(&[equal[0].clone(), larger.clone()]);
    let peaks = format!(
        "The peaks of reserved bytes are from 60.0 MiB ({}) to 100 MiB ({larger}).\n",
        equal[0]
    );
    assert!(stdout.starts_with(&peaks), "{stdout}");
    let failing = [rank(3, Some(9)), rank(4, Some(4))];
    let stdout = of(&[equal[0].clone(), failing[0].clone(), failing[1].clone(), larger]);
    let first = format!("{} failed first (1 request, with 60.0 MiB reserved at most)", failing[1]);
    assert!(stdout.starts_with(&first), "{stdout}");
    assert!(stdout.contains(". 2 of 4 recordings had requests that failed. "), "{stdout}");
}
