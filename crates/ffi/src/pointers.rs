//! Reads arguments and stores results through callers' pointers.

#![expect(unsafe_code, reason = "callers hand us pointers")]

use std::ffi::{CStr, c_char};

use super::guard::{Failure, Status, status};

/// Reads a caller's text.
///
/// # Safety
///
/// `from` is null, or points to bytes that end with a zero and stay unchanged for `'a`.
pub(super) unsafe fn read<'a>(from: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { read_any(from, what) }?.ok_or_else(|| Failure::null(what))
}

/// Reads a caller's structure.
///
/// # Safety
///
/// `from` is null or may be read.
pub(super) unsafe fn read_struct<T>(from: *const T, what: &str) -> Result<T, Failure> {
    if from.is_null() {
        return Err(Failure::null(what));
    }
    // SAFETY: not null, and the rest is required of the caller (`# Safety`). Unaligned, because C
    // guarantees no alignment.
    Ok(unsafe { from.read_unaligned() })
}

/// A caller's pointer for one result. It is checked for null before the work starts, so that no result
/// is lost.
#[derive(Debug)]
pub(super) struct OutPointer<T>(*mut T);

impl<T> OutPointer<T> {
    /// # Safety
    ///
    /// `to` is null or may be written during this call.
    pub(super) unsafe fn new(to: *mut T, what: &str) -> Result<Self, Failure> {
        if to.is_null() { Err(Failure::null(what)) } else { Ok(Self(to)) }
    }

    pub(super) fn put(self, value: T) {
        // SAFETY: `new` requires that the pointer may be written. Unaligned, because C guarantees no
        // alignment.
        unsafe { self.0.write_unaligned(value) };
    }
}

/// Runs `work` and stores its result through a caller's pointer. Checks the pointer first, so that no
/// result is lost.
///
/// # Safety
///
/// `to` is null or may be written during this call.
#[inline]
pub(super) unsafe fn store<T>(
    to: *mut T,
    what: &str,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let out = unsafe { OutPointer::new(to, what) }?;
        out.put(work()?);
        Ok(())
    })
}

/// Runs `work` and stores its results, which have one type, through several pointers. Checks the
/// pointers first.
///
/// # Safety
///
/// Each of `to` is null or may be written during this call.
pub(super) unsafe fn store_all<T, const N: usize>(
    to: [*mut T; N],
    work: impl FnOnce() -> Result<[T; N], Failure>,
) -> Status {
    status(|| {
        if to.iter().any(|to| to.is_null()) {
            return Err(Failure::null("one of the pointers"));
        }
        to.map(OutPointer).into_iter().zip(work()?).for_each(|(out, value)| out.put(value));
        Ok(())
    })
}

/// Stores a value, unless the pointer is null.
///
/// # Safety
///
/// `to` is null or may be written during this call.
pub(super) unsafe fn store_any<T>(to: *mut T, value: T) {
    if !to.is_null() {
        OutPointer(to).put(value);
    }
}

/// Reads a caller's text. Returns `None` for null.
///
/// # Safety
///
/// The same as for [`read`].
pub(super) unsafe fn read_any<'a>(
    from: *const c_char,
    what: &str,
) -> Result<Option<&'a str>, Failure> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the rest is required of the caller (`# Safety`).
    let bytes = unsafe { CStr::from_ptr(from) };
    let refuse = |_| Failure::invalid(format_args!("{what} is not text in UTF-8"));
    bytes.to_str().map(Some).map_err(refuse)
}

/// Writes all items into a caller's buffer, or none if they do not fit. Checks for a null buffer before
/// it calls `items`. Stores the number of items in `needed`, unless that is null. If `room` is 0, writes
/// nothing else.
///
/// # Safety
///
/// `room` items from `buffer` and `needed` may be written during this call, each unless it is null.
pub(super) unsafe fn write_all<T: Copy>(
    buffer: *mut T,
    room: usize,
    needed: *mut usize,
    items: impl FnOnce() -> Result<Vec<T>, Failure>,
) -> Status {
    status(|| {
        if buffer.is_null() && room > 0 {
            return Err(Failure::null("the buffer"));
        }
        let items = items()?;
        // SAFETY: required of the caller (`# Safety`).
        unsafe { store_any(needed, items.len()) };
        if items.len() > room && room > 0 {
            let text = format_args!("{} are needed, the buffer has room for {room}", items.len());
            return Err(Failure::new(Status::BufferTooSmall, text));
        }
        if room > 0 {
            let (from, bytes) = (items.as_ptr().cast::<u8>(), size_of_val(&*items));
            // SAFETY: `room` items may be written (`# Safety`), and the buffer does not overlap
            // `items`. Copied as bytes, because C guarantees no alignment.
            unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(from, bytes) };
        }
        Ok(())
    })
}

/// Writes a text with a terminating zero, as [`write_all`] does. If the buffer is too small, writes an
/// empty text.
///
/// # Safety
///
/// The same as for [`write_all`], with bytes as items.
pub(super) unsafe fn write(
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
    text: impl FnOnce() -> Result<String, Failure>,
) -> Status {
    let bytes = || Ok((text()? + "\0").into_bytes());
    // SAFETY: required of the caller (`# Safety`).
    let written = unsafe { write_all(buffer.cast(), size, needed, bytes) };
    if written == Status::BufferTooSmall && size > 0 {
        // SAFETY: `size` is at least 1, and `write_all` would have returned another status for a null
        // buffer.
        unsafe { buffer.write(0) };
    }
    written
}

/// Writes as much of `text` as fits, cut at a character boundary, with a terminating zero. Returns the
/// number of bytes that the whole text needs, including the zero. Returns 0 for a null buffer with a
/// nonzero size.
///
/// # Safety
///
/// `size` bytes from `buffer` may be written during this call, unless it is null.
pub(super) unsafe fn write_cut(buffer: *mut c_char, size: usize, text: &str) -> usize {
    let Some(room) = size.checked_sub(1) else { return text.len() + 1 };
    let cut = text[..text.floor_char_boundary(room)].to_owned();
    // SAFETY: required of the caller (`# Safety`).
    match unsafe { write(buffer, size, std::ptr::null_mut(), || Ok(cut)) } {
        Status::Ok => text.len() + 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(text: &str, size: usize) -> (usize, Vec<u8>) {
        let mut bytes = vec![7u8; 16];
        // SAFETY: the buffer is as large as any `size` below.
        (unsafe { write_cut(bytes.as_mut_ptr().cast(), size, text) }, bytes)
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
    fn all_or_nothing_reports_the_needed_size() {
        let mut bytes = [7u8; 8];
        let mut needed = 0;
        for (size, fits) in [(0, true), (1, false), (3, false), (4, true)] {
            let text = || Ok("abc".to_owned());
            // SAFETY: the buffer is larger than any `size`.
            let written = unsafe { write(bytes.as_mut_ptr().cast(), size, &raw mut needed, text) };
            assert_eq!(written == Status::Ok, fits, "{size}");
            assert_eq!(std::mem::take(&mut needed), 4);
        }
        assert_eq!(bytes[..5], [b'a', b'b', b'c', 0, 7]);
    }
}
