//! History, stacks and snapshot files for programs in other languages.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use super::gate::Gate;
use super::guard::{Failure, Status, status};
use super::pointers::{read, read_any, store};
use super::table;
use stratalloc::allocator::Recording;
use stratalloc::history::{
    Action, Format, Frame, NameKind, RecordOptions, Stack, StackLevel, StackProvider,
};

/// A frame of a stack.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StackFrame {
    /// The name of the function, in UTF-8. Null if unknown.
    pub function: *const c_char,
    /// The source file, in UTF-8. Null if unknown.
    pub file: *const c_char,
    /// The line. 0 if unknown.
    pub line: u32,
}

/// A source of call stacks that the caller implements. The functions are called on any thread, with no
/// lock of the library held. They may allocate and free, and must not unwind. `user` is passed to each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StackSource {
    /// Returns the calling thread's stack, or null. The stack is a pointer that only the source
    /// interprets. The library keeps it until it calls `release`.
    pub gather: Option<unsafe extern "C" fn(user: *mut c_void) -> *mut c_void>,
    /// Releases a stack that `gather` returned. Called exactly once for each, unless
    /// `stratalloc_callbacks_end` has stopped the calls.
    pub release: Option<unsafe extern "C" fn(user: *mut c_void, stack: *mut c_void)>,
    /// Stores at most `room` frames of a stack, innermost first, and returns their number. The texts in
    /// the frames must stay valid until the calling thread's next call of `frames`.
    pub frames: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            stack: *mut c_void,
            frames: *mut StackFrame,
            room: usize,
        ) -> usize,
    >,
    /// Must stay valid until the allocator was destroyed and all its stacks were released.
    pub user: *mut c_void,
}

/// Receives the next bytes of a snapshot. Any result other than 0 aborts the snapshot.
pub type SnapshotWriter =
    Option<unsafe extern "C" fn(user: *mut c_void, bytes: *const c_void, size: usize) -> c_int>;

/// The maximum number of frames that are requested for one stack.
const FRAMES_MAX: usize = 512;

impl StackFrame {
    const EMPTY: Self = Self { function: std::ptr::null(), file: std::ptr::null(), line: 0 };

    /// # Safety
    ///
    /// Both texts end with a zero byte and stay unchanged during this call, unless they are null.
    unsafe fn read(self) -> Frame {
        let text = |from: *const c_char| match from.is_null() {
            true => String::new(),
            // SAFETY: required of the caller (`# Safety`).
            false => unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned(),
        };
        Frame { function: text(self.function), file: text(self.file), line: self.line }
    }
}

/// A [`StackSource`] whose functions are all present.
#[derive(Clone, Debug)]
struct Source {
    gate: Arc<Gate>,
    gather: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    release: unsafe extern "C" fn(*mut c_void, *mut c_void),
    frames: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut StackFrame, usize) -> usize,
    user: *mut c_void,
}

// SAFETY: `StackSource` requires that its functions can be called on any thread with this pointer.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

/// A stack that a source gathered. The source releases it on drop.
#[derive(Debug)]
struct Gathered {
    source: Source,
    stack: *mut c_void,
}

// SAFETY: `StackSource` requires that stacks can be read and released on any thread.
unsafe impl Send for Gathered {}
// SAFETY: as above.
unsafe impl Sync for Gathered {}

impl StackProvider for Source {
    fn gather(&self) -> Option<Arc<dyn Stack>> {
        let inside = self.gate.enter()?;
        // SAFETY: the caller's function, with the caller's pointer.
        let stack = unsafe { (self.gather)(self.user) };
        drop(inside);
        let gathered = || Arc::new(Gathered { source: self.clone(), stack }) as Arc<dyn Stack>;
        (!stack.is_null()).then(gathered)
    }
}

impl Stack for Gathered {
    fn frames(&self) -> Vec<Frame> {
        let mut frames = [StackFrame::EMPTY; FRAMES_MAX];
        let Source { frames: collect, user, .. } = self.source;
        let Some(_inside) = self.source.gate.enter() else { return Vec::new() };
        // SAFETY: the caller's function, with the caller's pointers and `FRAMES_MAX` writable frames.
        let count = unsafe { collect(user, self.stack, frames.as_mut_ptr(), FRAMES_MAX) };
        // SAFETY: the source has filled `count` frames, and their texts stay valid until the next call
        // of `frames` on this thread.
        frames.iter().take(count).map(|frame| unsafe { frame.read() }).collect()
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        let Some(_inside) = self.source.gate.enter() else { return };
        // SAFETY: the caller's function, with the caller's pointers, once.
        unsafe { (self.source.release)(self.source.user, self.stack) };
    }
}

/// Returns the pointer that a source returned for this stack. Null if the stack is not from a
/// [`StackSource`].
pub(super) fn stack_of(stack: Option<&dyn Any>) -> *mut c_void {
    let gathered = stack.and_then(|stack| stack.downcast_ref::<Gathered>());
    gathered.map_or(std::ptr::null_mut(), |gathered| gathered.stack)
}

