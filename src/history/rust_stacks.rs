//! Call stacks of the program: Rust functions, and C functions that called them.
//!
//! Gathering a stack stores its return addresses only. Equal stacks are stored once, in a table of live
//! stacks. So a million blocks allocated at one place share one stack. Function names are looked up
//! when the frames are read.

use std::hash::BuildHasher as _;
use std::sync::{Arc, Weak};

use hashbrown::{DefaultHashBuilder, HashMap};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::context::{Frame, Stack, StackProvider};
use crate::sync::walk;

/// The most addresses of a stack that are kept, innermost first.
const ADDRESSES_MAX: usize = 128;
const SHARDS: usize = 16;

/// Gathers the stack of the calling thread: its Rust and C functions. Omits the innermost frames if they
/// belong to this library, and the runtime's frames outside `main` or the thread's function.
///
/// Function names need symbols in the program, and lines need debug information
/// (`debug = "line-tables-only"`). A frame without a symbol is shown as its address. Names of functions
/// in a library that was unloaded before the lookup are not found.
#[derive(Debug, Default)]
pub struct RustStacks {
    table: Arc<StackTable>,
}

/// The stacks of one shard, by their addresses.
type ByAddresses = HashMap<Arc<[usize]>, Weak<Addresses>>;

/// All live stacks, distributed over shards by their hash.
#[derive(Debug, Default)]
struct StackTable {
    hasher: DefaultHashBuilder,
    shards: [Mutex<ByAddresses>; SHARDS],
}

#[derive(Debug)]
struct Addresses {
    addresses: Arc<[usize]>,
    table: Arc<StackTable>,
}

