//! The decoded bytes of a file, read through a small buffer. They are counted and limited.
//!
//! All parsers read from [`Input`]. The count is the offset in error messages. Reading fails beyond
//! [`Limits::decoded_bytes`](super::Limits::decoded_bytes), so a decompression bomb does no harm.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use super::encoding::OverLimit;
use super::error::Failure;

/// The size of the buffer: small compared with any recording, large enough to keep system calls rare.
const BUFFER_BYTES: usize = 16 * 1024;

/// The decoded bytes of a file, as parsers read them.
pub(super) struct Input<'a> {
    source: BufReader<Box<dyn Read + 'a>>,
    /// The number of decoded bytes consumed so far.
    offset: u64,
    limit_bytes: u64,
}

impl<'a> Input<'a> {
    pub(super) fn new(source: Box<dyn Read + 'a>, limit_bytes: u64) -> Self {
        Self { source: BufReader::with_capacity(BUFFER_BYTES, source), offset: 0, limit_bytes }
    }

    /// Returns the number of decoded bytes consumed so far.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the unread bytes of the buffer. They are empty only at the end of the file.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<&[u8], Failure> {
        if self.source.buffer().is_empty() {
            self.refill()?;
        }
        Ok(self.source.buffer())
    }

    /// Returns the next `count` bytes without consuming them; fewer if the file ends before.
    pub(super) fn look_ahead(&mut self, count: usize) -> Result<Vec<u8>, Failure> {
        let begin = self.offset;
        let mut head = Vec::new();
        while head.len() < count {
            let at_hand = self.peek()?;
            if at_hand.is_empty() {
                break;
            }
            let taken = at_hand.len().min(count - head.len());
            head.extend_from_slice(&at_hand[..taken]);
            self.consume(taken);
        }
        let none: Box<dyn Read + 'a> = Box::new(io::empty());
        let rest = std::mem::replace(&mut self.source, BufReader::with_capacity(0, none));
        let whole = Box::new(Cursor::new(head.clone()).chain(rest));
        self.source = BufReader::with_capacity(BUFFER_BYTES, whole);
        self.offset = begin;
        Ok(head)
    }

    fn refill(&mut self) -> Result<(), Failure> {
        while let Err(source) = self.source.fill_buf() {
            if source.get_ref().is_some_and(|inner| inner.is::<OverLimit>()) {
                return Err(Failure::TooLarge { limit_bytes: self.limit_bytes });
            }
            if source.kind() != io::ErrorKind::Interrupted {
                // The source may be another input, whose error is passed on.
                let read = |source| Failure::Read { at: self.offset, source };
                return Err(source.downcast::<Failure>().unwrap_or_else(read));
            }
        }
        let read = self.source.buffer().len();
        if self.offset + read as u64 > self.limit_bytes {
            // The buffer is emptied: a caller that reads on after the error must not get these bytes.
            self.source.consume(read);
            return Err(Failure::TooLarge { limit_bytes: self.limit_bytes });
        }
        Ok(())
    }

    /// Consumes `count` of the bytes that [`Self::peek`] returned.
    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        self.source.consume(count);
        self.offset += count as u64;
    }

    /// Returns the next byte, or `None` at the end of the file.
    #[inline]
    pub(super) fn next_byte(&mut self) -> Result<Option<u8>, Failure> {
        let next = self.peek()?.first().copied();
        if next.is_some() {
            self.consume(1);
        }
        Ok(next)
    }

    /// Fills `into` completely. Returns false if the file ends first.
    #[inline]
    pub(super) fn fill(&mut self, into: &mut [u8]) -> Result<bool, Failure> {
        for byte in into {
            let Some(next) = self.next_byte()? else { return Ok(false) };
            *byte = next;
        }
        Ok(true)
    }
}
