//! The bytes that queued work accesses.
//!
//! A span keeps its memory alive, so its bytes stay valid until the work has finished. It may cover several
//! mapped pieces. All accesses are atomic.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::space::Mapping;

/// A contiguous range of device addresses.
#[derive(Debug)]
pub(super) struct Span(pub(super) Vec<Part>);

/// The bytes of a span in one mapping.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) mapping: Arc<Mapping>,
    pub(super) offset: usize,
    pub(super) count: usize,
}

impl Part {
    fn bytes(&self) -> &[AtomicU8] {
        &self.mapping.bytes()[self.offset..][..self.count]
    }
}

impl Span {
    fn bytes(&self) -> impl Iterator<Item = &AtomicU8> {
        self.0.iter().flat_map(Part::bytes)
    }

    /// Sets all bytes to one value.
    pub(super) fn fill(&self, byte: u8) {
        for part in &self.0 {
            part.bytes().iter().for_each(|to| to.store(byte, Ordering::Relaxed));
        }
    }

    /// Copies `from` to the span, up to the shorter length.
    pub(super) fn write(&self, mut from: &[u8]) {
        for part in &self.0 {
            part.bytes().iter().zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
            from = from.get(part.count..).unwrap_or_default();
        }
    }

    /// Copies the span to `to`, up to the shorter length.
    pub(super) fn read(&self, mut to: &mut [u8]) {
        for part in &self.0 {
            let (first, rest) = to.split_at_mut(part.count.min(to.len()));
            first
                .iter_mut()
                .zip(part.bytes())
                .for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
            to = rest;
        }
    }

    /// Copies another span to this one, up to the shorter length, in ascending order of addresses.
    pub(super) fn copy(&self, from: &Self) {
        for (to, from) in self.bytes().zip(from.bytes()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
