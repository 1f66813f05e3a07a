//! Bytes that a piece of work touches, wherever they are mapped.
//!
//! A span holds what it lies in, so its bytes stay valid until the work is done. It may run over
//! several mapped pieces. All access is to atomics; nothing here is unsafe and nothing waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::memory::Region;
use super::space::Mapping;

/// Device bytes without a gap in their addresses.
#[derive(Debug)]
pub(super) struct Span(pub(super) Vec<Part>);

/// A piece of a span.
#[derive(Debug)]
pub(super) struct Part {
    holder: Holder,
    offset: usize,
    count: usize,
}

#[derive(Debug)]
enum Holder {
    Region(Arc<Region>),
    Mapping(Arc<Mapping>),
}

impl Part {
    pub(super) fn of_region(region: &Arc<Region>, offset: usize, count: usize) -> Self {
        Self { holder: Holder::Region(Arc::clone(region)), offset, count }
    }

    pub(super) fn of_mapping(mapping: &Arc<Mapping>, offset: usize, count: usize) -> Self {
        Self { holder: Holder::Mapping(Arc::clone(mapping)), offset, count }
    }

    fn bytes(&self) -> &[AtomicU8] {
        let all = match &self.holder {
            Holder::Region(region) => region.bytes(),
            Holder::Mapping(mapping) => mapping.bytes(),
        };
        &all[self.offset..][..self.count]
    }
}

impl Span {
    fn bytes(&self) -> impl Iterator<Item = &AtomicU8> {
        self.0.iter().flat_map(Part::bytes)
    }

    /// Writes one value everywhere.
    pub(super) fn fill(&self, byte: u8) {
        for part in &self.0 {
            part.bytes().iter().for_each(|to| to.store(byte, Ordering::Relaxed));
        }
    }

    /// Writes as many bytes as both have.
    pub(super) fn write(&self, from: &[u8]) {
        self.bytes().zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
    }

    /// Reads as many bytes as both have.
    pub(super) fn read(&self, to: &mut [u8]) {
        to.iter_mut().zip(self.bytes()).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    }

    /// Copies as many bytes as both have, from the lowest up.
    pub(super) fn copy(&self, from: &Self) {
        for (to, from) in self.bytes().zip(from.bytes()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
