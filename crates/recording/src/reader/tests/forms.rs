//! Files other than snapshots: what they are is recognised, and they are read or refused by name.

use super::super::{Failure, Foreign, Limits, TraceError, read_bytes};
use super::read_from;
use super::writer::snapshot;
use crate::{Lack, NoHistory, Totals, TotalsSource, Trace};

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes as PyTorch's viewer does, with zero bytes up to a multiple of three, and at least one.
fn base64(bytes: &[u8]) -> String {
    let padded = [bytes, &[0, 0, 0][bytes.len() % 3..]].concat();
    let group = |group: &[u8]| {
        let bits = group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        [18, 12, 6, 0].map(|shift| char::from(BASE64[(bits >> shift & 63) as usize]))
    };
    padded.chunks(3).flat_map(group).collect()
}

/// Returns a page of PyTorch's viewer.
fn page(snapshot: &[u8]) -> Vec<u8> {
    let encoded = base64(snapshot);
    format!(
        "\n<!DOCTYPE html>\n<html>\n<head>\n</head>\n<body>\n<script type=\"module\">\n\
         import {{add_local_files}} from \"https://cdn.jsdelivr.net/x/MemoryViz.js\"\n\
         const local_files = [{{\"name\": \"snapshot.pickle\", \"base64\": \"{encoded}\"}}]\n\
         add_local_files(local_files, 'Active Memory Timeline')\n</script>\n</body>\n</html>\n"
    )
    .into_bytes()
}

fn totals(text: &str) -> Totals {
    let trace = read_from(text.as_bytes()).unwrap();
    let lack = NoHistory::of(&trace).map(|no_history| no_history.lack);
    assert_eq!((lack, trace.events.len()), (Some(Lack::Totals), 0));
    trace.totals.unwrap()
}

#[test]
fn the_snapshot_in_a_page_is_read_as_if_it_were_the_file() {
    for bytes in [snapshot().pickle(), snapshot().json()] {
        let expected = read_from(&bytes).unwrap();
        // Zero bytes at the end of a page are padding, whatever the length of the snapshot.
        for spaces in 0..3 {
            let bytes = [b" ".repeat(spaces), bytes.clone()].concat();
            assert_eq!(read_from(&page(&bytes)).unwrap(), expected);
        }
    }
    let whole = page(&snapshot().pickle());
    let end = whole.windows(2).position(|two| two == b"\"}").unwrap();
    for cut in (1..end).step_by(7) {
        assert!(read_from(&whole[..cut]).is_err(), "cut at {cut}");
    }
}

