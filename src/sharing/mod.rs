//! Sharing of blocks with other processes: the bytes of a handle, and descriptors of pages.
//!
//! A [`SharedHandle`] consists of bytes that can be sent over any channel. `format` defines their
//! layout. There are three kinds of handle:
//!
//! - A block of a plain allocation (a fixed segment): the driver's handle of the allocation, and the
//!   block's offset.
//! - A block of an expandable segment: the pages that cover the block, which are sent as file
//!   descriptors. The handle names the pages and a socket of the process that owns them. `exporter`
//!   sends the descriptors over the socket, and `fetch` requests them. A page has a random identity,
//!   and a process is identified by its id and start time. So a later page or process is never mistaken
//!   for an earlier one. Processes in other network namespaces cannot reach the socket.
//! - A block of an expandable segment, where the driver allows fabric handles and the setting
//!   `expandable_segments_handle_type:posix_fd` is absent. The handle contains the driver's handle of
//!   each page, so no request to the exporter is needed.
//!
//! Pages are created exportable only under `expandable_segments_ipc:True`, because on the device `host`,
//! which simulates a GPU in host memory, each such page needs a descriptor, and a second one once it is
//! shared. The statistics of a process include only memory that it created. When the owner frees a block
//! and unmaps its pages, other processes keep the mappings that they have, but cannot open the handle
//! again.
//!
//! Data from another process is untrusted until `format` or `packet` has checked it. This module calls
//! no driver and accesses no blocks or addresses of this process.

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

/// 128 random bits: the name of a socket, or the secret of a request.
pub(crate) type Random = [u8; 16];

/// The most pages in one handle.
pub const PAGES_MAX: usize = 1 << 16;
