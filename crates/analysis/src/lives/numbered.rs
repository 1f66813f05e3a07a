//! Numbers for different items, such as the streams of a recording.

use std::collections::HashMap;
use std::hash::Hash;

/// Different items, each once. The number of an item is its index.
#[derive(Clone, Debug, Default)]
pub struct Numbered<T> {
    /// The items, in the order of their numbers.
    pub items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T: Copy + Eq + Hash> Numbered<T> {
    /// Returns the number of an item. Appends the item if it is new.
    pub fn number(&mut self, item: T) -> u32 {
        *self.numbers.entry(item).or_insert_with(|| {
            self.items.push(item);
            u32::try_from(self.items.len() - 1).unwrap_or(0)
        })
    }
}