impl RustStacks {
    /// Creates a provider without stacks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of different stacks that are alive.
    #[must_use]
    pub fn held(&self) -> usize {
        self.table.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

impl StackProvider for RustStacks {
    fn gather(&self) -> Option<Arc<dyn Stack>> {
        let mut addresses = SmallVec::<[usize; ADDRESSES_MAX]>::new();
        walk(|address| {
            addresses.push(address);
            addresses.len() < ADDRESSES_MAX
        });
        (!addresses.is_empty()).then(|| self.table.stack(&addresses) as Arc<dyn Stack>)
    }
}

impl StackTable {
    fn shard(&self, addresses: &[usize]) -> &Mutex<ByAddresses> {
        let [low, ..] = self.hasher.hash_one(addresses).to_le_bytes();
        &self.shards[usize::from(low) % SHARDS]
    }

    /// Returns the stack with these addresses. Equal stacks share one value.
    fn stack(self: &Arc<Self>, addresses: &[usize]) -> Arc<Addresses> {
        let mut shard = self.shard(addresses).lock();
        let known = shard.get_key_value(addresses);
        if let Some(held) = known.and_then(|(_, held)| held.upgrade()) {
            return held;
        }
        // If the table has an entry whose stack is being dropped, this replaces it.
        let key = known.map_or_else(|| addresses.into(), |(key, _)| Arc::clone(key));
        let new = Arc::new(Addresses { addresses: Arc::clone(&key), table: Arc::clone(self) });
        shard.insert(key, Arc::downgrade(&new));
        new
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        let mut shard = self.table.shard(&self.addresses).lock();
        // By now the entry may belong to a newer, equal stack. Then it stays.
        if shard.get(&self.addresses).is_some_and(|held| held.strong_count() == 0) {
            shard.remove(&self.addresses);
        }
    }
}

impl Stack for Addresses {
    fn frames(&self) -> Vec<Frame> {
        let mut frames = Vec::new();
        for address in &*self.addresses {
            let before = frames.len();
            backtrace::resolve(std::ptr::without_provenance_mut(*address), |symbol| {
                let path = symbol.filename().map(|path| path.to_string_lossy().into_owned());
                frames.push(Frame {
                    // `#` omits the compiler's hash.
                    function: symbol.name().map(|name| format!("{name:#}")).unwrap_or_default(),
                    file: path.unwrap_or_default(),
                    line: symbol.lineno().unwrap_or(0),
                });
            });
            if frames.len() == before {
                frames.push(Frame::default());
            }
            for frame in frames[before..].iter_mut().filter(|frame| frame.function.is_empty()) {
                frame.function = format!("{address:#x}");
            }
        }
        without_ends(frames)
    }
}

/// Returns the frames of the program. Removes the frames of this library at the inner end, and those of
/// the runtime that called `main` or the thread's function at the outer end.
fn without_ends(mut frames: Vec<Frame>) -> Vec<Frame> {
    let runtime = |frame: &Frame| frame.function.contains("__rust_begin_short_backtrace");
    if let Some(at) = frames.iter().position(runtime) {
        frames.truncate(at);
        while frames.last().is_some_and(is_glue) {
            frames.pop();
        }
    }
    let ours = frames.iter().take_while(|frame| is_ours(frame) || is_glue(frame));
    let ours = ours.enumerate().filter(|(_, frame)| is_ours(frame)).last();
    match ours.map_or(0, |(at, _)| at + 1) {
        // All frames belong to this library, as in its command-line program. They are kept.
        all if all == frames.len() => frames,
        ours => frames.split_off(ours),
    }
}

/// Returns true if a frame belongs to this library or to the code that walks the stack. With debug
/// information, function names are short, so the file decides. Without debug information, the
/// function's path decides.
fn is_ours(frame: &Frame) -> bool {
    const SOURCES: [&str; 2] = [
        concat!(env!("CARGO_MANIFEST_DIR"), "/src/"),
        concat!(env!("CARGO_MANIFEST_DIR"), "/strategies/"),
    ];
    let (file, path) = (&*frame.file, outer_path(frame));
    let of_c = |name: &str| name.starts_with("stratalloc_") && !name.contains("::");
    // The frame may be in an implementation of a trait of this library, for a type of the standard
    // library or for an unnamed type.
    let (of, named) = path.split_once(" as ").unwrap_or((path, ""));
    let nobodys = is_path_of_std(of) || !of.contains("::");
    SOURCES.iter().any(|own| file.starts_with(own))
        || file.contains("/backtrace-0.")
        || path.starts_with("stratalloc::")
        || path.starts_with("backtrace::")
        || of_c(path)
        || nobodys && named.starts_with("stratalloc::")
}

/// Returns true if a frame belongs to the standard library. Such frames lie between this library's
/// functions and its closures.
fn is_glue(frame: &Frame) -> bool {
    let from_std = ["/library/core/", "/library/alloc/", "/library/std/"];
    from_std.iter().any(|own| frame.file.contains(own)) || is_path_of_std(outer_path(frame))
}

fn outer_path(frame: &Frame) -> &str {
    frame.function.trim_start_matches(['<', '&'])
}

fn is_path_of_std(path: &str) -> bool {
    ["core::", "alloc::", "std::", "__rust_try"].iter().any(|own| path.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(functions: &[&str]) -> Vec<String> {
        let frame = |name: &&str| Frame { function: (*name).to_owned(), ..Frame::default() };
        let left = without_ends(functions.iter().map(frame).collect());
        left.into_iter().map(|frame| frame.function).collect()
    }

    #[test]
    fn frames_of_this_library_and_the_runtime_are_omitted() {
        let functions = [
            "backtrace::backtrace::trace_unsynchronized",
            "<stratalloc::history::rust_stacks::RustStacks as stratalloc::history::StackProvider>::gather",
            "std::panicking::catch_unwind",
            "<alloc::boxed::Box<T> as stratalloc::allocator::DeviceAllocator>::allocate",
            "stratalloc_allocate",
            "core::ops::function::FnOnce::call_once",
            "<model::Weights as stratalloc::handle::Load>::load",
            "stratalloc::handle::Handle::zeroed",
            "model::main",
            "core::ops::function::FnOnce::call_once",
            "std::sys::backtrace::__rust_begin_short_backtrace",
            "std::rt::lang_start",
        ];
        assert_eq!(names(&functions), functions[5..9]);
        assert_eq!(names(&functions[..5]), functions[..5], "it is all there is");
        assert_eq!(names(&["main"]), ["main"]);
        assert!(names(&[]).is_empty());
    }

    #[test]
    fn files_distinguish_short_names() {
        let own = concat!(env!("CARGO_MANIFEST_DIR"), "/src/handle/mod.rs");
        let files = [
            ("trace", "/cargo/registry/backtrace-0.3.77/src/backtrace/mod.rs"),
            ("gather", own),
            ("do_call", "/rustc/5980/library/std/src/panicking.rs"),
            ("uninit<u8>", own),
            ("serve", concat!(env!("CARGO_MANIFEST_DIR"), "/examples/leak.rs")),
            ("uninit<u8>", own),
        ];
        let frame = |(function, file): (&str, &str)| Frame {
            function: function.to_owned(),
            file: file.to_owned(),
            line: 1,
        };
        let left = without_ends(files.into_iter().map(frame).collect());
        let left: Vec<_> = left.iter().map(|frame| &*frame.function).collect();
        assert_eq!(left, ["serve", "uninit<u8>"]);
    }
}
