//! Traces of PyTorch's profiler: they become requests with stacks, and their counters are kept.

use std::fmt::Write as _;

use super::super::{Failure, Foreign, Limits, TraceError, read_bytes};
use super::read_from;
use crate::{Start, Totals, Trace, TraceEvent, Workload};
use stratalloc::history::Action;

/// A trace under construction.
#[derive(Default)]
pub(super) struct Profile {
    events: Vec<String>,
}

impl Profile {
    /// Adds an event of memory at a time, with the allocated bytes after it.
    fn memory(mut self, time: f64, address: u64, bytes: i64, allocated: u64) -> Self {
        self.events.push(format!(
            "{{\"ph\":\"i\",\"cat\":\"cpu_instant_event\",\"s\":\"t\",\"name\":\"[memory]\",\"pid\":1,\"tid\":7,\
             \"ts\":{time},\"args\":{{\"Total Reserved\":4096,\"Total Allocated\":{allocated},\
             \"Bytes\":{bytes},\"Device Id\":0,\"Device Type\":1,\"Addr\":{address},\"Ev Idx\":4}}}}"
        ));
        self
    }

    fn call(mut self, begin: f64, duration: f64, name: &str, from: &str) -> Self {
        self.events.push(format!(
            "{{\"ph\":\"X\",\"cat\":\"python_function\",\"name\":\"{name}\",\"pid\":1,\"tid\":7,\
             \"ts\":{begin},\"dur\":{duration},\"args\":{{\"CallFrom\":\"{from}\",\"Python id\":1}}}}"
        ));
        self
    }

    fn with(mut self, event: &str) -> Self {
        self.events.push(event.to_owned());
        self
    }

    fn text(&self) -> String {
        let mut text = "{\n  \"schemaVersion\": 1,\n  \"deviceProperties\": [{\"id\": 0}],\n\
                        \"displayTimeUnit\": \"ms\", \"traceEvents\": ["
            .to_owned();
        let _ = writeln!(text, "{}], \"traceName\": \"x\"}}", self.events.join(",\n"));
        text
    }

    fn read(&self) -> Trace {
        read_from(self.text().as_bytes()).unwrap()
    }
}

/// Returns a small trace with events of most kinds.
pub(super) fn small() -> Vec<u8> {
    let profile = Profile::default()
        .memory(3.5, 512, 1024, 5120)
        .call(1.0, 9.0, "train.py(10): main", "train.py:99")
        .with("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"tid\":0,\"args\":{\"name\":\"python\"}}")
        .memory(8.0, 512, -1024, 4096);
    profile.text().into_bytes()
}

fn actions(trace: &Trace) -> Vec<(Action, u64, u64)> {
    trace.events.iter().map(|event| (event.action, event.address, event.size_bytes)).collect()
}

fn stack_of(trace: &Trace, event: &TraceEvent) -> Vec<String> {
    let frames = event.stack.into_iter().flat_map(|stack| trace.stacks.frames(stack));
    frames.map(|frame| format!("{}:{} {}", frame.file, frame.line, frame.function)).collect()
}

fn totals(trace: &Trace) -> &Totals {
    trace.totals.as_ref().unwrap()
}

#[test]
fn events_of_memory_become_requests_in_the_order_of_their_times() {
    let trace = Profile::default()
        .memory(20.0, 0x1000, -512, 1536)
        .memory(10.25, 0x1000, 512, 2048)
        .memory(15.0, 0x3000, 1024, 2048 + 1024)
        .memory(16.0, 0x3000, -1024, 2048)
        .read();
    assert!(trace.requests_only);
    let expected = [
        (Action::Alloc, 0x1000, 512),
        (Action::Alloc, 0x3000, 1024),
        (Action::FreeRequested, 0x3000, 1024),
        (Action::FreeCompleted, 0x3000, 1024),
        (Action::FreeRequested, 0x1000, 512),
        (Action::FreeCompleted, 0x1000, 512),
    ];
    assert_eq!(actions(&trace), expected);
    assert_eq!(trace.events[0].time_us, 10);
    let found = totals(&trace);
    assert_eq!(found.peak_allocated_bytes, Some(3072));
    assert_eq!(found.peak_reserved_bytes, Some(4096));
    // 1,536 bytes lived before the trace and are not freed in it.
    assert_eq!((found.unrecorded_bytes, found.other_threads_bytes), (Some(1536), Some(0)));
    let start = Start::of(&trace);
    assert_eq!((start.blocks.len(), start.requested_bytes(), start.outside), (1, 1536, 0));
}

