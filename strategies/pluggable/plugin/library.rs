//! A user's functions from a shared library, with the C signatures that PyTorch loads.
//!
//! The file is checked first (`elf`) and then loaded with all its dependencies. Every function is looked
//! up before any function is called. A loaded library is never unloaded, because blocks, running threads
//! or registered handlers may still need its code at any later time. C++ exceptions propagate as they
//! would in C++; Rust callers cannot catch them.
//!
//! Trust: the named functions must have the signatures given here. This cannot be checked.
//!
//! Source of the signatures: PyTorch's `CUDAPluggableAllocator`.

#![expect(unsafe_code, reason = "calling a foreign library")]

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use parking_lot::Mutex;

use super::filter::StdFunction;
use super::{Base, Callbacks, LibraryError, OnPool, elf};
use crate::config::PluggableSettings;
use crate::ids::{DeviceId, PoolId, StreamId};

type Pointer = *mut c_void;
type AllocFn = unsafe extern "C-unwind" fn(usize, c_int, Pointer) -> Pointer;
type FreeFn = unsafe extern "C-unwind" fn(Pointer, usize, c_int, Pointer);
type InitFn = unsafe extern "C-unwind" fn(c_int);
type ResetFn = unsafe extern "C-unwind" fn();
type FractionFn = unsafe extern "C-unwind" fn(f64, c_int);
type BaseFn = unsafe extern "C-unwind" fn(Pointer, *mut usize) -> Pointer;
type RecordFn = unsafe extern "C-unwind" fn(Pointer, Pointer);
type BeginFn = unsafe extern "C-unwind" fn(c_int, Pair, *mut StdFunction);
type PoolFn = unsafe extern "C-unwind" fn(c_int, Pair);

/// `std::pair` of two 64-bit numbers. It is trivially copyable, so C++ passes it like this C struct.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pair(u64, u64);

impl From<PoolId> for Pair {
    fn from(pool: PoolId) -> Self {
        Self(pool.capture, pool.user)
    }
}

/// Loads a library and finds its functions. Skips optional functions that the settings do not name.
/// Loading runs the library's initializers and may wait for the disk. The returned callbacks call the
/// library's `init_fn` once per process, even if the library is loaded several times.
///
/// # Errors
///
/// [`LibraryError`]. None of the functions was called in this case.
pub fn load(names: &PluggableSettings) -> Result<Callbacks, LibraryError> {
    let path = elf::check(names.library.as_deref().unwrap_or_default().as_ref())?;
    let library = Found::open(path)?;
    let required_name = |name: &Option<String>| name.clone().unwrap_or_default();
    let alloc: AllocFn = library.find("alloc_fn", &required_name(&names.alloc_fn))?;
    let free: FreeFn = library.find("free_fn", &required_name(&names.free_fn))?;
    let mut callbacks = required(alloc, free);
    if let Some(init) = library.find_any::<InitFn>("init_fn", &names.init_fn)? {
        callbacks = callbacks.on_init(move |devices| init_once(init, devices));
    }
    if let Some(reset) = library.find_any::<ResetFn>("reset_fn", &names.reset_fn)? {
        // SAFETY: the function has this signature: see the module documentation.
        callbacks = callbacks.on_reset(move || unsafe { reset() });
    }
    if let Some(set) =
        library.find_any::<FractionFn>("memory_fraction_fn", &names.memory_fraction_fn)?
    {
        callbacks = callbacks.on_memory_fraction(move |fraction, device| {
            // SAFETY: the function has this signature: see the module documentation.
            unsafe { set(fraction, ordinal(device)) }
        });
    }
    if let Some(base) = library.find_any::<BaseFn>("base_alloc_fn", &names.base_alloc_fn)? {
        callbacks = callbacks.on_base_address(move |address| base_of(base, address));
    }
    if let Some(record) =
        library.find_any::<RecordFn>("record_stream_fn", &names.record_stream_fn)?
    {
        callbacks = callbacks.on_record_stream(move |address, stream| {
            // SAFETY: the function has this signature (see the module documentation), and the block is
            // live.
            unsafe { record(pointer(address), pointer(stream.0)) }
        });
    }
    let begin = ("begin_allocate_to_pool_fn", &names.begin_allocate_to_pool_fn);
    if let Some(begin) = library.find_any::<BeginFn>(begin.0, begin.1)? {
        callbacks.begin_pool = Some(Arc::new(move |device, pool, filter| {
            let mut filter = StdFunction::new(filter);
            // SAFETY: the function has this signature (see the module documentation), and the object
            // lives until the call has returned.
            unsafe { begin(ordinal(device), pool.into(), &raw mut filter) }
        }));
    }
    let on_pool = |key, name| -> Result<Option<Arc<OnPool>>, LibraryError> {
        let found = library.find_any::<PoolFn>(key, name)?;
        Ok(found.map(|function| -> Arc<OnPool> {
            Arc::new(move |device, pool| {
                // SAFETY: the function has this signature: see the module documentation.
                unsafe { function(ordinal(device), pool.into()) }
            })
        }))
    };
    callbacks.end_pool = on_pool("end_allocate_to_pool_fn", &names.end_allocate_to_pool_fn)?;
    callbacks.release_pool = on_pool("release_pool_fn", &names.release_pool_fn)?;
    Ok(callbacks)
}

