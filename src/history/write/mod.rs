//! Writes snapshots to files, in PyTorch's format.
//!
//! One function walks over a snapshot and writes it in one of two syntaxes: pickle of protocol 2, which
//! every viewer reads, or JSON. Output is streamed. Only the pickle writer keeps state: the texts and
//! stacks that were written before, at most half a million of each. A failed write leaves the old file
//! unchanged (`files`).
//!
//! Source of the format: `torch.cuda.memory._snapshot` and its viewers. This library adds four values to
//! `allocator_settings`: `stratalloc` (the version), `limit_bytes`, `total_bytes` and `dropped_entries`.

mod json;
mod pickle;

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::context::{Context, Frame};
use super::event::{Action, BlockLayout, BlockStateName, Entry};
use super::snapshot::{SegmentState, Snapshot};
use crate::files::{self, NewFile};
use json::Json;
use pickle::Pickle;

/// The syntax of a snapshot file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Python's pickle, protocol 2.
    Pickle,
    /// JSON, with pairs as lists.
    Json,
}

impl Format {
    /// Returns JSON for a name that ends in `.json` or `.json.gz`, else pickle.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let inside = if is_compressed(path) { path.with_extension("") } else { path.to_owned() };
        if ends_in(&inside, "json") { Self::Json } else { Self::Pickle }
    }
}

fn ends_in(path: &Path, end: &str) -> bool {
    path.extension().is_some_and(|own| own.eq_ignore_ascii_case(end))
}

/// Returns true if a file of this name is written compressed.
fn is_compressed(path: &Path) -> bool {
    ends_in(path, "gz")
}

/// A scalar value or a pair.
#[derive(Clone, Copy)]
enum Value<'a> {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(&'a str),
    Pair(u64, u64),
}

impl From<u64> for Value<'_> {
    fn from(value: u64) -> Self {
        Self::Int(value.into())
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(value)
    }
}

/// A container.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Dict,
    List,
}

/// A syntax. The container that was opened last is closed first. In a dictionary, each key is followed
/// by its value.
trait Syntax {
    fn open(&mut self, group: Group) -> io::Result<()>;
    fn key(&mut self, key: &str) -> io::Result<()>;
    fn value(&mut self, value: Value<'_>) -> io::Result<()>;
    fn close(&mut self, group: Group) -> io::Result<()>;
    /// Writes a reference to the list that was remembered under `list`. Returns false if there is none.
    /// The caller must then write the list, and may [remember](Self::remember_list) it.
    fn again(&mut self, _list: usize) -> io::Result<bool> {
        Ok(false)
    }
    /// Remembers the list that was just closed, under the number `list`, if the syntax has references.
    fn remember_list(&mut self, _list: usize) -> io::Result<()> {
        Ok(())
    }
    fn finish(&mut self) -> io::Result<()>;
}

impl Snapshot {
    /// Writes the snapshot. Uses less than 100 MiB of memory in addition to the snapshot itself, for a
    /// history of any length.
    ///
    /// # Errors
    ///
    /// Any error of `out`.
    pub fn write(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        match format {
            Format::Pickle => write_to(&mut Pickle::new(out)?, self),
            Format::Json => write_to(&mut Json::new(out), self),
        }
    }

    /// Writes the snapshot to a file. The name determines the [format](Format::of). A file whose name
    /// ends in `.gz` is compressed. If writing fails, the file keeps its old content.
    ///
    /// # Errors
    ///
    /// Any error of the file system; [`io::ErrorKind::Unsupported`] for a compressed file without the
    /// feature `gzip`, which contains the compression.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut file = NewFile::create(path)?;
        self.write_as(path, &mut file)?;
        file.finish()
    }

    /// Writes the snapshot to the first of `paths` where no file is, and returns this path. All must be in
    /// one folder. The first determines the format.
    ///
    /// # Errors
    ///
    /// As for [`save`](Self::save); [`io::ErrorKind::AlreadyExists`] if there is a file at each path.
    pub(crate) fn save_first_free(
        &self,
        paths: impl Iterator<Item = PathBuf>,
    ) -> io::Result<PathBuf> {
        let mut paths = paths.peekable();
        let first = paths.peek().cloned().unwrap_or_default();
        files::write_first_free(paths, |file| self.write_as(&first, file))
    }

    /// Writes the snapshot as a file of this name has it.
    fn write_as(&self, path: &Path, file: &mut NewFile) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 18, file);
        match is_compressed(path) {
            true => self.write_compressed(Format::of(path), &mut out)?,
            false => self.write(Format::of(path), &mut out)?,
        }
        out.flush()
    }

    #[cfg(feature = "gzip")]
    fn write_compressed(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        let mut packed = flate2::write::GzEncoder::new(out, flate2::Compression::fast());
        self.write(format, &mut packed)?;
        packed.finish().map(drop)
    }

    #[cfg(not(feature = "gzip"))]
    fn write_compressed(&self, _: Format, _: &mut dyn Write) -> io::Result<()> {
        let why = "this program was built without the feature gzip, which compresses";
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

fn write_to(to: &mut dyn Syntax, snapshot: &Snapshot) -> io::Result<()> {
    let device = snapshot.about.device.0;
    to.open(Group::Dict)?;
    put_list(to, "segments", &snapshot.segments, |to, segment| write_segment(to, device, segment))?;
    put_list(to, "device_traces", 0..=device, |to, number| {
        to.open(Group::List)?;
        if number == device {
            snapshot.entries.iter().try_for_each(|entry| write_entry(to, entry))?;
        }
        to.close(Group::List)
    })?;
    write_settings(to, snapshot)?;
    put_list(to, "external_annotations", &snapshot.annotations, |to, annotation| {
        to.open(Group::Dict)?;
        put(to, "device", u64::from(device))?;
        put(to, "time_us", annotation.time_us)?;
        for (key, value) in &annotation.words {
            put(to, key, value.as_str())?;
        }
        to.close(Group::Dict)
    })?;
    to.close(Group::Dict)?;
    to.finish()
}

fn put<'v>(to: &mut dyn Syntax, key: &str, value: impl Into<Value<'v>>) -> io::Result<()> {
    to.key(key)?;
    to.value(value.into())
}

