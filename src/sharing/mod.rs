//! What leaves the process when a block is shared: bytes of a handle, and descriptors of its pages.
//!
//! A [`SharedHandle`] is a few bytes that any channel may carry. For a block of a plain allocation
//! they hold the driver's own handle. For a block of pages they name the pages and the socket of
//! the process that has them; `exporter` answers there, `fetch` asks. Pages of a fabric need nobody to
//! ask: the driver's handles are the whole. Whatever comes from another
//! process is hostile until `format` or `packet` has read it. Nothing here knows a driver, a block
//! or an address of this process.

mod error;
mod format;
mod packet;
mod process;

#[cfg(target_os = "linux")]
mod exporter;
#[cfg(target_os = "linux")]
mod fetch;

#[cfg(not(target_os = "linux"))]
mod unsupported;

pub use error::{FormatError, SharingError};
#[cfg(target_os = "linux")]
pub(crate) use exporter::Exporter;
#[cfg(target_os = "linux")]
pub(crate) use fetch::Fetch;
pub use format::SharedHandle;
pub(crate) use format::{Contents, Extent, FabricShare, FixedShare, PageEntry, PagesShare};
pub(crate) use process::ProcessMark;
#[cfg(not(target_os = "linux"))]
pub(crate) use unsupported::{Exporter, Fetch};

/// 128 random bits: the name of a socket, or what a request must know.
pub(crate) type Random = [u8; 16];

/// The most pages that one handle may name.
pub const PAGES_MAX: usize = 1 << 16;
