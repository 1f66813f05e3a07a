//! The context of a request or free: call stack, names and metadata.
//!
//! A context is gathered before an operation acquires its first lock, and dropped after it has released
//! its last one. The reason is that stack providers are user code: they may allocate, acquire other
//! locks (such as an interpreter's) and panic. During the operation the context is kept in a
//! thread-local, and all entries of the operation share it. It consists of the provider's stack, the
//! names of the thread's open [scopes](Context::scope), the thread's compile context (the name of the
//! [compiled](Context::compiled) region that it runs) and the metadata.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::LocalKey;

use hashbrown::HashMap;
use parking_lot::RwLock;

use super::StackLevel;
use super::clock::Operation;
use super::record::History;
use crate::threads::Lasting;

/// One frame of a stack, as snapshots show it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The name of the function.
    pub function: String,
    /// The source file.
    pub file: String,
    /// The line; 0 if unknown.
    pub line: u32,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names come from user code. Control characters are replaced, because they could control a
        // terminal.
        write!(f, "{}", plain(&self.function))?;
        match self.line {
            0 => Ok(()),
            line => write!(f, " ({}:{line})", plain(&self.file)),
        }
    }
}

fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A stack that a [`StackProvider`] gathered. It may be dropped on any thread. No lock of the allocator
/// is held then.
pub trait Stack: Any + fmt::Debug + Send + Sync {
    /// Returns the stack's frames, innermost first. Called when they are needed, for example by a snapshot,
    /// not when the stack is gathered.
    fn frames(&self) -> Vec<Frame>;
}

/// Gathers stacks. Called on the thread that allocates or frees, with no lock of the allocator held. A
/// provider may allocate, free and take snapshots. Its own requests have no context. Within it,
/// [switching](crate::switch::Switchable) the allocator fails. If it panics, the operation has no
/// stack.
pub trait StackProvider: Send + Sync {
    /// Returns the stack of the calling thread, or `None`.
    fn gather(&self) -> Option<Arc<dyn Stack>>;
}

impl<F: Fn() -> Option<Arc<dyn Stack>> + Send + Sync> StackProvider for F {
    fn gather(&self) -> Option<Arc<dyn Stack>> {
        self()
    }
}

/// Returns the address of a stack, which identifies the stack as long as it is alive.
fn number_of(stack: &Arc<dyn Stack>) -> usize {
    Arc::as_ptr(stack).cast::<()>() as usize
}

/// Returns the frames of a stack. Returns no frames if looking them up panics.
fn frames_of(stack: &Arc<dyn Stack>) -> Vec<Frame> {
    catch_unwind(AssertUnwindSafe(|| stack.frames())).unwrap_or_default()
}

/// A stack whose frames were looked up already.
#[derive(Debug)]
pub(super) struct Names(Vec<Frame>);

impl Stack for Names {
    fn frames(&self) -> Vec<Frame> {
        self.0.clone()
    }
}

/// The context of an operation. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Context(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    stack: Option<Arc<dyn Stack>>,
    labels: Labels,
}

/// The parts of a context besides the stack.
#[derive(Clone, Debug, Default)]
struct Labels {
    /// Names of scopes, the innermost last.
    scopes: Vec<Arc<str>>,
    compile_context: Option<Arc<str>>,
    metadata: Option<Arc<str>>,
}

type NameList = Lasting<Vec<Arc<str>>>;

thread_local! {
    /// The context of the entries that this thread records. Empty unless an operation is running.
    static CURRENT: Lasting<Option<Context>> = const { Lasting::new(None) };
    static SCOPES: NameList = const { Lasting::new(Vec::new()) };
    static COMPILE_CONTEXT: NameList = const { Lasting::new(Vec::new()) };
    /// The number of names in `SCOPES` and `COMPILE_CONTEXT` together.
    static NAME_COUNT: Cell<u32> = const { Cell::new(0) };
    /// True while this thread gathers a context, which may run a stack provider.
    static GATHERS: Cell<bool> = const { Cell::new(false) };
    static CLEAR_NAMES: ClearNames = const { ClearNames };
}

/// Frees the thread's remaining names when the thread ends.
struct ClearNames;

impl Drop for ClearNames {
    fn drop(&mut self) {
        drop((SCOPES.with(Lasting::take), COMPILE_CONTEXT.with(Lasting::take)));
        NAME_COUNT.set(0);
    }
}

/// The two kinds of names that user code can set on a thread.
#[derive(Clone, Copy, Debug)]
pub enum NameKind {
    /// The name of a scope.
    Scope,
    /// The name of a compiled region.
    CompileContext,
}

impl NameKind {
    fn list(self) -> &'static LocalKey<NameList> {
        match self {
            Self::Scope => &SCOPES,
            Self::CompileContext => &COMPILE_CONTEXT,
        }
    }

    /// Adds a name for the calling thread. It becomes the innermost one.
    #[doc(hidden)]
    pub fn push(self, name: &str) {
        // This access registers the destructor that frees the names when the thread ends. A name that
        // is added after the destructor has run is not freed until it is popped.
        let _ = CLEAR_NAMES.try_with(|_| ());
        self.list().with(|names| names.change(|names| names.push(name.into())));
        NAME_COUNT.set(NAME_COUNT.get() + 1);
    }

    /// Removes the calling thread's innermost name. Returns false if the thread has none.
    #[doc(hidden)]
    pub fn pop(self) -> bool {
        let had = self.list().with(|names| names.change(|names| names.pop().is_some()));
        NAME_COUNT.set(NAME_COUNT.get() - u32::from(had));
        had
    }
}

