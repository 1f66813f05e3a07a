//! Accesses to the bytes of host memory.

/// An access to bytes of a block.
#[derive(Debug)]
pub enum ByteAccess<'b> {
    /// Copies bytes of the block here. Bytes that nothing has written yet have arbitrary values.
    Read(&'b mut [u8]),
    /// Copies these bytes to the block.
    Write(&'b [u8]),
    /// Writes one byte several times.
    Fill {
        /// The byte.
        byte: u8,
        /// The number of bytes to write.
        size_bytes: u64,
    },
}

impl ByteAccess<'_> {
    /// Returns the number of bytes that are read or written.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Read(into) => into.len() as u64,
            Self::Write(from) => from.len() as u64,
            Self::Fill { size_bytes, .. } => *size_bytes,
        }
    }
}
