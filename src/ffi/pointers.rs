//! Text and numbers through bare pointers: in with checks, out with room to spare.

#![expect(unsafe_code, reason = "callers hand us pointers")]

use std::ffi::{CStr, c_char, c_void};

use super::guard::{Failure, Status, status};

/// The caller's text.
///
/// # Safety
///
/// `from` is null or points to bytes that end with a zero and stay as they are for `'a`.
pub(super) unsafe fn read<'a>(from: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if from.is_null() {
        return Err(Failure::null(what));
    }
    // SAFETY: not null, and the caller of the library keeps the rest, as the header asks.
    let bytes = unsafe { CStr::from_ptr(from) };
    let refuse =
        |_| Failure::new(Status::InvalidArgument, format_args!("{what} is not text in UTF-8"));
    bytes.to_str().map_err(refuse)
}

/// A place of the caller's for one result. Taken before the work, so that no work is lost.
#[derive(Debug)]
pub(super) struct Place<T>(*mut T);

impl<T> Place<T> {
    /// # Safety
    ///
    /// `to` is null or may be written during this call.
    pub(super) unsafe fn new(to: *mut T, what: &str) -> Result<Self, Failure> {
        if to.is_null() { Err(Failure::null(what)) } else { Ok(Self(to)) }
    }

    pub(super) fn put(self, value: T) {
        // SAFETY: `new`'s caller promised that it may be written; unaligned, because C promises
        // nothing about that.
        unsafe { self.0.write_unaligned(value) };
    }
}

/// The caller's text, or none for null.
///
/// # Safety
///
/// As [`read`] says.
pub(super) unsafe fn read_any<'a>(
    from: *const c_char,
    what: &str,
) -> Result<Option<&'a str>, Failure> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: our caller's promise.
    unsafe { read(from, what) }.map(Some)
}

/// Writes all of a text into a buffer of the caller's, which is looked at before the text is made. `needed`,
/// if not null, is set to the bytes that it takes, with the zero at its end.
///
/// # Safety
///
/// `size` bytes from `buffer` and `needed` may be written during this call, each unless it is null.
pub(super) unsafe fn write(
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
    text: impl FnOnce() -> Result<String, Failure>,
) -> Status {
    status(|| {
        // SAFETY: our caller's promise.
        let buffer = unsafe { Buffer::new(buffer, size) }?;
        buffer.put_all(&text()?, needed)
    })
}

/// The same with bytes, without a zero at their end.
///
/// # Safety
///
/// As [`write`] says.
pub(super) unsafe fn write_bytes(
    buffer: *mut c_void,
    size: usize,
    needed: *mut usize,
    bytes: impl FnOnce() -> Result<Vec<u8>, Failure>,
) -> Status {
    status(|| {
        if buffer.is_null() && size > 0 {
            return Err(Failure::null("the buffer"));
        }
        let bytes = bytes()?;
        if !needed.is_null() {
            Place(needed).put(bytes.len());
        }
        if size == 0 {
            return Ok(());
        }
        if bytes.len() > size {
            return Err(too_small(bytes.len(), size));
        }
        // SAFETY: as many bytes as `size` may be written, our caller says, and none of ours lies there.
        unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    })
}

#[cold]
fn too_small(all: usize, size_bytes: usize) -> Failure {
    let text = format_args!("{all} bytes are needed, the buffer has {size_bytes}");
    Failure::new(Status::BufferTooSmall, text)
}

/// A buffer of the caller's for text.
#[derive(Debug)]
pub(super) struct Buffer {
    start: *mut c_char,
    size_bytes: usize,
}

impl Buffer {
    /// # Safety
    ///
    /// `start` is null or `size_bytes` bytes from it may be written during this call.
    pub(super) unsafe fn new(start: *mut c_char, size_bytes: usize) -> Result<Self, Failure> {
        if start.is_null() && size_bytes > 0 {
            return Err(Failure::null("the buffer"));
        }
        Ok(Self { start, size_bytes })
    }

    /// Writes as much of `text` as fits, cut between characters, and a zero. Returns how many bytes
    /// all of it needs, with the zero.
    pub(super) fn put(self, text: &str) -> usize {
        let needed = text.len() + 1;
        if let Some(room) = self.size_bytes.checked_sub(1) {
            let length = text.floor_char_boundary(room);
            // SAFETY: `length` is less than the buffer's size, which `new`'s caller vouches for, and
            // no text of ours lies in it.
            unsafe { self.start.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length) };
            // SAFETY: as above: `length` is at most the size less one.
            let end = unsafe { self.start.add(length) };
            // SAFETY: as above: inside the buffer.
            unsafe { end.write(0) };
        }
        needed
    }

    /// Writes all of `text` or nothing but a zero; tells `needed`, if there is such a place. A
    /// buffer of no bytes only asks.
    pub(super) fn put_all(self, text: &str, needed: *mut usize) -> Result<(), Failure> {
        let (size_bytes, asks) = (self.size_bytes, self.size_bytes == 0);
        let all = text.len() + 1;
        let fits = all <= size_bytes;
        self.put(if fits { text } else { "" });
        if !needed.is_null() {
            Place(needed).put(all);
        }
        if fits || asks {
            return Ok(());
        }
        Err(too_small(all, size_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(text: &str, size: usize) -> (usize, Vec<u8>) {
        let mut bytes = vec![7u8; 16];
        // SAFETY: the buffer is as large as any `size` below.
        let buffer = unsafe { Buffer::new(bytes.as_mut_ptr().cast(), size) }.unwrap();
        (buffer.put(text), bytes)
    }

    #[test]
    fn text_is_cut_between_characters_and_always_ends() {
        assert_eq!(put("abc", 0), (4, vec![7; 16]));
        assert_eq!(put("abc", 1).1[..2], [0, 7]);
        assert_eq!(put("abc", 3).1[..4], [b'a', b'b', 0, 7]);
        assert_eq!(put("abc", 4).1[..5], [b'a', b'b', b'c', 0, 7]);
        assert_eq!(put("aé", 3).1[..3], [b'a', 0, 7]);
    }

    #[test]
    fn all_or_nothing_tells_what_it_needs() {
        let mut bytes = [7u8; 8];
        let mut needed = 0;
        for (size, fits) in [(0, true), (1, false), (3, false), (4, true)] {
            // SAFETY: the buffer is as large as any of these.
            let buffer = unsafe { Buffer::new(bytes.as_mut_ptr().cast(), size) }.unwrap();
            assert_eq!(buffer.put_all("abc", &raw mut needed).is_ok(), fits, "{size}");
            assert_eq!(std::mem::take(&mut needed), 4);
        }
        assert_eq!(bytes[..5], [b'a', b'b', b'c', 0, 7]);
    }
}
