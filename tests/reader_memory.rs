//! Memory limits, measured. Readers of recordings need at most six times the decoded bytes plus a fixed
//! part. The writer of snapshots needs only a fixed part, however long the history is. Logs of requests are
//! answered in few bytes a row.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use stratalloc::allocator::{DeviceAllocator, Request};
use stratalloc::config::Config;
use stratalloc::history::{Format, RecordOptions};
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc_analysis::{Capacity, Memory, Recording, Timeline, measure};
use stratalloc_recording::reader::{Failure, Limits, MEMORY_FACTOR, read, read_bytes};
use stratalloc_recording::{Silent, Trace, TraceError};
use stratalloc_sim::{Sim, SimOptions};

/// The global allocator of this test, which counts heap bytes.
#[path = "fuzz_checks/memory.rs"]
mod memory;

/// Scales the length of the history: a full run is ten times as long.
#[path = "common/runs.rs"]
mod runs;

use memory::peak_of;

/// Memory for buffers and tables that does not depend on the file.
const FIXED_BYTES: i64 = 1 << 20;

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("no memory is that large")
}

fn assert_within(what: &str, peak: i64, decoded_bytes: u64) {
    let bound = signed(decoded_bytes * MEMORY_FACTOR);
    println!(
        "{what}: {peak} bytes at most for {decoded_bytes} decoded bytes: {:.2} times",
        peak as f64 / decoded_bytes as f64
    );
    assert!(peak <= bound + FIXED_BYTES, "{what}: {peak} bytes for {decoded_bytes} decoded");
}

fn unpacked(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).expect("a recording of this repository");
    let mut bytes = Vec::new();
    lzma_rust2::XzReader::new(file, true).read_to_end(&mut bytes).expect("a whole recording");
    bytes
}

#[test]
fn recordings_take_less_than_six_times_their_decoded_bytes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.display().to_string();
        if !name.ends_with(".pickle.xz") {
            continue;
        }
        seen += 1;
        let decoded = unpacked(&path);
        let decoded_bytes = decoded.len() as u64;
        let limits = Limits::default();
        let (trace, peak) = peak_of(|| read(&path, &limits).unwrap());
        assert!(!trace.events.is_empty());
        assert!(!trace.segments.is_empty());
        assert_within(&name, peak, decoded_bytes);
        // The limit must hold here even without the fixed part.
        assert!(peak < signed(decoded_bytes * MEMORY_FACTOR));

        let (plain, peak) =
            peak_of(|| read_bytes("plain", decoded.as_slice(), &limits, None).unwrap());
        assert_eq!(plain, trace);
        assert_within("the same, not compressed", peak, decoded_bytes);
    }
    assert_eq!(seen, 19);
}

fn failure(result: &Result<Trace, TraceError>) -> Option<&Failure> {
    result.as_ref().err().map(|error| &error.failure)
}

fn read_all(bytes: &[u8]) -> (Result<Trace, TraceError>, i64) {
    peak_of(|| read_bytes("hostile", bytes, &Limits::default(), None))
}

/// Returns `head`, then `unit` repeated up to about 4 MiB, then `tail`.
fn repeated(head: &[u8], unit: &[u8], tail: &[u8]) -> Vec<u8> {
    let mut bytes = head.to_vec();
    bytes.extend(unit.repeat((4 << 20) / unit.len()));
    bytes.extend(tail);
    bytes
}

#[test]
fn many_tiny_values_stay_within_six_times() {
    let units: [(&str, &[u8]); 13] = [
        ("NONE", b"N"),
        ("NONE, POP", b"N0"),
        ("MARK", b"("),
        ("EMPTY_DICT", b"}"),
        ("EMPTY_LIST", b"]"),
        ("EMPTY_TUPLE", b")"),
        ("NONE, MEMOIZE", b"N\x94"),
        ("EMPTY_DICT, MEMOIZE", b"}\x94"),
        ("MEMOIZE", b"\x94"),
        ("NONE, APPEND", b"Na"),
        ("TUPLE1", b"\x85"),
        ("APPEND to a new list", b"]a"),
        ("empty texts", b"\x8c\x00"),
    ];
    for (what, unit) in units {
        let bytes = repeated(b"\x80\x04]", unit, b".");
        let (_, peak) = read_all(&bytes);
        assert_within(what, peak, bytes.len() as u64);
        let bytes = repeated(b"\x80\x04](", unit, b"e.");
        let (_, peak) = read_all(&bytes);
        assert_within(what, peak, bytes.len() as u64);
    }
}

