//! Packets between the two processes: one request and one answer.
//!
//! A request contains the secret and the identities of pages. An answer contains a status, and the
//! descriptors as ancillary data. Both have a fixed little-endian layout and a maximum size. Larger and
//! malformed packets are rejected.

use super::Random;

/// The most pages in one request. The system passes at most 253 descriptors at once.
pub(super) const CHUNK_PAGES: usize = 250;
const MAGIC: [u8; 8] = *b"stratrq1";
const HEAD_BYTES: usize = 32;
/// The maximum size of a request.
pub(super) const REQUEST_BYTES_MAX: usize = HEAD_BYTES + CHUNK_PAGES * 8;
/// The exact size of an answer.
pub(super) const ANSWER_BYTES: usize = 8;

/// A request for pages, by their identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageRequest {
    pub(super) secret: Random,
    pub(super) identities: Vec<u64>,
}

/// The exporter's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Success, with the number of descriptors that the packet carries.
    Pages(u32),
    /// The secret in the request is wrong.
    Refused,
    /// A page is no longer shared. The number is its index in the request.
    Released(u32),
    /// The request is invalid.
    Malformed,
}

impl PageRequest {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let count = u32::try_from(self.identities.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.identities.len() * 8);
        bytes.extend(MAGIC);
        bytes.extend(self.secret);
        bytes.extend(count.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.identities.iter().flat_map(|identity| identity.to_le_bytes()));
        bytes
    }

    /// Decodes a request. Returns `None` for bytes that are not a valid request for 1 to
    /// [`CHUNK_PAGES`] pages.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let (pages, []) = rest.as_chunks::<8>() else { return None };
        let count = u32::from_le_bytes(head[24..28].try_into().ok()?);
        let legal = head[..8] == MAGIC
            && head[28..] == [0; 4]
            && usize::try_from(count) == Ok(pages.len())
            && (1..=CHUNK_PAGES).contains(&pages.len());
        let secret = head[8..24].try_into().ok()?;
        let identities = || pages.iter().map(|page| u64::from_le_bytes(*page)).collect();
        legal.then(|| Self { secret, identities: identities() })
    }
}

impl Answer {
    pub(super) fn to_bytes(self) -> [u8; ANSWER_BYTES] {
        let (status, number) = match self {
            Self::Pages(count) => (0u32, count),
            Self::Refused => (1, 0),
            Self::Released(page) => (2, page),
            Self::Malformed => (3, 0),
        };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..4].copy_from_slice(&status.to_le_bytes());
        bytes[4..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let ([status, number], []) = bytes.as_chunks::<4>() else { return None };
        let number = u32::from_le_bytes(*number);
        Some(match u32::from_le_bytes(*status) {
            0 => Self::Pages(number),
            1 => Self::Refused,
            2 => Self::Released(number),
            3 => Self::Malformed,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_decoded_unchanged_and_everything_else_is_rejected() {
        for count in [1, 2, CHUNK_PAGES] {
            let request = PageRequest { secret: [7; 16], identities: (0..count as u64).collect() };
            let bytes = request.to_bytes();
            assert!(bytes.len() <= REQUEST_BYTES_MAX);
            assert_eq!(PageRequest::from_bytes(&bytes), Some(request));
            for len in 0..bytes.len() {
                assert_eq!(PageRequest::from_bytes(&bytes[..len]), None);
            }
        }
        for count in [0, CHUNK_PAGES as u64 + 1] {
            let request = PageRequest { secret: [7; 16], identities: (0..count).collect() };
            assert_eq!(PageRequest::from_bytes(&request.to_bytes()), None);
        }
        for answer in [Answer::Pages(9), Answer::Refused, Answer::Released(3), Answer::Malformed] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
        }
        assert_eq!(Answer::from_bytes(&[9; 8]), None);
        assert_eq!(Answer::from_bytes(&[0; 7]), None);
    }
}