#[test]
fn blocks_from_before_are_told_apart_by_their_frees() {
    let trace = Profile::default()
        .memory(1.0, 0x9000, -4096, 1000)
        .memory(2.0, 0x9000, 2048, 3048)
        .memory(3.0, 0x9000, -2048, 1000)
        .memory(4.0, 0x5000, -600, 400)
        // A free of a block that is free changes nothing.
        .memory(5.0, 0x5000, -600, 400)
        .read();
    assert_eq!(totals(&trace).unrecorded_bytes, Some(400));
    assert_eq!(totals(&trace).peak_allocated_bytes, Some(5096));
    let workload = Workload::of(&trace, 1 << 40);
    assert_eq!((workload.seeded, workload.blocks), (3, 4));
    assert_eq!(Start::of(&trace).requested_bytes(), 5096);
    assert_eq!(trace.events.len(), 7);
}

#[test]
fn memory_of_other_threads_is_the_rest_of_the_counter() {
    let trace = Profile::default()
        .memory(1.0, 0x1000, 100, 100)
        .memory(2.0, 0x2000, 100, 1200)
        .memory(3.0, 0x2000, -100, 1100)
        .memory(4.0, 0x3000, 100, 200)
        .read();
    assert_eq!(totals(&trace).other_threads_bytes, Some(1000));
    let requests: Vec<u64> = trace.requests().map(|event| event.size_bytes).collect();
    assert_eq!(requests, [100, 1000, 100, 100]);
    // A request at the address of a live block: its free was on another thread.
    let trace = Profile::default().memory(1.0, 64, 100, 100).memory(2.0, 64, 50, 50).read();
    let expected = [
        (Action::Alloc, 64, 100),
        (Action::FreeRequested, 64, 100),
        (Action::FreeCompleted, 64, 100),
        (Action::Alloc, 64, 50),
    ];
    assert_eq!(actions(&trace), expected);
}

#[test]
fn the_calls_that_enclose_a_request_are_its_stack() {
    let trace = Profile::default()
        .memory(5.0, 0x1000, 512, 512)
        .memory(35.0, 0x2000, 512, 1024)
        .call(0.0, 50.0, "train.py(10): main", "train.py:99")
        .call(1.0, 10.0, "a/model.py(20): forward", "train.py:12")
        .call(2.0, 1.0, "other.py(1): done", "a/model.py:21")
        .call(4.0, 3.0, "nn.Module: Linear_0", "")
        .call(4.5, 2.0, "<built-in method empty of type object at 0x7f>", "a/model.py:25")
        .with("{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"aten::empty\",\"pid\":1,\"tid\":7,\"ts\":4.8,\"dur\":1}")
        .call(30.0, 10.0, "b.py(7): g", "")
        .with("{\"ph\":\"X\",\"cat\":\"python_function\",\"name\":\"x.py(1): x\",\"pid\":1,\"tid\":8,\"ts\":0,\"dur\":90}")
        .read();
    assert_eq!(stack_of(&trace, &trace.events[0]), ["a/model.py:25 forward", "train.py:12 main"]);
    assert_eq!(totals(&trace).has_call_lines, Some(true));
    // Without the line of a call, the line of the definition stands.
    assert_eq!(stack_of(&trace, &trace.events[1]), ["b.py:7 g", "train.py:10 main"]);
}

#[test]
fn a_trace_without_lines_of_calls_is_marked() {
    let trace = Profile::default()
        .memory(5.0, 0x1000, 512, 512)
        .call(0.0, 50.0, "train.py(10): main", "")
        .read();
    assert_eq!(stack_of(&trace, &trace.events[0]), ["train.py:10 main"]);
    assert_eq!(totals(&trace).has_call_lines, Some(false));
    let trace = Profile::default().memory(5.0, 0x1000, 512, 512).read();
    assert_eq!(totals(&trace).has_call_lines, None);
}

#[test]
fn a_thread_without_python_has_the_node_or_the_operator() {
    let op = |name: &str, begin: u32| {
        format!(
            "{{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"{name}\",\"pid\":1,\"tid\":7,\"ts\":{begin},\"dur\":10}}"
        )
    };
    let trace = Profile::default()
        .memory(5.0, 0x1000, 512, 512)
        .memory(25.0, 0x2000, 512, 1024)
        .with(&op("autograd::engine::evaluate_function: MmBackward0", 1))
        .with(&op("aten::mm", 3))
        .with(&op("aten::relu", 20))
        .read();
    assert_eq!(stack_of(&trace, &trace.events[0]), [":0 torch::autograd::MmBackward0::apply"]);
    assert_eq!(stack_of(&trace, &trace.events[1]), [":0 aten::relu"]);
}

