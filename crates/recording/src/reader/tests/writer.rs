//! Writes snapshots as pickle and as JSON.

/// A value that can be written in either syntax.
#[derive(Clone, Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(&'static str),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    Dict(Vec<(&'static str, Node)>),
}

pub(super) fn text(text: &'static str) -> Node {
    Node::Text(text)
}

pub(super) fn int(number: i128) -> Node {
    Node::Int(number)
}

pub(super) fn list<const N: usize>(items: [Node; N]) -> Node {
    Node::List(items.into())
}

pub(super) fn tuple<const N: usize>(items: [Node; N]) -> Node {
    Node::Tuple(items.into())
}

pub(super) fn dict(pairs: impl IntoIterator<Item = (&'static str, Node)>) -> Node {
    Node::Dict(pairs.into_iter().collect())
}

/// Returns a trace entry on the default stream.
pub(super) fn entry(
    action: &'static str,
    fields: impl IntoIterator<Item = (&'static str, Node)>,
) -> Node {
    let mut pairs = vec![("action", text(action)), ("stream", int(0))];
    pairs.extend(fields);
    pairs.push(("time_us", int(1_795_202_965_440_983)));
    pairs.push(("compile_context", text("N/A")));
    pairs.push(("frames", list([frame(), frame()])));
    dict(pairs)
}

/// Returns the fields `addr` and `size` of a trace entry.
pub(super) fn at(address: i128, size: i128) -> [(&'static str, Node); 2] {
    [("addr", int(address)), ("size", int(size))]
}

pub(super) fn block(address: i128, size: i128, state: &'static str) -> Node {
    dict([("address", int(address)), ("size", int(size)), ("state", text(state))])
}

/// Returns a segment on the default stream.
pub(super) fn segment(device: i128, address: i128, size: i128, blocks: Vec<Node>) -> Node {
    dict([
        ("device", int(device)),
        ("address", int(address)),
        ("total_size", int(size)),
        ("stream", int(0)),
        ("blocks", Node::List(blocks)),
    ])
}

fn frame() -> Node {
    dict([
        ("name", text("forward")),
        ("filename", text("a/model/with/a/long/path/in/front/of/it.py")),
        ("line", int(70_000)),
    ])
}

/// Returns a small snapshot with most fields that are read, and with some that are not.
pub(super) fn snapshot() -> Node {
    const MIB: i128 = 1 << 20;
    const BASE: i128 = 0x7f00_0000_0000;
    let segment = |address: i128, rest: Vec<(&'static str, Node)>, blocks: Node| {
        let mut pairs = vec![
            ("device", int(0)),
            ("address", int(address)),
            ("frames", list([frame()])),
            ("blocks", blocks),
        ];
        pairs.extend(rest);
        dict(pairs)
    };
    let block = |address: i128, size: i128, requested: i128, state| {
        dict([
            ("address", int(address)),
            ("size", int(size)),
            ("requested_size", int(requested)),
            ("state", text(state)),
            ("frames", list([])),
        ])
    };
    let shared = segment(
        BASE,
        vec![
            ("total_size", int(20 * MIB)),
            ("stream", int(0)),
            ("segment_type", text("large")),
            ("segment_pool_id", tuple([int(0), int(2)])),
            ("is_expandable", Node::Bool(true)),
        ],
        list([
            block(BASE, 4 * MIB, 4 * MIB - 100, "active_allocated"),
            block(BASE + 4 * MIB, 16 * MIB, 0, "inactive"),
        ]),
    );
    let small = segment(
        4096,
        vec![("total_size", int(2 * MIB)), ("stream", int(5)), ("segment_type", text("small"))],
        list([block(4096, 2 * MIB, 2 * MIB, "active_pending_free")]),
    );
    let mut alloc = entry("alloc", at(BASE, 4 * MIB - 100));
    if let Node::Dict(pairs) = &mut alloc {
        pairs[1].1 = int(0x5555_0000_1234);
        pairs.push(("pool_id", tuple([int(3), int(1)])));
    }
    let mut collected = entry("segment_free", at(BASE, 20 * MIB));
    if let Node::Dict(pairs) = &mut collected {
        pairs.push(("user_metadata", text("empty_cache")));
    }
    let oom = entry("oom", [("device_free", int(1234)), ("size", int(1 << 40))]);
    let settings = dict([
        ("PYTORCH_CUDA_ALLOC_CONF", text("expandable_segments:True")),
        ("max_split_size", int(-1)),
        ("garbage_collection_threshold", Node::Float(0.5)),
        ("roundup_power2_divisions", dict([("1", int(0))])),
    ]);
    let traces = list([
        Node::List(vec![entry("segment_alloc", at(BASE, 20 * MIB)), alloc, oom, collected]),
        list([]),
    ]);
    dict([
        ("segments", list([shared, small])),
        ("device_traces", traces),
        ("allocator_settings", settings),
        ("external_annotations", list([dict([("stage", text("START"))])])),
        ("other", Node::None),
    ])
}

impl Node {
    /// Returns a pickle of protocol 4, with every container and text stored in the memo.
    pub(super) fn pickle(&self) -> Vec<u8> {
        let mut out = b"\x80\x04\x95\0\0\0\0\0\0\0\0".to_vec();
        self.write_pickle(&mut out);
        out.push(b'.');
        out
    }

    fn write_pickle(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Bool(b) => out.push(if *b { 0x88 } else { 0x89 }),
            Self::Int(i) => write_int(*i, out),
            Self::Float(f) => {
                out.push(b'G');
                out.extend(f.to_be_bytes());
            }
            Self::Text(text) => write_text(text, out),
            Self::List(items) => {
                out.extend(b"]\x94(");
                items.iter().for_each(|item| item.write_pickle(out));
                out.push(b'e');
            }
            Self::Tuple(items) => {
                out.push(b'(');
                items.iter().for_each(|item| item.write_pickle(out));
                out.extend(b"t\x94");
            }
            Self::Dict(pairs) => {
                out.extend(b"}\x94(");
                for (key, value) in pairs {
                    write_text(key, out);
                    value.write_pickle(out);
                }
                out.push(b'u');
            }
        }
    }

    /// Returns the text that Python's `json.dump` writes. Tuples become lists.
    pub(super) fn json(&self) -> Vec<u8> {
        let mut out = String::new();
        self.write_json(&mut out);
        out.into_bytes()
    }

    fn write_json(&self, out: &mut String) {
        match self {
            Self::None => out.push_str("null"),
            Self::Bool(b) => out.push_str(&b.to_string()),
            Self::Int(i) => out.push_str(&i.to_string()),
            Self::Float(f) => out.push_str(&format!("{f:?}")),
            Self::Text(text) => out.push_str(&format!("{text:?}")),
            Self::List(items) | Self::Tuple(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { ", " });
                    item.write_json(out);
                }
                out.push(']');
            }
            Self::Dict(pairs) => {
                out.push('{');
                for (i, (key, value)) in pairs.iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { ", " });
                    out.push_str(&format!("{key:?}: "));
                    value.write_json(out);
                }
                out.push('}');
            }
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.push(0x8c);
    out.push(u8::try_from(text.len()).unwrap());
    out.extend(text.as_bytes());
    out.push(0x94);
}

/// Writes the shortest opcode that can represent the number, as Python does.
fn write_int(number: i128, out: &mut Vec<u8>) {
    if let Ok(byte) = u8::try_from(number) {
        out.extend([b'K', byte]);
    } else if let Ok(short) = u16::try_from(number) {
        out.push(b'M');
        out.extend(short.to_le_bytes());
    } else if let Ok(int) = i32::try_from(number) {
        out.push(b'J');
        out.extend(int.to_le_bytes());
    } else {
        out.extend([0x8a, 9]);
        out.extend(&number.to_le_bytes()[..9]);
    }
}
