//! Sharing on systems other than Linux: pages cannot be shared.

use std::os::fd::OwnedFd;

use super::{PageEntry, PagesShare, ProcessMark, Random, SharingError};

const NONE: SharingError = SharingError::NotSupported { what: "pages on this system" };

/// Stands in for the `Exporter` that exists on Linux. Starting it fails.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) owner: ProcessMark,
    pub(crate) secret: Random,
    pub(crate) socket: Random,
}

impl Exporter {
    pub(crate) fn start() -> Result<Self, SharingError> {
        Err(NONE)
    }

    pub(crate) fn offer(&self, _: OwnedFd) -> Result<PageEntry, SharingError> {
        Err(NONE)
    }

    pub(crate) fn withdraw(&self, _: &PageEntry) {}

    pub(crate) fn withdraw_all(&self) {}

    pub(crate) fn is_forked(&self) -> bool {
        false
    }
}

/// Stands in for the `Fetch` that exists on Linux. Fetching fails.
#[derive(Debug)]
pub(crate) struct Fetch;

impl Fetch {
    pub(crate) fn new(_: &PagesShare) -> Self {
        Self
    }

    pub(crate) fn next_pages(&mut self) -> Result<Option<Vec<OwnedFd>>, SharingError> {
        Err(NONE)
    }
}
