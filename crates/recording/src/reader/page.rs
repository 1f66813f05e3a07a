//! The snapshot inside a page of PyTorch's viewer.
//!
//! `torch.cuda._memory_viz trace_plot` and `segment_plot` write a page that contains the whole snapshot as
//! a pickle in base64: `[{"name": "snapshot.pickle", "base64": "..."}]`. The page is searched for the key
//! `base64`, and the text behind it is decoded as it is read. The rest of the page is not read.
//!
//! Source of the format: `_format_viz` in torch/cuda/_memory_viz.py.

use std::io::{self, Read};

use super::error::{Failure, Foreign};
use super::input::Input;

/// Texts that decide what a page is. The first one in the page counts.
const MARKS: [(&[u8], Option<Foreign>); 4] = [
    (b"\"base64\"", None),
    (b"data:image/png;base64,", Some(Foreign::TimelinePicture)),
    (b"data:image/svg", Some(Foreign::Picture)),
    (b"type=\"application/json\" id=\"about\"", Some(Foreign::Report)),
];
/// The length of the longest text in [`MARKS`].
const MARK_MAX_BYTES: usize = 34;

/// Returns a reader of the bytes that a page contains in base64.
pub(super) fn embedded<'i>(mut page: Input<'i>) -> Result<Box<dyn Read + 'i>, Failure> {
    let mut recent = [0; MARK_MAX_BYTES];
    loop {
        let Some(byte) = page.next_byte()? else {
            return Err(Failure::Foreign { foreign: Foreign::Page });
        };
        recent.rotate_left(1);
        recent[MARK_MAX_BYTES - 1] = byte;
        match MARKS.iter().find(|(mark, _)| recent.ends_with(mark)) {
            None => {}
            Some((_, Some(foreign))) => return Err(Failure::Foreign { foreign: *foreign }),
            Some((_, None)) if is_before_text(&mut page)? => break,
            Some((_, None)) => {}
        }
    }
    Ok(Box::new(Base64 { page, bits: 0, count: 0, zeros: 0, next: None, is_at_end: false }))
}

/// Skips white space, a colon and a quotation mark. Returns false if other bytes follow.
fn is_before_text(page: &mut Input<'_>) -> Result<bool, Failure> {
    for expected in [b':', b'"'] {
        while let [b' ' | b'\t' | b'\r' | b'\n', ..] = page.peek()? {
            page.consume(1);
        }
        if page.peek()?.first() != Some(&expected) {
            return Ok(false);
        }
        page.consume(1);
    }
    Ok(true)
}

/// The most zero bytes that follow a pickle in a page.
const PADDING_BYTES: u64 = 3;

/// Decodes base64 up to a quotation mark. Zero bytes at the end, with which the writer fills the last group
/// of three bytes, are left out.
struct Base64<'i> {
    page: Input<'i>,
    /// Decoded bits that are not a whole byte yet.
    bits: u32,
    count: u32,
    /// Decoded zero bytes that were not returned yet.
    zeros: u64,
    /// The byte that follows these zeros.
    next: Option<u8>,
    is_at_end: bool,
}

impl Base64<'_> {
    /// Returns the next decoded byte, or `None` at the end of the text.
    fn decode(&mut self) -> io::Result<Option<u8>> {
        loop {
            if self.is_at_end {
                return Ok(None);
            }
            let sign = self.page.next_byte().map_err(io::Error::other)?;
            let value = match sign {
                Some(sign @ b'A'..=b'Z') => sign - b'A',
                Some(sign @ b'a'..=b'z') => sign - b'a' + 26,
                Some(sign @ b'0'..=b'9') => sign - b'0' + 52,
                Some(b'+') => 62,
                Some(b'/') => 63,
                // JSON may write a slash with a backslash before it.
                Some(b'=' | b'\\') => continue,
                Some(b'"') => {
                    self.is_at_end = true;
                    self.zeros = self.zeros.saturating_sub(PADDING_BYTES);
                    continue;
                }
                Some(_) => {
                    let text = "the snapshot in the page is not in base64";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                None => {
                    let text = "the page is cut off within its snapshot";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
            };
            self.bits = self.bits << 6 | u32::from(value);
            self.count += 6;
            if self.count >= 8 {
                self.count -= 8;
                let byte = self.bits >> self.count & 0xff;
                self.bits &= (1 << self.count) - 1;
                return Ok(u8::try_from(byte).ok());
            }
        }
    }

    fn byte(&mut self) -> io::Result<Option<u8>> {
        while self.next.is_none() {
            match self.decode()? {
                Some(0) => self.zeros += 1,
                Some(byte) => self.next = Some(byte),
                None => return Ok(self.zero()),
            }
        }
        Ok(self.zero().or_else(|| self.next.take()))
    }

    fn zero(&mut self) -> Option<u8> {
        let has_zero = self.zeros > 0;
        self.zeros = self.zeros.saturating_sub(1);
        has_zero.then_some(0)
    }
}

impl Read for Base64<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        for (at, place) in into.iter_mut().enumerate() {
            match self.byte()? {
                Some(byte) => *place = byte,
                None => return Ok(at),
            }
        }
        Ok(into.len())
    }
}