#[test]
fn tiny_events_of_a_profiler_stay_within_six_times() {
    let event = |at: u32, rest: &str| format!("{{\"ts\":{at},\"pid\":1,\"tid\":1,{rest}}},");
    let memory = |at: u32| {
        let rest = "\"name\":\"[memory]\",\"args\":{\"Bytes\":1,\"Device Id\":0,\"Device Type\":1";
        event(at, &format!("{rest},\"Total Allocated\":{},\"Addr\":{}}}", at % 7, at * 2))
    };
    let call = |at: u32| {
        event(at, &format!("\"dur\":9,\"cat\":\"python_function\",\"name\":\"a({at}): f\""))
    };
    let thread =
        |at: u32| format!("{{\"ts\":1,\"dur\":1,\"cat\":\"cpu_op\",\"pid\":{at},\"tid\":1}},");
    let both = |at: u32| call(at) + &memory(at);
    let units: [(&str, &dyn Fn(u32) -> String); 4] = [
        ("events of memory", &memory),
        ("calls", &call),
        ("threads", &thread),
        ("calls and events of memory", &both),
    ];
    for (what, unit) in units {
        let body: String = (0..20_000).map(unit).collect();
        let text = format!("{{\"traceEvents\":[{body}{}]}}", memory(0).trim_end_matches(','));
        let (_, peak) = read_all(text.as_bytes());
        assert_within(what, peak, text.len() as u64);
    }
}

#[test]
fn counters_and_timelines_need_only_a_fixed_part() {
    let row = "[0,1,2,3,4,5,6,7,8],";
    let count = 200_000;
    let times = "1,".repeat(count) + "1";
    let rows = row.repeat(count) + row.trim_end_matches(',');
    let timeline = format!("[[{times}],[{rows}]]");
    let changes = format!("[{}[1,2,3,4]]", "[1,2,3,4],".repeat(count));
    let counters = format!(
        "{{\"num_alloc_retries\":1,{}\"reserved_bytes.all.peak\":1}}",
        "\"a\":{\"b\":1},".repeat(count)
    );
    for (what, text) in [("timeline", timeline), ("changes", changes), ("counters", counters)] {
        let (trace, peak) = read_all(text.as_bytes());
        assert!(trace.is_ok(), "{what}");
        assert!(peak <= FIXED_BYTES, "{what}: {peak} bytes for {} decoded", text.len());
    }
}

#[test]
fn numbers_words_and_memo_entries_stay_within_six_times() {
    let number = b"\x80\x04](\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x94";
    let bytes = repeated(number, b"h\x00", b"e.");
    let (_, peak) = read_all(&bytes);
    assert_within("one large number, many times", peak, bytes.len() as u64);

    let mut sparse = b"\x80\x04]".to_vec();
    for i in 0..500_000_u32 {
        sparse.push(b'r');
        sparse.extend(i.wrapping_mul(0x9e37_79b1).to_le_bytes());
    }
    sparse.push(b'.');
    let (_, peak) = read_all(&sparse);
    assert_within("scattered memo entries", peak, sparse.len() as u64);

    let bytes = repeated(b"\x80\x04}", b"\x8c\x04sizeNs", b".");
    let (_, peak) = read_all(&bytes);
    assert_within("one key, set again and again", peak, bytes.len() as u64);

    let mut text = b"\x80\x04X\x00\x00\x40\x00".to_vec();
    text.extend(vec![b'x'; 4 << 20]);
    text.push(b'.');
    let (_, peak) = read_all(&text);
    assert_within("a long text", peak, text.len() as u64);
}

#[test]
fn shared_events_do_not_unfold() {
    // One event, and many references to it of two bytes each.
    let mut head = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](](}\x94(".to_vec();
    head.extend(b"\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x00\x8c\x04sizeK\x01");
    head.extend(b"\x8c\x06streamK\x00u");
    let bytes = repeated(&head, b"h\x00", b"eeu.");
    let (result, peak) = read_all(&bytes);
    assert!(matches!(failure(&result), Some(Failure::Pickle { .. })), "{result:?}");
    assert_within("one event, many times", peak, bytes.len() as u64);

    let few = [head.as_slice(), b"h\x00h\x00eeu."].concat();
    assert_eq!(read_all(&few).0.unwrap().events.len(), 3);
}