/// Starts recording the allocator's actions, or changes the options of a running recording. `stacks`
/// selects the stacks that are gathered: 0 none, 1 those of live blocks, 2 also those of entries that
/// allocate memory, 3 also those of entries that free memory. The newest `entries_max` entries are
/// kept. `skip` is a list of actions that are not recorded, with PyTorch's names and separated by
/// commas. Null skips none. If `clear` is not 0, earlier entries are dropped.
///
/// # Safety
///
/// `skip` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_start(
    handle: u64,
    stacks: u32,
    entries_max: u64,
    skip: *const c_char,
    clear: c_int,
) -> Status {
    status(|| {
        let wrong = format_args!("stacks is {stacks}, and must be 0, 1, 2 or 3");
        let level = match stacks {
            0 => StackLevel::Never,
            1 => StackLevel::OfLiveBlocks,
            2 => StackLevel::OfAllocations,
            3 => StackLevel::OfFrees,
            _ => return Err(Failure::invalid(wrong)),
        };
        // SAFETY: required of the caller (`# Safety`).
        let skip = unsafe { read_any(skip, "skip") }?.unwrap_or_default();
        let names = skip.split(',').map(str::trim).filter(|name| !name.is_empty());
        let skip = names.map(|name| {
            Action::from_name(name)
                .ok_or_else(|| Failure::invalid(format_args!("skip: no action is called {name:?}")))
        });
        let skip: Vec<Action> = skip.collect::<Result<_, _>>()?;
        let entries_max = usize::try_from(entries_max).unwrap_or(usize::MAX);
        let options = RecordOptions::at_most(entries_max).with_stacks(level).without(&skip);
        let options = if clear == 0 { options } else { options.clearing() };
        table::find(handle)?.history().start(&options);
        Ok(())
    })
}

/// Stops recording and drops all entries.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_stop(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().stop())
}

/// Stores 1 if recording is on, 0 if it is off.
///
/// # Safety
///
/// `on` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_is_on(handle: u64, on: *mut c_int) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(on, "on", || Ok(c_int::from(table::find(handle)?.history().is_on()))) }
}

/// Drops all entries. Recording continues, and live blocks keep their stacks.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_clear(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().clear())
}

/// Sets the source of stacks. Null removes it.
///
/// # Safety
///
/// `source` is null, or may be read and meets the requirements of `stratalloc_stack_source`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_set_stack_source(
    handle: u64,
    source: *const StackSource,
) -> Status {
    status(|| {
        let provider: Option<Arc<dyn StackProvider>> = match source.is_null() {
            true => None,
            false => {
                // SAFETY: required of the caller (`# Safety`).
                let StackSource { gather, release, frames, user } =
                    unsafe { source.read_unaligned() };
                let missing = || Failure::null("a function of the source");
                let release = release.ok_or_else(missing)?;
                Some(Arc::new(Source {
                    gate: Gate::of(release as usize),
                    gather: gather.ok_or_else(missing)?,
                    release,
                    frames: frames.ok_or_else(missing)?,
                    user,
                }))
            }
        };
        table::find(handle)?.history().set_stack_provider(provider);
        Ok(())
    })
}

/// Removes the source of stacks before it becomes invalid, for example before an interpreter exits.
/// Drops the recorded entries. Under `layers:[track]`, live blocks keep the frames of their stacks for
/// the leak report at the end of the process. Without that layer, recording stops.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_drop_stack_source(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().drop_stack_provider())
}

/// Sets the metadata of entries that are recorded from now on. Null removes it.
///
/// # Safety
///
/// `metadata` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_set_metadata(
    handle: u64,
    metadata: *const c_char,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let text = unsafe { read_any(metadata, "metadata") }?;
        table::find(handle)?.history().set_metadata(text);
        Ok(())
    })
}

/// Returns the calling thread's metadata, in UTF-8 with a terminating zero, or null if it has none. The
/// text must stay valid until the same thread next runs code outside the library.
pub type ThreadMetadata = Option<unsafe extern "C" fn() -> *const c_char>;

/// Sets a function that returns the metadata of entries. If it returns null, the metadata of
/// `stratalloc_history_set_metadata` is used. Null removes the function. It is called on the thread of
/// each recorded request and free. It must not allocate from the allocator, and must not unwind.
///
/// # Safety
///
/// `source` may be called on any thread until it was replaced and all calls of it have returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_set_thread_metadata(
    handle: u64,
    source: ThreadMetadata,
) -> Status {
    status(|| {
        let source = source.map(|source| -> stratalloc::history::ThreadMetadata {
            Arc::new(move || {
                // SAFETY: the caller's function.
                let text = unsafe { source() };
                if text.is_null() {
                    return None;
                }
                // SAFETY: the source keeps the text valid until this thread runs code outside the
                // library.
                Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into())
            })
        });
        table::find(handle)?.history().set_thread_metadata(source);
        Ok(())
    })
}

