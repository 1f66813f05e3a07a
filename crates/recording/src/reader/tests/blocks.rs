//! Tests of the stacks of blocks, and of frames that PyTorch's compiler generated.

use super::*;
use crate::Start;

const BASE: i128 = 0x7f00_0000_0000;
const SIZE: i128 = 1 << 20;

/// Returns frames with these functions, innermost first.
fn frames<const N: usize>(functions: [&'static str; N]) -> Node {
    list(functions.map(|name| frame("train.py", 7, name)))
}

fn frame(file: &'static str, line: i128, name: &'static str) -> Node {
    dict([("filename", text(file)), ("line", int(line)), ("name", text(name))])
}

/// Returns a frame of generated code.
fn generated(line: i128, original: &'static str) -> Node {
    let Node::Dict(mut pairs) = frame("/tmp/cxyz.py", line, "call") else { return Node::None };
    pairs.push(("fx_node_op", text("call_function")));
    pairs.push(("fx_original_trace", text(original)));
    Node::Dict(pairs)
}

/// Returns an entry about the block with this number, without the stacks of [`entry`].
fn about(action: &'static str, number: i128, stack: Option<Node>) -> Node {
    let fields = [("action", text(action)), ("stream", int(0))];
    let stack = stack.map(|stack| ("frames", stack));
    dict(fields.into_iter().chain(at(BASE + number * SIZE, SIZE - 8)).chain(stack))
}

/// Returns the live block with this number.
fn live(number: i128, more: (&'static str, Node)) -> Node {
    let Node::Dict(mut pairs) = block(BASE + number * SIZE, SIZE, "active_allocated") else {
        return Node::None;
    };
    pairs.push(more);
    Node::Dict(pairs)
}

fn segments(blocks: Vec<Node>) -> Node {
    list([segment(0, BASE, SIZE * blocks.len() as i128, blocks)])
}

fn file(blocks: Vec<Node>, entries: Vec<Node>) -> Node {
    dict([("segments", segments(blocks)), ("device_traces", list([Node::List(entries)]))])
}

/// Returns the functions of a stack, innermost first, with the lines.
fn lines_of(trace: &Trace, stack: Option<crate::StackId>) -> Vec<String> {
    let frames = stack.into_iter().flat_map(|stack| trace.stacks.frames(stack));
    frames.map(|frame| format!("{}:{} {}", frame.file, frame.line, frame.function)).collect()
}

fn at_end(trace: &Trace, number: u64) -> Vec<String> {
    let address = u64::try_from(BASE + i128::from(number) * SIZE).unwrap();
    lines_of(trace, trace.stack_at_end(address))
}

#[test]
fn live_blocks_have_stacks_in_dictionaries_and_in_lists() {
    let free = Node::Dict(match block(BASE + 2 * SIZE, SIZE, "inactive") {
        Node::Dict(pairs) => [pairs, vec![("frames", frames(["freed"]))]].concat(),
        _ => Vec::new(),
    });
    let blocks = || {
        let waiting = block(BASE + 3 * SIZE, SIZE, "active_pending_free");
        let odd = live(1, ("frames", int(3)));
        vec![live(0, ("frames", frames(["load", "main"]))), odd, free.clone(), waiting]
    };
    for node in [segments(blocks()), file(blocks(), Vec::new())] {
        let trace = read_both(&node).unwrap();
        assert_eq!(at_end(&trace, 0), ["train.py:7 load", "train.py:7 main"]);
        assert_eq!(trace.block_stacks.len(), 1);
        assert_eq!(trace.stacks.len(), 1, "free blocks need no stack");
    }
}

#[test]
fn the_latest_request_in_the_history_of_a_block_is_read() {
    let request = |address: i128, name| {
        dict([
            ("addr", int(BASE + address * SIZE)),
            ("real_size", int(SIZE - 100)),
            ("frames", frames([name])),
        ])
    };
    // Blocks of old files have no address.
    let old = |history| {
        dict([("size", int(SIZE)), ("state", text("active_allocated")), ("history", history)])
    };
    let blocks = vec![
        old(list([request(0, "load"), request(0, "earlier")])),
        old(list([request(0, "other")])),
        old(list([int(1)])),
        old(text("odd")),
    ];
    let trace = read_both(&segments(blocks)).unwrap();
    assert_eq!(at_end(&trace, 0), ["train.py:7 load"]);
    assert_eq!(trace.block_stacks.len(), 1, "the second history is that of another address");
    let requested = trace.segments[0].blocks.iter().map(|block| block.requested_bytes);
    let size = u64::try_from(SIZE).unwrap();
    assert!(requested.eq([size - 100, size, size, size]));
}

#[test]
fn a_request_without_a_stack_has_that_of_its_block() {
    let blocks = vec![
        live(0, ("frames", frames(["kept"]))),
        live(1, ("frames", frames(["again"]))),
        live(2, ("frames", frames(["unseen"]))),
    ];
    let entries = vec![
        about("alloc", 0, None),
        about("alloc", 1, None),
        about("free_requested", 1, None),
        about("free_completed", 1, None),
        about("alloc", 1, Some(frames(["own"]))),
        about("alloc", 2, None),
        about("free_requested", 2, None),
        about("free_completed", 2, None),
    ];
    let trace = read_both(&file(blocks, entries)).unwrap();
    let allocs = trace.events.iter().filter(|event| event.action == Action::Alloc);
    let found: Vec<_> = allocs.map(|event| lines_of(&trace, event.stack).concat()).collect();
    assert_eq!(found, ["train.py:7 kept", "", "train.py:7 own", ""]);
}

#[test]
fn a_block_from_before_has_the_stack_of_the_final_block_unless_an_event_freed_it() {
    let blocks = vec![
        live(0, ("frames", frames(["weights"]))),
        live(1, ("frames", frames(["new"]))),
        live(2, ("frames", frames(["unseen"]))),
        live(3, ("frames", frames(["cache"]))),
    ];
    let free =
        |number| [about("free_requested", number, None), about("free_completed", number, None)];
    let entries = [free(1), [about("alloc", 1, None), about("alloc", 9, None)], free(2)].concat();
    let trace = read_both(&file(blocks, entries)).unwrap();
    let before = Start::of(&trace).blocks;
    let found: Vec<_> = before.iter().map(|block| lines_of(&trace, block.stack).concat()).collect();
    assert_eq!(found, ["train.py:7 weights", "", "", "train.py:7 cache"]);
}

#[test]
fn lines_of_the_program_replace_the_frame_of_generated_code() {
    const OUTER: &str = "  File \"model.py\", line 90, in forward\n    y = self.block(x)\n";
    const INNER: &str = "  File \"model.py\", line 90, in forward\n    y = self.block(x)\n\
        \n  File \"C:\\my \"code\"\\block.py\", line 44, in <lambda>\n    x, line 5, in y\n";
    const OTHER: &str = "  File \"loss.py\", line 3, in loss\n    return a\n";
    let stack = list([
        frame("torch.py", 1, "empty"),
        generated(165, INNER),
        frame("graph_module.py", 2, "wrapped"),
        generated(12, OUTER),
        generated(13, OTHER),
        generated(14, ""),
        generated(15, "  File \"no_line.py\", line , in f\nnothing"),
        frame("train.py", 7, "main"),
    ]);
    let trace = read_both(&segments(vec![live(0, ("frames", stack))])).unwrap();
    let expected = [
        "torch.py:1 empty",
        "C:/my \"code\"/block.py:44 <lambda>",
        "model.py:90 forward",
        "graph_module.py:2 wrapped",
        "loss.py:3 loss",
        "/tmp/cxyz.py:14 call",
        "/tmp/cxyz.py:15 call",
        "train.py:7 main",
    ];
    assert_eq!(at_end(&trace, 0), expected);
}