#[test]
fn compressed_bombs_stop_at_the_limit() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::best());
    gz.write_all(b"\x80\x04X\xff\xff\xff\xff").unwrap();
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..64 {
        gz.write_all(&piece).unwrap();
    }
    let bomb = gz.finish().unwrap();
    let limits = Limits { decoded_bytes: 4 << 20, ..Limits::default() };
    let (result, peak) = peak_of(|| read_bytes("bomb", bomb.as_slice(), &limits, None));
    assert!(matches!(failure(&result), Some(Failure::TooLarge { .. })), "{result:?}");
    assert_within("a bomb", peak, limits.decoded_bytes);
}

#[test]
fn a_long_configuration_string_of_any_bytes_stays_within_six_times() {
    for byte in [b'x', 0x7f, 0xff] {
        let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x12allocator_settings}".to_vec();
        bytes.extend(b"\x8c\x17PYTORCH_CUDA_ALLOC_CONFX\x00\x00\x40\x00");
        bytes.extend(vec![byte; 4 << 20]);
        bytes.extend(b"su.");
        let (result, peak) = read_all(&bytes);
        assert_eq!(result.is_ok(), byte != 0xff, "{byte:#x}");
        assert_within("a long configuration string", peak, bytes.len() as u64);
    }
}

#[test]
fn a_window_of_any_size_hides_no_bomb() {
    // A zstd frame with a window and content of 64 MiB: each four bytes stand for 128 KiB.
    let mut bomb = b"\x28\xb5\x2f\xfd\x00\x80".to_vec();
    for _ in 0..511 {
        bomb.extend(b"\x02\x00\x10 ");
    }
    bomb.extend(b"\x03\x00\x10 ");
    let limits = Limits { decoded_bytes: 1 << 20, ..Limits::default() };
    let (result, peak) = peak_of(|| read_bytes("bomb", bomb.as_slice(), &limits, None));
    assert!(matches!(failure(&result), Some(Failure::TooLarge { .. })), "{result:?}");
    assert_within("a bomb behind a window", peak, limits.decoded_bytes);
}

#[test]
fn the_smallest_json_entries_stay_within_six_times() {
    let event: &[u8] = br#"{"action":"alloc","addr":0,"size":1,"stream":0},"#;
    let head = br#"{"segments":[],"device_traces":[["#;
    let last = br#"{"action":"alloc","addr":0,"size":1,"stream":0}]]}"#;
    let bytes = repeated(head, event, last);
    let (result, peak) = read_all(&bytes);
    assert!(result.unwrap().events.len() > 50_000);
    assert_within("events", peak, bytes.len() as u64);

    let segment: &[u8] = br#"{"address":0,"total_size":0,"stream":0,"blocks":[]},"#;
    let last = br#"{"address":0,"total_size":0,"stream":0,"blocks":[]}]"#;
    let bytes = repeated(b"[", segment, last);
    let (result, peak) = read_all(&bytes);
    assert!(result.unwrap().segments.len() > 50_000);
    assert_within("segments", peak, bytes.len() as u64);
}