/// Adds a name to the calling thread's names of this kind.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
unsafe fn push(names: NameKind, name: *const c_char) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        names.push(unsafe { read(name, "name") }?);
        Ok(())
    })
}

/// Removes the calling thread's newest name of this kind.
fn pop(names: NameKind) -> Status {
    status(|| match names.pop() {
        true => Ok(()),
        false => Err(Failure::invalid("the thread has no name to take back")),
    })
}

/// Pushes a name for the calling thread. Until it is popped, the stacks of entries have it as their
/// innermost frame. Each name must be removed by a `stratalloc_context_pop` on the same thread.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_context_push(name: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { push(NameKind::Scope, name) }
}

/// Removes the calling thread's newest name.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_context_pop() -> Status {
    pop(NameKind::Scope)
}

/// The maximum number of pairs in one annotation.
const ANNOTATION_PAIRS_MAX: usize = 64;

/// Records `pairs` keys and values with the current time, if recording is on. Snapshots list the newest
/// 65,536 annotations under `external_annotations`. PyTorch's annotations have two keys: `name`, and
/// `stage`, whose value is `START` or `END`.
///
/// # Safety
///
/// `words` points to `2 * pairs` texts, each key followed by its value; each text ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_annotate(
    handle: u64,
    words: *const *const c_char,
    pairs: usize,
) -> Status {
    status(|| {
        if words.is_null() || pairs == 0 || pairs > ANNOTATION_PAIRS_MAX {
            let text = format_args!("words is null, or pairs is not 1 to {ANNOTATION_PAIRS_MAX}");
            return Err(Failure::invalid(text));
        }
        // SAFETY: not null, and the rest is required of the caller (`# Safety`).
        let words = unsafe { std::slice::from_raw_parts(words, 2 * pairs) };
        let mut metadata = Vec::with_capacity(pairs);
        for pair in words.chunks_exact(2) {
            // SAFETY: required of the caller (`# Safety`).
            let key = unsafe { read(pair[0], "key") }?;
            // SAFETY: required of the caller (`# Safety`).
            metadata.push((key, unsafe { read(pair[1], "value") }?));
        }
        table::find(handle)?.history().annotate(metadata);
        Ok(())
    })
}

/// Pushes the name of the compiled region that the calling thread runs. Entries list the name in the
/// field `compile_context`. Each name must be removed by a `stratalloc_compile_context_pop` on the same
/// thread.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_compile_context_push(name: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { push(NameKind::CompileContext, name) }
}

/// Removes the calling thread's newest compiled region.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_compile_context_pop() -> Status {
    pop(NameKind::CompileContext)
}

/// Writes a file for PyTorch's viewers, with all segments, blocks and the history as of one moment. The
/// file is a pickle, or JSON if its name ends in `.json` or `.json.gz`. It is compressed if the name
/// ends in `.gz`. If the call fails, the file keeps its old content.
///
/// # Safety
///
/// `path` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_snapshot_save(handle: u64, path: *const c_char) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let path = unsafe { read(path, "path") }?;
        let snapshot = table::find(handle)?.allocator.snapshot();
        let failed = |error| Failure::invalid(format_args!("{path}: {error}"));
        snapshot.save(Path::new(path)).map_err(failed)
    })
}

/// Calls `write` with `user` and the content that `stratalloc_snapshot_save` writes to a file, in
/// pieces. The content is a pickle if `format` is 0, and JSON if it is 1.
///
/// # Safety
///
/// `write` may be called with `user` during this call, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_snapshot_write(
    handle: u64,
    format: u32,
    write: SnapshotWriter,
    user: *mut c_void,
) -> Status {
    status(|| {
        let wrong = format_args!("format is {format}, and must be 0 or 1");
        let format = match format {
            0 => Format::Pickle,
            1 => Format::Json,
            _ => return Err(Failure::invalid(wrong)),
        };
        let pieces = Pieces { write: write.ok_or_else(|| Failure::null("write"))?, user };
        let mut pieces = io::BufWriter::with_capacity(1 << 16, pieces);
        let snapshot = table::find(handle)?.allocator.snapshot();
        let written = snapshot.write(format, &mut pieces).and_then(|()| pieces.flush());
        let failed = |error| Failure::invalid(format_args!("the snapshot was not taken: {error}"));
        written.map_err(failed)
    })
}

/// An [`io::Write`] that calls the caller's function.
struct Pieces {
    write: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    user: *mut c_void,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the caller's function, with the caller's pointer and our bytes.
        match unsafe { (self.write)(self.user, bytes.as_ptr().cast(), bytes.len()) } {
            0 => Ok(bytes.len()),
            other => Err(io::Error::other(format!("the writer answered {other}"))),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