impl Context {
    /// Opens a scope on the calling thread. Until the result is dropped, the stacks of entries have
    /// `name` as their innermost frame. Scopes can be nested.
    #[must_use = "the scope ends when this is dropped"]
    pub fn scope(name: &str) -> ContextScope {
        ContextScope::new(NameKind::Scope, name)
    }

    /// Sets the name of the compiled region that runs on this thread, until the result is dropped.
    /// Snapshots list the name in a field of its own.
    #[must_use = "the compile context ends when this is dropped"]
    pub fn compiled(name: &str) -> ContextScope {
        ContextScope::new(NameKind::CompileContext, name)
    }

    /// Returns the frames, innermost first: the names of scopes, then the stack.
    #[must_use]
    pub fn frames(&self) -> Vec<Frame> {
        let named = |name: &Arc<str>| Frame {
            function: (**name).to_owned(),
            file: "scope".into(),
            line: 0,
        };
        let mut frames: Vec<_> = self.0.labels.scopes.iter().rev().map(named).collect();
        frames.extend(self.0.stack.as_ref().map(frames_of).unwrap_or_default());
        frames
    }

    /// Returns the stack that the provider gathered.
    #[must_use]
    pub fn stack(&self) -> Option<&(dyn Stack + 'static)> {
        self.0.stack.as_deref()
    }

    /// Returns the name of the compiled region.
    #[must_use]
    pub fn compile_context(&self) -> Option<&str> {
        self.0.labels.compile_context.as_deref()
    }

    /// Returns the metadata at the moment of the request: that of its
    /// [thread](History::set_thread_metadata), or else that of [all threads](History::set_metadata).
    #[must_use]
    pub fn metadata(&self) -> Option<&str> {
        self.0.labels.metadata.as_deref()
    }

    /// Returns a number that identifies the frames. Contexts with the same stack and no scopes have the
    /// same number. The number may be reused after the context was dropped.
    pub(super) fn frames_number(&self) -> usize {
        match &self.0.stack {
            Some(stack) if self.0.labels.scopes.is_empty() => number_of(stack),
            _ => Arc::as_ptr(&self.0) as usize,
        }
    }

    /// Returns a key for the frames. Two live contexts with equal keys have equal frames.
    pub(super) fn frames_key(&self) -> (Option<usize>, Vec<Arc<str>>) {
        (self.0.stack.as_ref().map(number_of), self.0.labels.scopes.clone())
    }

    /// Returns a copy whose stack holds the looked-up frames, and no longer refers to the provider.
    /// `known` caches the frames of each stack.
    pub(super) fn with_names(&self, known: &mut HashMap<usize, Arc<Names>>) -> Self {
        let look_up = |stack: &Arc<dyn Stack>| -> Arc<dyn Stack> {
            let names = known.entry(number_of(stack));
            Arc::clone(names.or_insert_with(|| Arc::new(Names(frames_of(stack))))) as _
        };
        let stack = self.0.stack.as_ref().map(look_up);
        Self(Arc::new(Parts { stack, labels: self.0.labels.clone() }))
    }

    /// Returns the context of entries that the calling thread records now.
    pub(super) fn current() -> Option<Self> {
        CURRENT.with(Lasting::cloned)
    }

    /// Sets the context of entries that the calling thread records, and returns the previous one.
    fn replace(next: Option<Self>) -> Option<Self> {
        CURRENT.with(|current| current.replace(next))
    }
}

/// An open scope or compile context of the calling thread. Ends when dropped.
#[derive(Debug)]
pub struct ContextScope {
    of: NameKind,
    stays_here: std::marker::PhantomData<*const ()>,
}

impl ContextScope {
    fn new(of: NameKind, name: &str) -> Self {
        of.push(name);
        Self { of, stays_here: std::marker::PhantomData }
    }
}

impl Drop for ContextScope {
    fn drop(&mut self) {
        self.of.pop();
        let Self { stays_here: _, .. } = self;
    }
}

/// Returns the metadata of the calling thread, if any. Called on the thread that allocates or frees,
/// with no lock of the allocator held. The function must not allocate from the allocator.
pub type ThreadMetadata = Arc<dyn Fn() -> Option<Arc<str>> + Send + Sync>;

/// The stack provider and the metadata.
#[derive(Default)]
pub(super) struct Sources {
    pub(super) provider: RwLock<Option<Arc<dyn StackProvider>>>,
    metadata: RwLock<Metadata>,
    has_metadata: AtomicBool,
}

