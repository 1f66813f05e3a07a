//! Snapshots as files, in PyTorch's format.
//!
//! One walk over a snapshot drives one of two syntaxes: pickle of protocol 2, which every viewer reads, or
//! JSON. Nothing is built in memory but the table of what a pickle has said before, which is bounded. A file
//! is written beside its place and moved there when it is whole, so a disk that fails leaves the old file.
//!
//! Source of the format: `torch.cuda.memory._snapshot` and its viewers. Of ours are, among the settings of
//! the allocator, `stratalloc` (the version), `limit_bytes`, `total_bytes` and `dropped_entries`.

mod json;
mod pickle;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::{Context, Frame};
use super::event::{Action, BlockLayout, BlockStateName, Entry};
use super::snapshot::{SegmentState, Snapshot};
use crate::ids::PoolId;
use crate::size::PoolKind;
use json::Json;
use pickle::Pickle;

/// How a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Python's pickle, protocol 2.
    Pickle,
    /// JSON, with lists for pairs.
    Json,
}

impl Format {
    /// JSON for a name that ends in `.json` or `.json.gz`, else a pickle.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let inside = if is_compressed(path) { path.with_extension("") } else { path.to_owned() };
        match ends_in(&inside, "json") {
            true => Self::Json,
            false => Self::Pickle,
        }
    }
}

fn ends_in(path: &Path, end: &str) -> bool {
    path.extension().is_some_and(|own| own.eq_ignore_ascii_case(end))
}

/// Whether a file of this name is compressed.
fn is_compressed(path: &Path) -> bool {
    ends_in(path, "gz")
}

/// One syntax. Lists and dictionaries are opened and closed in turn; in a dictionary each value comes after
/// its key.
trait Syntax {
    fn open_dict(&mut self) -> io::Result<()>;
    fn key(&mut self, key: &str) -> io::Result<()>;
    fn close_dict(&mut self) -> io::Result<()>;
    fn open_list(&mut self) -> io::Result<()>;
    fn close_list(&mut self) -> io::Result<()>;
    fn none(&mut self) -> io::Result<()>;
    fn bool(&mut self, value: bool) -> io::Result<()>;
    fn int(&mut self, value: i128) -> io::Result<()>;
    fn float(&mut self, value: f64) -> io::Result<()>;
    fn text(&mut self, text: &str) -> io::Result<()>;
    fn pair(&mut self, a: u64, b: u64) -> io::Result<()>;
    /// Writes a list that was written before under this number once more; false if it must be written, and
    /// may be [remembered](Self::remember_list).
    fn again(&mut self, list: usize) -> io::Result<bool>;
    /// The list that was just closed is that of this number.
    fn remember_list(&mut self, list: usize) -> io::Result<()>;
    fn finish(&mut self) -> io::Result<()>;
}

impl Snapshot {
    /// Writes it. Memory beyond the snapshot stays below 100 MiB, however long the history is.
    ///
    /// # Errors
    ///
    /// What `out` fails with.
    pub fn write(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        match format {
            Format::Pickle => write_to(&mut Pickle::new(out)?, self),
            Format::Json => write_to(&mut Json::new(out), self),
        }
    }

    /// Writes it to a file, in the [format](Format::of) that its name tells, and compressed if the name ends
    /// in `.gz`. The file has its old content or all of the new one, whatever fails.
    ///
    /// # Errors
    ///
    /// What the system fails with; [`io::ErrorKind::Unsupported`] for a compressed file without the feature
    /// `replay`, which brings the means.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        if path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory"));
        }
        let beside = beside(path)?;
        let written = File::create_new(&beside).and_then(|file| {
            let mut out = BufWriter::with_capacity(1 << 18, file);
            match is_compressed(path) {
                true => self.write_compressed(Format::of(path), &mut out)?,
                false => self.write(Format::of(path), &mut out)?,
            }
            out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&beside, path)
        });
        written.inspect_err(|_| {
            // The first error is the one to tell.
            let _ = fs::remove_file(&beside);
        })
    }

    #[cfg(feature = "replay")]
    fn write_compressed(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        let mut packed = flate2::write::GzEncoder::new(out, flate2::Compression::fast());
        self.write(format, &mut packed)?;
        packed.finish().map(drop)
    }

    #[cfg(not(feature = "replay"))]
    fn write_compressed(&self, _: Format, _: &mut dyn Write) -> io::Result<()> {
        let why = "this program was built without the feature replay, which compresses";
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

/// A name of its own in the folder of `path`.
fn beside(path: &Path) -> io::Result<PathBuf> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut own = OsString::from(".");
    own.push(name);
    own.push(format!(".{}.{number}", std::process::id()));
    Ok(path.with_file_name(own))
}

fn write_to(to: &mut dyn Syntax, snapshot: &Snapshot) -> io::Result<()> {
    let device = snapshot.about.device.0;
    to.open_dict()?;
    to.key("segments")?;
    to.open_list()?;
    snapshot.segments.iter().try_for_each(|segment| write_segment(to, device, segment))?;
    to.close_list()?;
    to.key("device_traces")?;
    to.open_list()?;
    for number in 0..=device {
        to.open_list()?;
        if number == device {
            snapshot.entries.iter().try_for_each(|entry| write_entry(to, entry))?;
        }
        to.close_list()?;
    }
    to.close_list()?;
    write_settings(to, snapshot)?;
    to.key("external_annotations")?;
    to.open_list()?;
    for annotation in &snapshot.annotations {
        to.open_dict()?;
        int(to, "device", device.into())?;
        int(to, "time_us", annotation.time_us)?;
        for (key, value) in &annotation.words {
            text(to, key, value)?;
        }
        to.close_dict()?;
    }
    to.close_list()?;
    to.close_dict()?;
    to.finish()
}