#[test]
fn memory_of_the_host_is_left_out_and_each_device_is_read_alone() {
    let on = |kind: i32, device: i32, address: u64| {
        format!(
            "{{\"name\":\"[memory]\",\"ts\":1,\"pid\":1,\"tid\":1,\"args\":{{\"Device Type\":{kind},\"Device Id\":{device},\
             \"Bytes\":64,\"Addr\":{address}}}}}"
        )
    };
    let profile = Profile::default()
        .with(&on(0, -1, 1))
        .with(&on(1, 0, 2))
        .with(&on(1, 3, 3))
        .with(&on(1, 3, 4))
        .with(&on(0, 0, 5));
    let trace = profile.read();
    assert_eq!((trace.device, trace.devices.len(), trace.events.len()), (0, 2, 1));
    assert_eq!(totals(&trace).peak_allocated_bytes, None);
    let of = |device| {
        let limits = Limits { device: Some(device), ..Limits::default() };
        read_bytes("file", profile.text().as_bytes(), &limits, None)
    };
    assert_eq!(of(0).unwrap().events.len(), 1);
    assert!(of(1).unwrap_err().to_string().contains("events of the requested device"));
    // The list alone is a trace too.
    let list = format!("[{}, {{\"ph\":\"i\"}}]", on(1, 0, 2));
    assert_eq!(read_from(list.as_bytes()).unwrap().events.len(), 1);
}

#[test]
fn a_request_that_failed_is_one() {
    let failed = "{\"name\":\"[OutOfMemory]\",\"ts\":2,\"pid\":1,\"tid\":7,\"args\":{\"Total Reserved\":9,\
                  \"Total Allocated\":100,\"Bytes\":700,\"Device Id\":0,\"Device Type\":1}}";
    let trace = Profile::default().memory(1.0, 64, 100, 100).with(failed).read();
    assert_eq!(actions(&trace)[1], (Action::OutOfMemory, 0, 700));
    assert_eq!(totals(&trace).failures, Some(1));
}

#[test]
fn a_trace_without_requests_is_named() {
    let foreign = |profile: &Profile| match read_from(profile.text().as_bytes()) {
        Err(TraceError { failure: Failure::Foreign { foreign }, .. }) => foreign,
        other => panic!("{other:?}"),
    };
    let none = Profile::default().call(0.0, 50.0, "train.py(10): main", "");
    assert_eq!(foreign(&none), Foreign::ProfileWithoutMemory);
    let old = "{\"name\":\"[memory]\",\"ts\":1,\"args\":{\"Device Type\":1,\"Device Id\":0,\"Bytes\":64}}";
    assert_eq!(foreign(&Profile::default().with(old)), Foreign::ProfileWithoutAddresses);
}

#[test]
fn values_out_of_range_and_of_other_types_are_left_out() {
    for (bytes, address, time) in [
        ("9223372036854775808", "1", "1"),
        ("-9223372036854775808", "18446744073709551615", "-5"),
        ("9223372036854775807", "18446744073709551615", "1e300"),
        ("\"x\"", "[]", "{}"),
        ("null", "-1", "true"),
        ("64", "\"0x10\"", "1"),
    ] {
        let event = format!(
            "{{\"name\":\"[memory]\",\"ts\":{time},\"tid\":\"x\",\"args\":{{\"Device Type\":1,\"Device Id\":0,\
             \"Bytes\":{bytes},\"Addr\":{address},\"Total Allocated\":18446744073709551615}}}}"
        );
        let profile = Profile::default().memory(2.0, 64, 100, 100).with(&event).with("{}");
        let trace = profile.read();
        let workload = Workload::of(&trace, 1 << 40);
        assert!(workload.blocks >= 1, "{bytes}");
    }
    let error = read_from(b"{\"traceEvents\":[5]}").unwrap_err().to_string();
    assert!(error.contains("expected a dictionary of an event"), "{error}");
}

#[test]
fn many_nested_calls_take_linear_time() {
    let mut profile = Profile::default();
    for at in 0..3000_u32 {
        profile = profile.call(f64::from(at), 1e6, &format!("a.py({at}): f"), "a.py:5");
        profile = profile.memory(f64::from(at) + 0.5, 512 * u64::from(at + 1), 512, 512);
    }
    let trace = profile.read();
    assert!(trace.events.iter().any(|event| event.stack.is_some()));
}
