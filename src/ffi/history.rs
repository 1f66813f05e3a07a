//! History, stacks and snapshots for programs in other languages.

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
use crate::history::{
    Action, Format, Frame, NameKind, RecordOptions, Stack, StackLevel, StackProvider,
};

/// A frame of a stack.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StackFrame {
    /// The function, in UTF-8; null if nobody knows.
    pub function: *const c_char,
    /// Its file, in UTF-8; null if nobody knows.
    pub file: *const c_char,
    /// The line; 0 if nobody knows.
    pub line: u32,
}

/// Where stacks come from. The functions are called on any thread, with no lock of the library held; they may
/// allocate and free, and must not unwind. `user` is handed to each of them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StackSource {
    /// Says where the calling thread is, as a pointer that means something to the source, or null. The
    /// library holds it from then on.
    pub gather: Option<unsafe extern "C" fn(user: *mut c_void) -> *mut c_void>,
    /// Takes a pointer of `gather` back, exactly once for each.
    pub release: Option<unsafe extern "C" fn(user: *mut c_void, stack: *mut c_void)>,
    /// Stores at most `room` frames of a stack, the innermost first, and returns how many. Their texts stay
    /// as they are until the calling thread asks again.
    pub frames: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            stack: *mut c_void,
            frames: *mut StackFrame,
            room: usize,
        ) -> usize,
    >,
    /// Stays valid until the allocator was destroyed and every stack released.
    pub user: *mut c_void,
}

/// Takes the next bytes of a snapshot; anything but 0 ends it.
pub type SnapshotWriter =
    Option<unsafe extern "C" fn(user: *mut c_void, bytes: *const c_void, size: usize) -> c_int>;

/// The most frames of a stack that are asked for.
const FRAMES_MAX: usize = 512;

impl StackFrame {
    const EMPTY: Self = Self { function: std::ptr::null(), file: std::ptr::null(), line: 0 };

    /// # Safety
    ///
    /// Both texts end with a zero byte and stay as they are during this call, unless they are null.
    unsafe fn read(self) -> Frame {
        let text = |from: *const c_char| match from.is_null() {
            true => String::new(),
            // SAFETY: our caller's promise.
            false => unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned(),
        };
        Frame { function: text(self.function), file: text(self.file), line: self.line }
    }
}

/// A source's functions, all there.
#[derive(Clone, Debug)]
struct Source {
    gate: Arc<Gate>,
    gather: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    release: unsafe extern "C" fn(*mut c_void, *mut c_void),
    frames: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut StackFrame, usize) -> usize,
    user: *mut c_void,
}

// SAFETY: the caller lets the functions be called on any thread with this pointer.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

/// A stack of a source, released when it is dropped.
#[derive(Debug)]
struct Gathered {
    source: Source,
    stack: *mut c_void,
}

// SAFETY: the caller lets stacks be released and asked on any thread.
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
        let Source { frames: ask, user, .. } = self.source;
        let Some(_inside) = self.source.gate.enter() else { return Vec::new() };
        // SAFETY: the caller's function, with the caller's pointers and as much room as is said.
        let count = unsafe { ask(user, self.stack, frames.as_mut_ptr(), FRAMES_MAX) };
        // SAFETY: the source filled them, and their texts stay until it is asked again.
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

/// A stack as its source gathered it, or null for one that comes from elsewhere.
pub(super) fn stack_of(stack: Option<&dyn Any>) -> *mut c_void {
    let gathered = stack.and_then(|stack| stack.downcast_ref::<Gathered>());
    gathered.map_or(std::ptr::null_mut(), |gathered| gathered.stack)
}

/// Starts recording what the allocator does, or goes on with other options. `stacks` says whose stacks are
/// gathered: 0 nobody's, 1 of live blocks, 2 of entries that hand out memory too, 3 of all. At most
/// `entries_max` entries are kept, the newest. `skip` names actions that are not recorded, as PyTorch calls
/// them, between commas; null for none. `clear` forgets what was recorded before, unless it is 0.
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
        // SAFETY: our caller's promise.
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

/// Stops recording and forgets.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_stop(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().stop())
}

/// Stores 1 if it is recorded what the allocator does, or 0.
///
/// # Safety
///
/// `on` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_is_on(handle: u64, on: *mut c_int) -> Status {
    // SAFETY: our caller's promise.
    unsafe { store(on, "on", || Ok(c_int::from(table::find(handle)?.history().is_on()))) }
}

/// Forgets all entries. Recording goes on, and live blocks keep their stacks.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_clear(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().clear())
}