fn required(alloc: AllocFn, free: FreeFn) -> Callbacks {
    let allocate = move |bytes: u64, device: DeviceId, stream: StreamId| {
        let bytes = usize::try_from(bytes).ok()?;
        // SAFETY: the function has this signature: see the module documentation.
        let found = unsafe { alloc(bytes, ordinal(device), pointer(stream.0)) };
        (!found.is_null()).then(|| found.expose_provenance() as u64)
    };
    let free = move |address: u64, bytes: u64, device: DeviceId, stream: StreamId| {
        let bytes = usize::try_from(bytes).expect("it was allocated with as many");
        // SAFETY: the function has this signature (see the module documentation). The block came from
        // `alloc` and is freed once, as `Callbacks` guarantees.
        unsafe { free(pointer(address), bytes, ordinal(device), pointer(stream.0)) }
    };
    Callbacks::new(allocate, free)
}

fn base_of(function: BaseFn, address: u64) -> Base {
    // The function may leave the size unwritten; this value detects that.
    let mut size = usize::MAX;
    // SAFETY: the function has this signature, the block is live, and `size` may be written.
    let base = unsafe { function(pointer(address), &raw mut size) };
    let size_bytes = (size != usize::MAX).then_some(size as u64);
    Base { address: base.expose_provenance() as u64, size_bytes }
}

/// Calls a library's `init_fn` unless an earlier call succeeded. Waits for a call that is in progress. A
/// call that ended with an exception is repeated.
fn init_once(init: InitFn, devices: u32) {
    // Libraries are never unloaded, so the address of a function identifies it.
    static CALLED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let mut called = CALLED.lock();
    if !called.contains(&(init as usize)) {
        let devices = c_int::try_from(devices).unwrap_or(c_int::MAX);
        // SAFETY: the function has this signature: see the module documentation.
        unsafe { init(devices) };
        called.push(init as usize);
    }
}

fn pointer(address: u64) -> Pointer {
    with_exposed_provenance_mut(usize::try_from(address).expect("pointers have 64 bits here"))
}

fn ordinal(device: DeviceId) -> c_int {
    c_int::try_from(device.0).expect("devices are few")
}

/// A loaded library, which is never unloaded.
struct Found {
    path: PathBuf,
    library: ManuallyDrop<Library>,
}

impl Found {
    fn open(path: PathBuf) -> Result<Self, LibraryError> {
        // SAFETY: loading runs the library's own initializers. The user named the library for that
        // purpose.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => Ok(Self { path, library: ManuallyDrop::new(library) }),
            Err(error) => {
                let message = loader_message(&error, &path);
                Err(LibraryError::NotLoaded { path, message })
            }
        }
    }

    fn find_any<F: Copy>(
        &self,
        key: &'static str,
        name: &Option<String>,
    ) -> Result<Option<F>, LibraryError> {
        name.as_deref().map(|name| self.find(key, name)).transpose()
    }

    fn find<F: Copy>(&self, key: &'static str, name: &str) -> Result<F, LibraryError> {
        // SAFETY: `F` is the function type that the caller expects for the name: see the module
        // documentation.
        let found = unsafe { self.library.get::<Option<F>>(name) };
        // A symbol can exist and be null, which no function pointer is.
        let found = found.ok().and_then(Symbol::lift_option);
        let none =
            || LibraryError::NoFunction { path: self.path.clone(), key, name: name.to_owned() };
        found.map(|symbol| *symbol).ok_or_else(none)
    }
}

/// Returns the loader's message without the path at its start, because [`LibraryError`] names the path
/// too.
fn loader_message(error: &libloading::Error, path: &Path) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    let text = source.unwrap_or_else(|| error.to_string());
    let begin = format!("{}: ", path.display());
    text.strip_prefix(&begin).unwrap_or(&text).to_owned()
}