/// Metadata for all threads, and a function that returns the metadata of the calling thread, which
/// takes precedence.
#[derive(Clone, Default)]
struct Metadata {
    of_all_threads: Option<Arc<str>>,
    of_thread: Option<ThreadMetadata>,
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").finish_non_exhaustive()
    }
}

impl History {
    /// Sets the provider of stacks. With `None` no stacks are gathered.
    pub fn set_stack_provider(&self, provider: Option<Arc<dyn StackProvider>>) {
        let before = std::mem::replace(&mut *self.sources.provider.write(), provider);
        drop(before);
    }

    /// Sets the metadata of entries that are recorded from now on.
    ///
    /// Source: `torch.cuda.memory._set_memory_metadata`.
    pub fn set_metadata(&self, metadata: Option<&str>) {
        self.sources.change_metadata(|own| own.of_all_threads = metadata.map(Into::into));
    }

    /// Sets a function that returns the metadata of each entry. If it returns `None`, the entry has the
    /// metadata that was [set](Self::set_metadata) for all threads. `None` removes the function.
    pub fn set_thread_metadata(&self, source: Option<ThreadMetadata>) {
        self.sources.change_metadata(|own| own.of_thread = source);
    }

    /// Returns true if the calling thread is gathering a context, which may run a stack provider.
    pub(crate) fn is_gathering() -> bool {
        GATHERS.get()
    }

    /// Returns the metadata that was [set](Self::set_metadata) last for all threads.
    #[must_use]
    pub fn metadata(&self) -> Option<Arc<str>> {
        self.sources.metadata.read().of_all_threads.clone()
    }
}

impl Sources {
    fn change_metadata(&self, change: impl FnOnce(&mut Metadata)) {
        let mut own = self.metadata.write();
        let mut next = own.clone();
        change(&mut next);
        let has_metadata = next.of_all_threads.is_some() || next.of_thread.is_some();
        self.has_metadata.store(has_metadata, Ordering::Relaxed);
        let before = std::mem::replace(&mut *own, next);
        // The old metadata may hold a function of the user, whose destructor must run without the lock.
        drop(own);
        drop(before);
    }

    /// Returns the metadata for entries of the calling thread.
    fn metadata(&self) -> Option<Arc<str>> {
        let Metadata { of_all_threads, of_thread } = self.metadata.read().clone();
        of_thread.and_then(|source| source()).or(of_all_threads)
    }

    /// Returns true if the contexts of the calling thread's entries can contain nothing but a stack.
    #[inline]
    pub(super) fn has_no_labels(&self) -> bool {
        NAME_COUNT.get() == 0 && !self.has_metadata.load(Ordering::Relaxed)
    }

    fn gather(&self, with_stack: bool) -> Option<Context> {
        let provider = if with_stack { self.provider.read().clone() } else { None };
        let stack = provider.and_then(|provider| {
            catch_unwind(AssertUnwindSafe(|| provider.gather())).unwrap_or_default()
        });
        let metadata = self.metadata();
        let mut labels = Labels { metadata, ..Labels::default() };
        if NAME_COUNT.get() > 0 {
            labels.scopes = SCOPES.with(|names| names.read(<[_]>::to_vec));
            labels.compile_context =
                COMPILE_CONTEXT.with(|names| names.read(|n| n.last().cloned()));
        }
        let has_labels = labels.metadata.is_some()
            || labels.compile_context.is_some()
            || !labels.scopes.is_empty();
        (stack.is_some() || has_labels).then(|| Context(Arc::new(Parts { stack, labels })))
    }
}

/// Guard: the entries of this thread have the gathered context until the guard is dropped.
#[must_use = "entries have the context until this is dropped"]
pub(crate) struct Gathered<'a> {
    history: &'a History,
    /// The thread's previous context, which is restored when the guard is dropped.
    before: Option<Context>,
    operation: Option<Operation>,
}

impl<'a> Gathered<'a> {
    /// Gathers the context if recording is on. Includes a stack if the history gathers stacks at level
    /// `from` or above.
    #[inline]
    pub(super) fn new(history: &'a History, from: StackLevel) -> Option<Self> {
        if history.is_on() { Self::gather(history, history.stacks() >= from) } else { None }
    }

    /// Gathers the context without a stack, if recording is on.
    pub(super) fn without_stack(history: &'a History) -> Option<Self> {
        if history.is_on() { Self::gather(history, false) } else { None }
    }

    #[cold]
    fn gather(history: &'a History, with_stack: bool) -> Option<Self> {
        let mut context = None;
        if with_stack || !history.sources.has_no_labels() {
            // If this thread is gathering a context already, this operation was called by the provider.
            // It gets no context.
            if GATHERS.replace(true) {
                return None;
            }
            context = history.sources.gather(with_stack);
            GATHERS.set(false);
        }
        let (before, operation) = (Context::replace(context), Some(Operation::begin()));
        Some(Self { history, before, operation })
    }
}

impl Drop for Gathered<'_> {
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        self.operation = None;
        drop(Context::replace(self.before.take()));
        // If this operation was nested in another one, the outer one may still hold a lock. Trackers
        // must not be called then.
        if !Operation::is_open() {
            self.history.trackers.notify();
        }
        self.history.release();
    }
}