/// Lets stacks come from a source from now on, or, with null, from nobody.
///
/// # Safety
///
/// `source` may be read if it is not null, and does what `stratalloc_stack_source` asks of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_set_stack_source(
    handle: u64,
    source: *const StackSource,
) -> Status {
    status(|| {
        let provider: Option<Arc<dyn StackProvider>> = match source.is_null() {
            true => None,
            false => {
                // SAFETY: our caller's promise.
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

/// Asks the source of stacks no more, because it is about to go, as an interpreter does at its end. Under
/// `layers:[track]` live blocks keep the names of their stacks for what is told at the end of the process;
/// all that was recorded is forgotten.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_history_drop_stack_source(handle: u64) -> Status {
    table::on(handle, |instance| instance.history().drop_stack_provider())
}

/// Gives entries from now on these words of the program's, or none.
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
        // SAFETY: our caller's promise.
        let text = unsafe { read_any(metadata, "metadata") }?;
        table::find(handle)?.history().set_metadata(text);
        Ok(())
    })
}

/// Returns the calling thread's metadata, in UTF-8 and ended by a zero byte, or null if it has none. The text
/// stays as it is until the same thread calls something else.
pub type ThreadMetadata = Option<unsafe extern "C" fn() -> *const c_char>;

/// Takes the metadata of entries from `source` where it returns any, and from
/// `stratalloc_history_set_metadata` otherwise; from no source with null. It is called on the thread of each
/// request and free that is recorded, and must not allocate from the allocator or unwind.
///
/// # Safety
///
/// `source` may be called on any thread until another one was set and every call has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_history_set_thread_metadata(
    handle: u64,
    source: ThreadMetadata,
) -> Status {
    status(|| {
        let source = source.map(|source| -> crate::history::ThreadMetadata {
            Arc::new(move || {
                // SAFETY: the caller's function.
                let text = unsafe { source() };
                if text.is_null() {
                    return None;
                }
                // SAFETY: a text that stays as it is until this thread does something else.
                Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into())
            })
        });
        table::find(handle)?.history().set_thread_metadata(source);
        Ok(())
    })
}

/// Gives the calling thread a name.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
unsafe fn push(names: NameKind, name: *const c_char) -> Status {
    status(|| {
        // SAFETY: our caller's promise.
        names.push(unsafe { read(name, "name") }?);
        Ok(())
    })
}

/// Removes the calling thread's last name.
fn pop(names: NameKind) -> Status {
    status(|| match names.pop() {
        true => Ok(()),
        false => Err(Failure::invalid("the thread has no name to take back")),
    })
}

/// Names what the calling thread does from now on: entries have the name as their innermost frame. Every name
/// is taken back by a `stratalloc_context_pop` of the same thread.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_context_push(name: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    unsafe { push(NameKind::Scope, name) }
}

/// Takes the calling thread's last name back.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_context_pop() -> Status {
    pop(NameKind::Scope)
}

/// More pairs than anybody needs.
const ANNOTATION_PAIRS_MAX: usize = 64;

/// Keeps `pairs` keys and values with the time while anything is recorded: snapshots list the newest
/// 65,536 under `external_annotations`. PyTorch's have a key `name`, and `stage` with `START` or `END`.
///
/// # Safety
///
/// `words` has `2 * pairs` texts, a key and its value in turn; each ends with a zero byte.
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
        // SAFETY: not null; the rest is our caller's promise.
        let words = unsafe { std::slice::from_raw_parts(words, 2 * pairs) };
        let mut said = Vec::with_capacity(pairs);
        for pair in words.chunks_exact(2) {
            // SAFETY: our caller's promise.
            let key = unsafe { read(pair[0], "key") }?;
            // SAFETY: our caller's promise.
            said.push((key, unsafe { read(pair[1], "value") }?));
        }
        table::find(handle)?.history().annotate(said);
        Ok(())
    })
}

/// Says which compiled region runs on the calling thread from now on: entries have it in a field of their
/// own. Every one is taken back by a `stratalloc_compile_context_pop` of the same thread.
///
/// # Safety
///
/// `name` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_compile_context_push(name: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    unsafe { push(NameKind::CompileContext, name) }
}

/// Takes the calling thread's last compiled region back.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_compile_context_pop() -> Status {
    pop(NameKind::CompileContext)
}

/// Writes all segments and blocks and the history, as of one moment, to a file that PyTorch's viewers read: a
/// pickle, or JSON if the name ends in `.json`. The file has its old content or all of the new one, whatever
/// fails.
///
/// # Safety
///
/// `path` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_snapshot_save(handle: u64, path: *const c_char) -> Status {
    status(|| {
        // SAFETY: our caller's promise.
        let path = unsafe { read(path, "path") }?;
        let snapshot = table::find(handle)?.recording().snapshot();
        let failed = |error| Failure::invalid(format_args!("{path}: {error}"));
        snapshot.save(Path::new(path)).map_err(failed)
    })
}

/// Hands the same to `write`, piece by piece, with `user`: as a pickle if `format` is 0, as JSON if it is 1.
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
        let snapshot = table::find(handle)?.recording().snapshot();
        let written = snapshot.write(format, &mut pieces).and_then(|()| pieces.flush());
        let failed = |error| Failure::invalid(format_args!("the snapshot was not taken: {error}"));
        written.map_err(failed)
    })
}

/// The caller's function as a file.
struct Pieces {
    write: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    user: *mut c_void,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the caller's function, with the caller's pointer and bytes of ours.
        match unsafe { (self.write)(self.user, bytes.as_ptr().cast(), bytes.len()) } {
            0 => Ok(bytes.len()),
            other => Err(io::Error::other(format!("the writer answered {other}"))),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
