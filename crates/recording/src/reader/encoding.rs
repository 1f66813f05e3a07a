//! Detects the compression of a file by its first bytes, and decompresses it.
//!
//! Several compressed members in a row are treated as one file, as `xz`, `gzip` and `zstd` themselves do.
//! Each decompressor used here grows its window with its output, so a header that claims a large window
//! does not cause a large allocation. Checksums are verified.

use std::io::{self, BufReader, Cursor, Read};

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::error::Failure;

const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";
const GZIP_MAGIC: &[u8] = b"\x1f\x8b";
const ZSTD_MAGIC: &[u8] = b"\x28\xb5\x2f\xfd";
/// A skippable zstd frame begins with any byte from 0x50 to 0x5f, followed by these three.
const ZSTD_SKIPPABLE_MAGIC: &[u8] = b"\x2a\x4d\x18";
const MAGIC_BYTES: usize = 6;
const FILE_BUFFER_BYTES: usize = 16 * 1024;

/// Returns a reader of the decoded bytes of a file. Reports the number of bytes read from the file to
/// `progress`. Decompression of zstd fails with [`OverLimit`] soon after `limit_bytes`. Other formats are
/// limited by [`Input`](super::input::Input), which reads from this reader.
pub(super) fn decoder<'a>(
    bytes: impl Read + 'a,
    progress: Option<&'a dyn Fn(u64)>,
    limit_bytes: u64,
) -> Result<Box<dyn Read + 'a>, Failure> {
    let counted = Counted { bytes, taken: 0, progress };
    let mut file = BufReader::with_capacity(FILE_BUFFER_BYTES, counted);
    let mut magic = Vec::with_capacity(MAGIC_BYTES);
    (&mut file)
        .take(MAGIC_BYTES as u64)
        .read_to_end(&mut magic)
        .map_err(|source| Failure::Read { at: 0, source })?;
    let starts_with = |expected| magic.starts_with(expected);
    let is_xz = starts_with(XZ_MAGIC);
    let is_gzip = starts_with(GZIP_MAGIC);
    let is_skippable = magic.first().is_some_and(|b| b & 0xf0 == 0x50)
        && magic.get(1..4) == Some(ZSTD_SKIPPABLE_MAGIC);
    let is_zstd = starts_with(ZSTD_MAGIC) || is_skippable;

    let whole = Cursor::new(magic).chain(file);
    Ok(if is_xz {
        Box::new(XzReader::new(whole, true))
    } else if is_gzip {
        Box::new(MultiGzDecoder::new(whole))
    } else if is_zstd {
        Box::new(ZstdFrames::new(whole, limit_bytes))
    } else {
        Box::new(whole)
    })
}

/// A reader that reports to `progress` how many bytes of the file were read.
struct Counted<'a, R> {
    bytes: R,
    taken: u64,
    progress: Option<&'a dyn Fn(u64)>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(into)?;
        self.taken += count as u64;
        if let Some(progress) = self.progress {
            progress(self.taken);
        }
        Ok(count)
    }
}

/// An error: more was decompressed than the limit allows.
#[derive(Debug, thiserror::Error)]
#[error("more decoded bytes than the limit allows")]
pub(super) struct OverLimit;

/// The number of zstd bytes decompressed before the limit is checked again.
const ZSTD_STEP_BYTES: usize = 64 * 1024;

/// Decodes consecutive zstd frames and skips the skippable ones. The decoder may buffer a whole window
/// before it returns bytes, so the decompressed bytes are counted here.
struct ZstdFrames<R> {
    source: R,
    limit_bytes: u64,
    /// Bytes returned to the caller.
    read_bytes: u64,
    /// A lower bound on the bytes of the current frame that were decompressed and not yet returned.
    kept_bytes: u64,
    /// The frame being decoded. Each frame gets a new decoder, because a reset decoder would allocate
    /// the window size that the next header claims.
    frame: Option<FrameDecoder>,
}

impl<R: Read> ZstdFrames<R> {
    fn new(source: R, limit_bytes: u64) -> Self {
        Self { source, limit_bytes, read_bytes: 0, kept_bytes: 0, frame: None }
    }

    /// Opens the next frame that is not skippable. Returns false at the end of the file.
    fn open(&mut self) -> io::Result<bool> {
        let mut first = [0];
        loop {
            if io::copy(&mut (&mut self.source).take(1), &mut first.as_mut_slice())? == 0 {
                return Ok(false);
            }
            let mut decoder = FrameDecoder::new();
            match decoder.init(first.as_slice().chain(&mut self.source)) {
                Ok(()) => {
                    self.frame = Some(decoder);
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(e) => return Err(io::Error::other(e)),
            }
        }
    }
}

impl<R: Read> Read for ZstdFrames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.frame.is_none() && !self.open()? {
                return Ok(0);
            }
            let Some(frame) = &mut self.frame else {
                return Ok(0);
            };
            while frame.can_collect() == 0 && !frame.is_finished() {
                let step = BlockDecodingStrategy::UptoBytes(ZSTD_STEP_BYTES);
                frame.decode_blocks(&mut self.source, step).map_err(io::Error::other)?;
                // The last step of a frame is not counted, because it may be shorter than the others.
                if !frame.is_finished() {
                    self.kept_bytes += ZSTD_STEP_BYTES as u64;
                }
                if self.read_bytes + self.kept_bytes > self.limit_bytes {
                    return Err(io::Error::other(OverLimit));
                }
            }
            let count = frame.read(into)?;
            if count > 0 || into.is_empty() {
                self.read_bytes += count as u64;
                self.kept_bytes = self.kept_bytes.saturating_sub(count as u64);
                return Ok(count);
            }
            let expected = frame.get_checksum_from_data();
            if expected.is_some() && expected != frame.get_calculated_checksum() {
                return Err(io::Error::other("the checksum of a zstd frame is wrong"));
            }
            self.frame = None;
            self.kept_bytes = 0;
        }
    }
}
