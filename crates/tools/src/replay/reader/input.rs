//! A stream of the decoded bytes. Counts and limits them, and never holds all of them.
//!
//! All parsers read from this stream. The count is the offset in error messages. The limit stops a
//! decompression bomb at [`Limits::decoded_bytes`](super::Limits::decoded_bytes).

use std::io::{self, Read};

use super::encoding::OverLimit;
use super::error::Failure;

/// The size of the buffer: small compared with any recording, large enough to make system calls rare.
const BUFFER_BYTES: usize = 16 * 1024;

/// The decoded bytes, on their way to a parser.
pub(super) struct Input<'a> {
    source: Box<dyn Read + 'a>,
    buffer: Box<[u8]>,
    /// The unread part of the buffer.
    start: usize,
    end: usize,
    /// The number of decoded bytes before the first one in the buffer.
    before: u64,
    limit_bytes: u64,
}

impl<'a> Input<'a> {
    pub(super) fn new(source: Box<dyn Read + 'a>, limit_bytes: u64) -> Self {
        Self {
            source,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            before: 0,
            limit_bytes,
        }
    }

    /// Returns the number of decoded bytes consumed so far.
    pub(super) fn offset(&self) -> u64 {
        self.before + self.start as u64
    }

    /// Returns the unread bytes of the buffer. They are empty only at the end of the file.
    pub(super) fn peek(&mut self) -> Result<&[u8], Failure> {
        if self.start == self.end {
            self.refill()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Consumes `count` of the bytes that [`Self::peek`] returned.
    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start);
        self.start += count;
    }

    /// Returns the next byte, or `None` at the end of the file.
    #[inline]
    pub(super) fn next_byte(&mut self) -> Result<Option<u8>, Failure> {
        if self.start == self.end {
            self.refill()?;
            if self.start == self.end {
                return Ok(None);
            }
        }
        let byte = self.buffer[self.start];
        self.start += 1;
        Ok(Some(byte))
    }

    /// Fills `into` completely. Returns false if the file ends first.
    pub(super) fn fill(&mut self, into: &mut [u8]) -> Result<bool, Failure> {
        let mut filled = 0;
        while filled < into.len() {
            let at_hand = self.peek()?;
            if at_hand.is_empty() {
                return Ok(false);
            }
            let count = at_hand.len().min(into.len() - filled);
            into[filled..filled + count].copy_from_slice(&at_hand[..count]);
            self.consume(count);
            filled += count;
        }
        Ok(true)
    }

    fn refill(&mut self) -> Result<(), Failure> {
        self.before += self.end as u64;
        self.start = 0;
        self.end = 0;
        let at = self.before;
        self.end = loop {
            match self.source.read(&mut self.buffer) {
                Ok(count) => break count.min(self.buffer.len()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) if source.get_ref().is_some_and(|inner| inner.is::<OverLimit>()) => {
                    return Err(Failure::TooLarge { limit_bytes: self.limit_bytes });
                }
                Err(source) => return Err(Failure::Read { at, source }),
            }
        };
        if self.before + self.end as u64 > self.limit_bytes {
            // A caller that continues to read after the error gets no bytes beyond the limit.
            self.end = 0;
            return Err(Failure::TooLarge { limit_bytes: self.limit_bytes });
        }
        Ok(())
    }
}
