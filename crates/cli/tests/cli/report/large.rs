//! A recording of four million events. The test runs only if `STRATALLOC_LARGE` is set, because it takes
//! a minute and a gigabyte of disk space.

use std::io::{BufWriter, Write};
use std::time::Instant;

use super::super::*;
use super::{browser, recordings};

/// Writes the allocations and frees of a program that runs in steps. Some blocks live long, most only
/// for a few requests. One request in the middle fails, and the peak lasts for one event only; the page
/// must show both.
fn write_recording(path: &str, events: u64) -> std::io::Result<()> {
    let mut file = BufWriter::new(std::fs::File::create(path)?);
    let (base, slots) = (1_u64 << 44, 4096_u64);
    let slot_bytes = 2_u64 << 20;
    write!(file, r#"{{"device_traces":[["#)?;
    let mut time = 1_700_000_000_000_000_u64;
    let mut count = 0;
    let mut line = |action: &str, address: u64, size: u64, frames: &str| -> std::io::Result<()> {
        time += 3;
        count += 1;
        let comma = if count > 1 { "," } else { "" };
        let place = if action == "oom" { "device_free" } else { "addr" };
        write!(
            file,
            r#"{comma}{{"action":"{action}","{place}":{address},"size":{size},"stream":{},"time_us":{time},"compile_context":"N/A","user_metadata":""{frames}}}"#,
            address / slot_bytes % 4,
        )
    };
    for slot in 0..slots {
        line("segment_alloc", base + slot * slot_bytes, slot_bytes, "")?;
    }
    let mut live = vec![0_u64; usize::try_from(slots).expect("few")];
    let mut random = 88_172_645_463_325_252_u64;
    let mut done = slots;
    while done < events {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let slot = random % slots;
        let address = base + slot * slot_bytes;
        let lives = &mut live[usize::try_from(slot).expect("few")];
        if *lives > 0 {
            line("free_requested", address, *lives, "")?;
            line("free_completed", address, *lives, "")?;
            *lives = 0;
            done += 2;
        } else {
            *lives = 512 * (1 + random / 4096 % 2048);
            let frames = format!(
                r#","frames":[{{"filename":"train.py","name":"step_{}","line":{}}},{{"filename":"train.py","name":"main","line":9}}]"#,
                random / 65_536 % 40,
                random / 65_536 % 300
            );
            line("alloc", address, *lives, &frames)?;
            done += 1;
        }
        if done / 3 == events / 6 {
            let far = base + (slots + 8) * slot_bytes;
            line("segment_alloc", far, 3 << 30, "")?;
            line("alloc", far, 3 << 30, "")?;
            line("free_requested", far, 3 << 30, "")?;
            line("free_completed", far, 3 << 30, "")?;
            line("segment_free", far, 3 << 30, "")?;
            line("oom", 77, 9 << 30, "")?;
            done += 6;
        }
    }
    write!(file, r#"]],"segments":["#)?;
    for (slot, size) in (0..).zip(&live) {
        let comma = if slot > 0 { "," } else { "" };
        let block = |size: u64, state: &str| {
            format!(r#"{{"size":{size},"requested_size":{size},"state":"{state}"}}"#)
        };
        let free = block(slot_bytes - size, "inactive");
        let blocks = if *size > 0 { block(*size, "active_allocated") + "," + &free } else { free };
        write!(
            file,
            r#"{comma}{{"address":{},"total_size":{slot_bytes},"stream":{},"segment_type":"small","segment_pool_id":[0,0],"is_expandable":false,"blocks":[{blocks}]}}"#,
            base + slot * slot_bytes,
            (base / slot_bytes + slot) % 4,
        )?;
    }
    write!(file, "]}}")?;
    file.flush()
}

/// Returns the peak resident memory of a process in bytes.
fn most_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[test]
fn four_million_events_make_a_page_in_bounded_time_and_memory() {
    if std::env::var_os("STRATALLOC_LARGE").is_none() {
        eprintln!("skipped: STRATALLOC_LARGE is not set");
        return;
    }
    let folder = Folder::new("large");
    let (file, page) = (folder.path("large.json"), folder.path("page.html"));
    write_recording(&file, 4_300_000).expect("there is room on the disk");
    let file_bytes = std::fs::metadata(&file).expect("it is there").len();
    let begin = Instant::now();
    let mut child = stratalloc()
        .args(["report", &file, "-o", &page, "--quick", "--seconds", "5"])
        .spawn()
        .expect("it runs");
    let mut most = 0;
    let status = loop {
        most = most_bytes(child.id()).unwrap_or(0).max(most);
        if let Some(status) = child.try_wait().expect("it is ours") {
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let seconds = begin.elapsed().as_secs_f64();
    assert_eq!(status.code(), Some(0));
    let text_of_page = std::fs::read_to_string(&page).expect("it was written");
    eprintln!(
        "{} MB in {seconds:.1} s and {} MiB; the page has {} bytes",
        file_bytes / 1_000_000,
        most >> 20,
        text_of_page.len()
    );
    // 10 MB, and 10 bytes for each event after the first million.
    assert!(text_of_page.len() <= 43_000_000 && most < 1_500_000_000);
    assert!(seconds < 30.0 || cfg!(debug_assertions), "{seconds:.1} s");
    let data = &recordings(&text_of_page)[0];
    assert_eq!((&data["moments"], &data["layers"]["series"]), (&Value::Null, &Value::Null));
    assert_eq!(data["peak_reserved"]["bytes"], (8_u64 << 30) + (3 << 30));
    assert_eq!(data["failures"]["total"], 1);
    assert!(data["advice"]["sentence"].as_str().is_some_and(|text| text.contains("Time ran out")));
    let Some(program) = browser::chromium() else { return };
    let json = browser::used(&program, &folder, &page, browser::USUAL);
    eprintln!("load {} ms, {}", json["load"], json["recordings"][0]["answers"]);
    browser::is_well(&json);
}