fn int(to: &mut dyn Syntax, key: &'static str, value: u64) -> io::Result<()> {
    to.key(key)?;
    to.int(value.into())
}

fn text(to: &mut dyn Syntax, key: &str, value: &str) -> io::Result<()> {
    to.key(key)?;
    to.text(value)
}

fn pool(to: &mut dyn Syntax, key: &'static str, pool: PoolId) -> io::Result<()> {
    to.key(key)?;
    to.pair(pool.capture, pool.user)
}

fn write_segment(to: &mut dyn Syntax, device: u32, segment: &SegmentState) -> io::Result<()> {
    use BlockStateName::{ActiveAllocated, ActivePendingFree};
    let layout = &segment.layout;
    let active = [ActiveAllocated, ActivePendingFree];
    let used = layout.blocks.iter().filter(|block| active.contains(&block.state));
    to.open_dict()?;
    int(to, "device", device.into())?;
    int(to, "address", layout.address)?;
    int(to, "total_size", layout.size_bytes)?;
    int(to, "allocated_size", layout.bytes_in(&[ActiveAllocated]))?;
    int(to, "active_size", layout.bytes_in(&active))?;
    int(to, "requested_size", used.map(|block| block.requested_bytes).sum())?;
    int(to, "stream", layout.stream.0)?;
    let kind = match layout.kind {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    };
    text(to, "segment_type", kind)?;
    pool(to, "segment_pool_id", layout.pool)?;
    to.key("is_expandable")?;
    to.bool(layout.expandable)?;
    write_frames(to, segment.context.as_ref())?;
    to.key("blocks")?;
    to.open_list()?;
    for (block, holder) in layout.blocks.iter().zip(&segment.holders) {
        write_block(to, block, holder.as_ref())?;
    }
    to.close_list()?;
    to.close_dict()
}

fn write_block(
    to: &mut dyn Syntax,
    block: &BlockLayout,
    holder: Option<&Context>,
) -> io::Result<()> {
    to.open_dict()?;
    int(to, "address", block.address)?;
    int(to, "size", block.size_bytes)?;
    int(to, "requested_size", block.requested_bytes)?;
    text(to, "state", block.state.name())?;
    write_frames(to, holder)?;
    to.close_dict()
}

fn write_entry(to: &mut dyn Syntax, entry: &Entry) -> io::Result<()> {
    let event = &entry.event;
    let context = entry.context.as_ref();
    to.open_dict()?;
    text(to, "action", event.action.name())?;
    let place = if event.action == Action::OutOfMemory { "device_free" } else { "addr" };
    int(to, place, event.address)?;
    int(to, "size", event.size_bytes)?;
    int(to, "stream", event.stream.0)?;
    int(to, "time_us", entry.time_us())?;
    text(to, "compile_context", context.and_then(Context::compile_context).unwrap_or("N/A"))?;
    text(to, "user_metadata", context.and_then(Context::metadata).unwrap_or(""))?;
    pool(to, "pool_id", event.pool)?;
    if context.is_some() {
        write_frames(to, context)?;
    }
    to.close_dict()
}

fn write_frames(to: &mut dyn Syntax, context: Option<&Context>) -> io::Result<()> {
    to.key("frames")?;
    let number = context.map(Context::frames_number);
    if let Some(number) = number
        && to.again(number)?
    {
        return Ok(());
    }
    to.open_list()?;
    for Frame { function, file, line } in context.map(Context::frames).unwrap_or_default() {
        to.open_dict()?;
        text(to, "name", &function)?;
        text(to, "filename", &file)?;
        int(to, "line", line.into())?;
        to.close_dict()?;
    }
    to.close_list()?;
    number.map_or(Ok(()), |number| to.remember_list(number))
}

fn write_settings(to: &mut dyn Syntax, snapshot: &Snapshot) -> io::Result<()> {
    let about = &snapshot.about;
    let settings = about.config.settings();
    let limit = |bytes: Option<u64>| bytes.map_or(-1, i128::from);
    to.key("allocator_settings")?;
    to.open_dict()?;
    text(to, "PYTORCH_CUDA_ALLOC_CONF", &about.config_text())?;
    to.key("max_split_size")?;
    to.int(limit(settings.max_split_bytes))?;
    to.key("garbage_collection_threshold")?;
    to.float(settings.garbage_collection_threshold.unwrap_or(0.0))?;
    to.key("expandable_segments")?;
    to.bool(settings.expandable_segments)?;
    to.key("release_lock_on_cudamalloc")?;
    to.bool(settings.release_lock_on_device_allocate)?;
    to.key("graph_capture_record_stream_reuse")?;
    to.bool(settings.graph_capture_record_stream_reuse)?;
    text(to, "stratalloc", env!("CARGO_PKG_VERSION"))?;
    to.key("limit_bytes")?;
    match about.limit_bytes {
        Some(bytes) => to.int(bytes.into())?,
        None => to.none()?,
    }
    int(to, "total_bytes", about.total_bytes)?;
    int(to, "dropped_entries", snapshot.entries.dropped())?;
    to.close_dict()
}