#[test]
fn a_page_without_a_snapshot_is_named() {
    let refused = |text: &str| match read_from(text.as_bytes()) {
        Err(TraceError { failure: Failure::Foreign { foreign }, .. }) => foreign,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused("<html><body>base64 \"base64\" in words"), Foreign::Page);
    assert_eq!(
        refused("<html>\n<img src='data:image/png;base64,iVBORw0KGgo=' />"),
        Foreign::TimelinePicture
    );
    let report = "<!doctype html><script type=\"application/json\" id=\"about\">{}</script>";
    assert_eq!(refused(report), Foreign::Report);
    let nested = String::from_utf8(page(&page(&snapshot().pickle()))).unwrap();
    assert_eq!(refused(&nested), Foreign::Page);
    for (inner, expected) in [("####", "not in base64"), ("gAS", "cut off"), ("", "it is empty")] {
        let text = format!("<html> [{{\"base64\" : \"{inner}\"}}]");
        let error = read_from(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{inner}: {error}");
    }
}

#[test]
fn files_of_other_tools_are_named_with_what_to_record() {
    for (bytes, expected) in [
        (b"PK\x03\x04\0\0\x08\x08model/data.pkl".as_slice(), "a checkpoint"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "a checkpoint"),
        (b"\x58\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}}", "a checkpoint"),
        (b"PK\x03\x04rest", "a zip or tar archive"),
        (b"BZh91AY&SY", "decompress it"),
        (b"\x93NUMPY\x01\0v\0{'descr'", "a NumPy array"),
        (b"SQLite format 3\0\x10\0", "Nsight Systems"),
        (b"{'segments': [{'device': 0}]}", "the text of a Python object"),
        (b"|=====|\n|     PyTorch CUDA memory summary, device ID 0    |", "memory_summary()"),
        (b"Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried", "out-of-memory error"),
        (b"Sat Nov 28\n+---+\n| NVIDIA-SMI 580.159.04 |", "nvidia-smi"),
        (b"timestamp, memory.used [MiB]\n2026, 5 MiB", "nvidia-smi"),
        (b"# gpu    sm   mem\n", "nvidia-smi"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'>", "a picture"),
        (b"\xff\xfe{\0\"\0", "UTF-16"),
    ] {
        let error = read_from(bytes).unwrap_err();
        assert!(matches!(error.failure, Failure::Foreign { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("file: it is ") && text.contains(expected), "{text}");
    }
    let by_name =
        read_bytes("a/run.NSYS-REP", b"\x05\x06rest".as_slice(), &Limits::default(), None);
    assert!(by_name.unwrap_err().to_string().contains("Nsight Systems"));
}

#[test]
fn a_snapshot_with_texts_of_other_files_stays_a_snapshot() {
    let text = "{\"segments\":[],\"device_traces\":[[{\"action\":\"oom\",\"device_free\":5,\"size\":512,\
                \"stream\":0,\"frames\":[{\"name\":\"traceEvents\",\"filename\":\"CUDA out of memory\",\
                \"line\":1}]}]],\"traceEvents\":1,\"allocated_bytes.all.peak\":2}";
    let trace = read_from(text.as_bytes()).unwrap();
    assert_eq!((trace.events.len(), trace.totals), (1, None));
    let error = read_from(b"{\"other\":1}").unwrap_err().to_string();
    assert!(error.contains("the key segments, which a memory snapshot has"), "{error}");
}

#[test]
fn counters_of_the_allocator_are_read_flat_and_nested() {
    let flat = "{\"active.all.peak\":7,\"allocated_bytes.all.peak\":4096,\
                \"allocated_bytes.all.current\":512,\"allocated_bytes.large_pool.peak\":1,\
                \"inactive_split_bytes.all.peak\":64,\"max_split_size\":-1,\"num_alloc_retries\":2,\
                \"num_ooms\":3,\"requested_bytes.all.peak\":4000,\"reserved_bytes.all.peak\":8192}";
    let found = totals(flat);
    let expected = Totals {
        entries: 10,
        peak_allocated_bytes: Some(4096),
        end_allocated_bytes: Some(512),
        peak_requested_bytes: Some(4000),
        peak_reserved_bytes: Some(8192),
        peak_inactive_split_bytes: Some(64),
        retries: Some(2),
        failures: Some(3),
        ..Totals::of(TotalsSource::MemoryStats)
    };
    assert_eq!(found, expected);
    let nested = "{\"num_alloc_retries\":2,\"num_ooms\":3,\"allocated_bytes\":{\"all\":{\"current\":512,\
                  \"peak\":4096},\"large_pool\":{\"peak\":1}},\"reserved_bytes\":{\"all\":{\"peak\":8192}},\
                  \"odd\":[{\"all\":{\"peak\":5}},null,true,\"x\",0.5]}";
    let found = totals(nested);
    assert_eq!((found.peak_allocated_bytes, found.peak_reserved_bytes), (Some(4096), Some(8192)));
    assert_eq!((found.retries, found.failures), (Some(2), Some(3)));
    let inside = totals(&format!("{{\"step\":3,\"rank0\":{{\"memory\":{flat}}}}}"));
    assert_eq!(Totals { entries: expected.entries, ..inside }, expected);
    assert_eq!(totals(&format!("[{nested}]")).peak_allocated_bytes, Some(4096));
    for (two, found) in [
        (format!("{{\"cuda:0\":{flat},\"cuda:1\":{nested}}}"), r#""cuda:0" and "cuda:1""#),
        (format!("[{flat},{flat}]"), r#""0" and "1""#),
    ] {
        let error = read_from(two.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("counters of one device") && error.contains(found), "{error}");
    }
    let error = read_from(b"{\"num_alloc_retries\":2}").unwrap_err().to_string();
    assert!(error.contains("expected the counter allocated_bytes.all.peak"), "{error}");
    for huge in ["1e400", "99999999999999999999999", "-5", "\"x\"", "null", "[[]]"] {
        let text = format!("{{\"allocated_bytes.all.peak\":{huge},\"reserved_bytes.all.peak\":1}}");
        let _ = read_from(text.as_bytes());
    }
}

#[test]
fn timelines_give_the_peak_and_its_categories() {
    let timeline = "[[10, 10, 2010], [[0, 5, 0, 0, 0, 0, 0, 0, 1], [0, 5, 0, 0, 0, 90, 0, 0, 1],\n\
                    [0, 5, 0, 0, 0, 0, 0, 0, 3]]]";
    let changes = "[[-1, 1, 5, 0], [10000, 2, 1, 7], [10500, 2, 90, 4], [11000, 3, -90, 4],\n\
                   [11000, 3, 90, 4], [900000, 4, -90, 4], [2010000, 2, 2, 7]]";
    for (text, source, entries) in
        [(timeline, TotalsSource::MemoryTimeline, 3), (changes, TotalsSource::RawMemoryTimeline, 7)]
    {
        let found = totals(text);
        assert_eq!((found.source, found.entries), (source, entries));
        assert_eq!(found.peak_allocated_bytes, Some(96));
        assert_eq!(found.end_allocated_bytes, Some(8));
        assert_eq!(found.duration_us, Some(2000));
        let named: Vec<_> = found.categories.iter().map(|one| (one.category, one.bytes)).collect();
        assert_eq!(named, [("activations", 90), ("parameters", 5), ("unknown", 1)]);
    }
    // A short list of times has as many numbers as a change.
    assert_eq!(totals("[[1,2,3,4],[[0,0,0,0,0,0,0,0,0],[0,0,0,0,0,0,0,0,9],[0,0,0,0,0,0,0,0,9],[0,0,0,0,0,0,0,0,0]]]").peak_allocated_bytes, Some(9));
    assert_eq!(totals("[[1,2,3,4]]").source, TotalsSource::RawMemoryTimeline);
    let refused = |text: &str| read_from(text.as_bytes()).unwrap_err().to_string();
    assert!(refused("[[],[]]").contains("no times"));
    assert!(
        refused("[[1],[[0,0,0,0,0,0,0,0,0]],[]]").contains("a list of times and a list of sizes")
    );
    assert!(refused("[[1,2],[[0,0,0,0,0,0,0,0,0]]]").contains("as many sizes as times"));
    assert!(refused("[[1],[[0,1]]]").contains("8 categories"));
    assert!(refused("[[1,2,3,8],[1,2,3,4]]").contains("a category from 0 to 7"));
    assert!(refused("[[1,2,3,4],[1,2,3]]").contains("a time, an action, bytes and a category"));
}

#[test]
fn sums_beyond_64_bits_stay_in_range() {
    let many = "9223372036854775807";
    let row = format!("[0{}]", format!(",{many}").repeat(8));
    let found = totals(&format!("[[1],[{row}]]"));
    assert_eq!(found.peak_allocated_bytes, Some(u64::MAX));
    let found = totals(&format!("[[1,1,-{many},0],[1,1,-{many},0]]"));
    assert_eq!(found.peak_allocated_bytes, Some(0));
}

/// Small files of every kind.
fn small() -> Vec<Vec<u8>> {
    let texts = [
        "{\"allocated_bytes.all.peak\":4096,\"reserved_bytes\":{\"all\":{\"peak\":8192}}}",
        "[[10, 2010], [[0, 5, 0, 0, 0, 0, 0, 0, 1], [0, 5, 0, 0, 0, 90, 0, 0, 1]]]",
        "[[-1, 1, 5, 0], [10000, 2, 1, 7]]",
    ];
    let texts = texts.map(|text| text.as_bytes().to_vec());
    [page(&snapshot().pickle()), super::profile::small()].into_iter().chain(texts).collect()
}

#[test]
fn a_cut_file_of_any_kind_is_an_error() {
    for whole in &small()[1..] {
        for cut in 0..whole.trim_ascii_end().len() {
            assert!(
                read_from(&whole[..cut]).is_err(),
                "{}",
                String::from_utf8_lossy(&whole[..cut])
            );
        }
    }
}

#[test]
fn deep_nesting_in_any_kind_neither_overflows_nor_hangs() {
    let deep = "[".repeat(200_000);
    let deep_keys = "{\"a\":".repeat(200_000);
    for begin in [
        "{\"allocated_bytes.all.peak\":",
        "[[1,2,3,4],[1,",
        "[[1],[[",
        "{\"schemaVersion\":",
        "{\"traceEvents\":[{\"args\":{\"Bytes\":",
        "{\"traceEvents\":[{\"name\":",
    ] {
        for inner in [&deep, &deep_keys] {
            assert!(read_from(format!("{begin}{inner}").as_bytes()).is_err());
        }
    }
}

#[test]
fn one_damaged_byte_in_any_kind_never_panics() {
    for whole in small() {
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff, 0x2e] {
                let mut damaged = whole.clone();
                damaged[at] ^= bits;
                let _: Result<Trace, TraceError> = read_from(&damaged);
            }
        }
    }
}

quickcheck::quickcheck! {
    fn damaged_files_of_any_kind_never_panic(flips: Vec<(u16, u8)>) -> bool {
        for whole in small() {
            let _ = read_from(&super::hostile::flipped(whole, &flips));
        }
        true
    }
}
