//! Snapshots as files: both formats, compression, hostile names, full disks, and exact replays of written
//! snapshots.

use std::io::{self, Write};

use stratalloc::history::{Context, Format, Snapshot};
use stratalloc_recording::{Limits, Trace, reader, verify};
use stratalloc_sim::{Host, HostOptions};

use super::{build, build_over, history, unrecorded};
use crate::common::prelude::*;

fn written(snapshot: &Snapshot, format: Format) -> Trace {
    let mut bytes = Vec::new();
    snapshot.write(format, &mut bytes).expect("memory takes it");
    let limits = Limits::default();
    reader::read_bytes("written", &*bytes, &limits, None).expect("our own reader reads it")
}

/// Checks that a replay with the configuration in the file repeats every decision.
fn assert_exact(snapshot: &Snapshot, what: &str) {
    for format in [Format::Pickle, Format::Json] {
        let trace = written(snapshot, format);
        let made = trace.made_here.expect("it names its writer");
        let config = config(&trace.conf);
        let total_bytes = made.total_bytes.expect("the device has a size");
        let fraction = made.limit_bytes.map(|bytes| bytes as f64 / total_bytes as f64);
        let found = verify(&trace, &config, total_bytes, fraction).expect("it can be repeated");
        assert_eq!(found.first_mismatch, None, "{what} {format:?}");
        assert!(found.is_exact() && found.run.allocations > 0, "{what} {format:?}");
    }
}

#[test]
fn both_syntaxes_say_the_same() {
    let (allocator, history) = unrecorded("backend:native,max_split_size_mb:64");
    let (provider, _) = Counted::provider("forward \u{1}</script>\u{2028}\"\\ \u{1f980}");
    history.set_stack_provider(Some(provider));
    history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
    let _scope = Context::scope("scope\nwith a line");
    let kept = allocator.take_on(3 * MIB, StreamId(u64::MAX - 7));
    allocator.free(allocator.take(512)).unwrap();
    let snapshot = allocator.recording().snapshot();
    let [pickle, json] = [Format::Pickle, Format::Json].map(|format| written(&snapshot, format));
    assert_eq!(pickle, json);
    assert_eq!(pickle.conf, "max_split_size_mb:64");
    let stack = pickle.events[0].stack.expect("it has one");
    let frames: Vec<_> = pickle.stacks.frames(stack).map(|frame| frame.function).collect();
    assert_eq!(frames, ["scope\nwith a line", "forward \u{1}</script>\u{2028}\"\\ \u{1f980}"]);
    let mut text = Vec::new();
    snapshot.write(Format::Json, &mut text).unwrap();
    assert!(!String::from_utf8(text).unwrap().contains("</script"));
    allocator.give(kept);
}

/// A writer that accepts this many bytes and then reports a full disk.
struct Disk(usize);

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_file_that_cannot_be_written_is_an_error_and_nothing_is_left_of_it() {
    let allocator = build("backend:native");
    history(&allocator).start(&RecordOptions::default());
    let _block = allocator.take(512);
    let snapshot = allocator.recording().snapshot();
    for room in [0, 100, 900] {
        let error = snapshot.write(Format::Pickle, &mut Disk(room)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
    let folder = Folder::new("broken");
    let error = snapshot.save(&folder.0).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    snapshot.save(&folder.0.join("missing/run.pickle")).unwrap_err();
    assert!(folder.names().is_empty());
    let path = folder.0.join("run.json");
    std::fs::write(&path, "old").unwrap();
    snapshot.save(&path).unwrap();
    assert_eq!(folder.names(), ["run.json"]);
    assert!(std::fs::read(&path).unwrap().starts_with(b"{\"segments\":"));
}

#[test]
fn compressed_files_say_the_same() {
    let allocator = build("backend:native");
    history(&allocator).start(&RecordOptions::default());
    let blocks = [1, 2, 3].map(|stream| allocator.take_on(MIB, StreamId(stream)));
    let snapshot = allocator.recording().snapshot();
    let folder = Folder::new("compressed");
    for name in ["run.pickle", "run.json"] {
        let [plain, packed] = ["", ".gz"].map(|end| folder.0.join(format!("{name}{end}")));
        snapshot.save(&plain).unwrap();
        snapshot.save(&packed).unwrap();
        let [plain_bytes, packed_bytes] =
            [&plain, &packed].map(|path| std::fs::read(path).unwrap());
        assert!(packed_bytes.starts_with(&[0x1f, 0x8b]), "{name}");
        assert!(packed_bytes.len() < plain_bytes.len(), "{name}");
        let [plain, packed] = [&plain, &packed]
            .map(|path| reader::read(path, &Limits::default()).expect("a whole file"));
        assert_eq!((plain.segments, plain.events), (packed.segments, packed.events), "{name}");
    }
    blocks.into_iter().for_each(|block| allocator.give(block));
}

#[test]
fn eight_threads_on_real_memory_are_repeated_exactly() {
    for conf in ["backend:native", "backend:native,expandable_segments:True"] {
        let options = HostOptions { total_bytes: 4 * GIB, ..HostOptions::default() };
        let host: Arc<dyn Driver> = Arc::new(Host::new(options));
        let allocator = build_over(conf, host);
        history(&allocator).start(&RecordOptions::default());
        thread::scope(|scope| {
            for stream in 1..=8 {
                let allocator = &allocator;
                scope.spawn(move || {
                    let mut live = Vec::new();
                    for step in 0..1500 {
                        live.push(allocator.take_on(1 + step * 977 % 300_000, StreamId(stream)));
                        if step % 3 != 0 {
                            allocator.free(live.swap_remove(live.len() / 2)).expect("it is live");
                        }
                    }
                    live.truncate(0);
                });
            }
        });
        assert_exact(&allocator.recording().snapshot(), conf);
    }
}

#[test]
fn pools_other_streams_and_limits_are_repeated_exactly() {
    for conf in [
        "backend:native",
        "backend:native,expandable_segments:True,per_process_memory_fraction:0.5",
    ] {
        let allocator = build(conf);
        history(&allocator).start(&RecordOptions::default());
        let held = allocator.take(5 * MIB);
        let pools = allocator.private_pools();
        let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
        let inside = {
            let _scope = pool.enter().unwrap();
            [allocator.take(3 * MIB), allocator.take_on(800, StreamId(4))]
        };
        allocator.record_stream(&held, StreamId(4)).unwrap();
        allocator.give(held);
        let next = allocator.take(5 * MIB);
        let [a, b] = inside;
        allocator.give(a);
        assert_exact(&allocator.recording().snapshot(), conf);
        [b, next].into_iter().for_each(|block| allocator.give(block));
        drop(pool);
    }
}