#[test]
fn many_tiny_json_values_stay_within_six_times() {
    for unit in
        ["[],", "{},", "0,", "null,", "\"\",", "\"a\",", "[[0]],", "{\"size\":0},", "-1,", "1e9,"]
    {
        for (head, tail) in [("[", "0]"), (r#"{"segments":[],"device_traces":[["#, "0]]}")] {
            let bytes = repeated(head.as_bytes(), unit.as_bytes(), tail.as_bytes());
            let (result, peak) = read_all(&bytes);
            assert!(result.unwrap_err().to_string().len() < 1000);
            assert_within(unit, peak, bytes.len() as u64);
        }
    }
    let keys = repeated(br#"[{"size":0"#, br#","size":0"#, b"}]");
    let (_, peak) = read_all(&keys);
    assert_within("one key of JSON, set again and again", peak, keys.len() as u64);
    let text = r#"{"segments":[],"allocator_settings":{"PYTORCH_CUDA_ALLOC_CONF":""#;
    let bytes = repeated(text.as_bytes(), b"x", b"\"}}");
    let (result, peak) = read_all(&bytes);
    assert_eq!(result.unwrap().conf.len(), 4 << 20);
    assert_within("a long configuration string of JSON", peak, bytes.len() as u64);
}

/// Returns an event with these frames as JSON.
fn json_event(frames: &str) -> String {
    format!(r#"{{"action":"alloc","addr":0,"size":1,"stream":0,"frames":[{frames}]}}"#)
}

#[test]
fn stacks_stay_within_six_times_and_cost_no_event() {
    // The shortest frames that are all different, in stacks that are all different.
    let mut line = 0;
    let mut frame = || {
        line += 1;
        format!(r#"{{"line":{line}}}"#)
    };
    let mut events = Vec::new();
    for _ in 0..20_000 {
        events.push(json_event(&[frame(), frame(), frame()].join(",")));
    }
    let json = format!(r#"{{"segments":[],"device_traces":[[{}]]}}"#, events.join(","));
    let (result, peak) = read_all(json.as_bytes());
    let trace = result.unwrap();
    assert_eq!(trace.events.len(), 20_000);
    assert!(!trace.stacks.is_empty() && trace.stacks.left_out() > 0);
    assert_within("frames that differ, as JSON", peak, json.len() as u64);

    // One event and its keys. Then frames that have only a line, each in a list of its own.
    let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](]".to_vec();
    bytes.extend(b"(\x8c\x06action\x94\x8c\x05alloc\x94\x8c\x04addr\x94\x8c\x04size\x94");
    bytes.extend(b"\x8c\x06stream\x94\x8c\x06frames\x94\x8c\x04line\x940000000");
    let events = 300_000_u32;
    for line in 1..=events {
        bytes.extend(b"}(h\x00h\x01h\x02K\x00h\x03K\x01h\x04K\x00h\x05]}h\x06J");
        bytes.extend(line.to_le_bytes());
        bytes.extend(b"sau");
    }
    bytes.extend(b"eeu.");
    let (result, peak) = read_all(&bytes);
    // No real recording is that dense. The reader may refuse it for its memory, but must not exceed the
    // limit.
    match result {
        Ok(trace) => assert_eq!(trace.events.len(), events as usize),
        Err(error) => assert!(error.to_string().contains("memory"), "{error}"),
    }
    assert_within("frames that differ, pickled", peak, bytes.len() as u64);
}

#[test]
fn a_stack_that_all_events_share_is_read_once() {
    // A list with 100,000 references to one frame, and 100,000 events that refer to that list.
    let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](]".to_vec();
    bytes.extend(b"(\x8c\x06action\x94\x8c\x05alloc\x94\x8c\x04addr\x94\x8c\x04size\x94");
    bytes.extend(b"\x8c\x06stream\x94\x8c\x06frames\x94}\x94](");
    // Uses the opcode for large memo numbers, as files with more than 256 memo entries do.
    bytes.extend(b"j\x06\0\0\0".repeat(100_000));
    bytes.extend(b"e\x9400000000");
    let event = b"}(h\x00h\x01h\x02K\x00h\x03K\x01h\x04K\x00h\x05h\x07u";
    bytes.extend(event.repeat(100_000));
    bytes.extend(b"eeu.");
    let (result, peak) = read_all(&bytes);
    let trace = result.unwrap();
    assert_eq!((trace.events.len(), trace.stacks.len()), (100_000, 1));
    assert_eq!(trace.stacks.frames(trace.events[0].stack.unwrap()).count(), 512);
    assert_within("a shared stack", peak, bytes.len() as u64);
}

#[test]
fn a_text_where_a_list_should_be_is_not_repeated() {
    for head in [
        r#"{"segments":""#,
        r#"{"segments":[""#,
        r#"{"segments":[],"device_traces":""#,
        r#"{"segments":[],"device_traces":[[""#,
        r#"{"segments":[],"allocator_settings":""#,
        r#"[{"blocks":""#,
        r#"[{"address":""#,
    ] {
        // An error message would need six bytes to escape each of these bytes.
        let bytes = [head.as_bytes(), &vec![0x7f; 1 << 20], b"\"}"].concat();
        let (result, peak) = read_all(&bytes);
        assert!(result.unwrap_err().to_string().len() < 1000);
        assert_within(head, peak, bytes.len() as u64);
    }
}

#[test]
fn the_smallest_rows_of_a_log_stay_within_six_times() {
    let head = b"Thread,Time,Action,Pointer,Size,Stream\n";
    let bytes = repeated(head, b"1,00:00:00.0,free,1,1,0\n", b"");
    let (result, peak) = read_all(&bytes);
    assert!(result.unwrap().event_count() > 300_000);
    assert_within("frees of one pointer", peak, bytes.len() as u64);

    let mut bytes = head.to_vec();
    for pointer in 1..150_000_u32 {
        bytes.extend(format!("1,00:00:00.0,allocate,{pointer},1,0\n").bytes());
    }
    let (result, peak) = read_all(&bytes);
    assert!(result.unwrap().event_count() == 149_999);
    assert_within("blocks that all live", peak, bytes.len() as u64);

    let mut gz = GzEncoder::new(Vec::new(), Compression::best());
    gz.write_all(&bytes).unwrap();
    let packed = gz.finish().unwrap();
    let (result, peak) = peak_of(|| read_bytes("log", packed.as_slice(), &Limits::default(), None));
    assert!(result.is_ok());
    assert_within("the same, compressed", peak, bytes.len() as u64);
}

#[test]
fn a_history_of_millions_is_written_in_little_memory() {
    let config = Config::parse("backend:native", &registry::key_table()).unwrap();
    let device = Arc::new(Sim::new(SimOptions::default()));
    let allocator = registry::build(&config, device, BuildOptions::default()).unwrap();
    let recording =
        allocator.control().recording.expect("every strategy that is built here records");
    recording.history().start(&RecordOptions::default());
    let pairs = runs::runs(350_000);
    for stream in 0..pairs {
        let block = allocator.allocate(Request::new(512, StreamId(stream % 100))).unwrap();
        allocator.free(block).unwrap();
    }
    let (entries, peak) = peak_of(|| {
        let snapshot = recording.snapshot();
        snapshot.write(Format::Pickle, &mut std::io::sink()).unwrap();
        snapshot.entries.len() as u64
    });
    assert_eq!(entries, pairs * 3 + 100, "requests, frees, and a segment for each stream");
    println!("{entries} entries: {peak} bytes beside them");
    assert!(peak < 100 << 20, "{entries} entries: {peak} bytes");
}

/// Returns a log in which the block that was requested 64 rows before is freed after each request.
fn log(requests: u64) -> Vec<u8> {
    let mut text = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    let address = |request: u64| 0x7f00_0000_0000 + request % 128 * (1 << 26);
    let size = |request: u64| 1000 + request % 7 * 1_000_000;
    for request in 0..requests {
        let mut row = |action: &str, request: u64| {
            let (address, size, stream) = (address(request), size(request), request % 4);
            text += &format!("1234567,12:34:56:789012,{action},{address:#x},{size},{stream:#x}\n");
        };
        row("allocate", request);
        if request >= 64 {
            row("free", request - 64);
        }
    }
    text.into_bytes()
}

#[test]
fn a_log_is_read_and_answered_in_less_memory_than_its_text() {
    let requests = runs::runs(100_000);
    let (text, rows) = (log(requests), requests * 2 - 64);
    let (trace, peak) = read_all(&text);
    let trace = trace.unwrap();
    println!("read: {} bytes a row", peak / signed(rows));
    // An operation has 16 bytes. A list that grows may hold twice as many, and is then copied.
    assert!(peak < signed(rows * 48) + FIXED_BYTES, "{peak} bytes for {rows} rows");

    let (recording, peak) = peak_of(|| Recording::new(trace, None, Memory::default()));
    println!("recording: {} bytes a row", peak / signed(rows));
    assert!(peak < FIXED_BYTES, "{peak} bytes for {rows} rows");

    let (timeline, peak) = peak_of(|| Timeline::recorded(&recording, 1).unwrap());
    assert_eq!(timeline.lives.served, requests);
    println!("lives: {} bytes a row", peak / signed(rows));
    // Each two rows have a block of 48 bytes, in a list that grows, and a handle in the replay.
    assert!(peak < signed(rows * 80) + FIXED_BYTES, "{peak} bytes for {rows} rows");
    drop(timeline);

    let capacity = Capacity::Limited;
    let (run, peak) =
        peak_of(|| measure(&recording, &Config::default(), capacity, 1, &Silent).unwrap());
    assert_eq!(run.run.allocations, requests);
    println!("replay: {} bytes a row", peak / signed(rows));
    assert!(peak < signed(rows * 24) + FIXED_BYTES, "{peak} bytes for {rows} rows");
}