/// Writes a key and a list. `write` writes one item.
fn put_list<I: IntoIterator>(
    to: &mut dyn Syntax,
    key: &str,
    items: I,
    write: impl Fn(&mut dyn Syntax, I::Item) -> io::Result<()>,
) -> io::Result<()> {
    to.key(key)?;
    to.open(Group::List)?;
    items.into_iter().try_for_each(|item| write(to, item))?;
    to.close(Group::List)
}

fn write_segment(to: &mut dyn Syntax, device: u32, segment: &SegmentState) -> io::Result<()> {
    let layout = &segment.layout;
    let used = layout.blocks.iter().filter(|block| block.state != BlockStateName::Inactive);
    to.open(Group::Dict)?;
    put(to, "device", u64::from(device))?;
    put(to, "address", layout.address)?;
    put(to, "total_size", layout.size_bytes)?;
    put(to, "allocated_size", layout.bytes_in(&[BlockStateName::ActiveAllocated]))?;
    put(to, "active_size", layout.bytes_in(&BlockStateName::ACTIVE))?;
    put(to, "requested_size", used.map(|block| block.requested_bytes).sum::<u64>())?;
    put(to, "stream", layout.stream.0)?;
    put(to, "segment_type", layout.kind.name())?;
    put(to, "segment_pool_id", Value::Pair(layout.pool.capture, layout.pool.user))?;
    put(to, "is_expandable", Value::Bool(layout.expandable))?;
    // PyTorch has no such key, so it is absent from all other segments.
    if layout.asleep {
        put(to, "is_asleep", Value::Bool(true))?;
    }
    write_frames(to, segment.context.as_ref())?;
    let blocks = layout.blocks.iter().zip(&segment.holders);
    put_list(to, "blocks", blocks, |to, (block, holder)| write_block(to, block, holder.as_ref()))?;
    to.close(Group::Dict)
}

fn write_block(
    to: &mut dyn Syntax,
    block: &BlockLayout,
    holder: Option<&Context>,
) -> io::Result<()> {
    to.open(Group::Dict)?;
    put(to, "address", block.address)?;
    put(to, "size", block.size_bytes)?;
    put(to, "requested_size", block.requested_bytes)?;
    put(to, "state", block.state.name())?;
    write_frames(to, holder)?;
    to.close(Group::Dict)
}

fn write_entry(to: &mut dyn Syntax, entry: &Entry) -> io::Result<()> {
    let event = &entry.event;
    let context = entry.context.as_ref();
    to.open(Group::Dict)?;
    put(to, "action", event.action.name())?;
    let key = if event.action == Action::OutOfMemory { "device_free" } else { "addr" };
    put(to, key, event.address)?;
    put(to, "size", event.size_bytes)?;
    put(to, "stream", event.stream.0)?;
    put(to, "time_us", entry.time_us())?;
    put(to, "compile_context", context.and_then(Context::compile_context).unwrap_or("N/A"))?;
    put(to, "user_metadata", context.and_then(Context::metadata).unwrap_or(""))?;
    put(to, "pool_id", Value::Pair(event.pool.capture, event.pool.user))?;
    if context.is_some() {
        write_frames(to, context)?;
    }
    to.close(Group::Dict)
}

fn write_frames(to: &mut dyn Syntax, context: Option<&Context>) -> io::Result<()> {
    to.key("frames")?;
    let number = context.map(Context::frames_number);
    if let Some(number) = number
        && to.again(number)?
    {
        return Ok(());
    }
    to.open(Group::List)?;
    for Frame { function, file, line } in context.map(Context::frames).unwrap_or_default() {
        to.open(Group::Dict)?;
        put(to, "name", function.as_str())?;
        put(to, "filename", file.as_str())?;
        put(to, "line", u64::from(line))?;
        to.close(Group::Dict)?;
    }
    to.close(Group::List)?;
    number.map_or(Ok(()), |number| to.remember_list(number))
}

fn write_settings(to: &mut dyn Syntax, snapshot: &Snapshot) -> io::Result<()> {
    let about = &snapshot.about;
    let settings = about.config.settings();
    to.key("allocator_settings")?;
    to.open(Group::Dict)?;
    put(to, "PYTORCH_CUDA_ALLOC_CONF", about.config_text().as_str())?;
    put(to, "max_split_size", Value::Int(settings.max_split_bytes.map_or(-1, i128::from)))?;
    let threshold = settings.garbage_collection_threshold.unwrap_or(0.0);
    put(to, "garbage_collection_threshold", Value::Float(threshold))?;
    for (key, is_on) in [
        ("expandable_segments", settings.expandable_segments),
        ("release_lock_on_cudamalloc", settings.release_lock_on_device_allocate),
        ("graph_capture_record_stream_reuse", settings.graph_capture_record_stream_reuse),
    ] {
        put(to, key, Value::Bool(is_on))?;
    }
    put(to, "stratalloc", env!("CARGO_PKG_VERSION"))?;
    put(to, "limit_bytes", about.limit_bytes.map_or(Value::None, Value::from))?;
    put(to, "total_bytes", about.total_bytes)?;
    put(to, "dropped_entries", snapshot.entries.dropped())?;
    to.close(Group::Dict)
}
