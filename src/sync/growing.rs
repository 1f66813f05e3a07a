//! A map from numbers to shared values that threads read without a lock. Values are added and never removed.
//!
//! The map is a hash table with open addressing, at most half full, so a lookup mostly touches one cache
//! line. When half of a table is used, one of twice the size replaces it. Readers may still use the old
//! table, so all tables live as long as the map: together they take twice the memory of the last one.
//!
//! A reader of an old table does not find the values that were added later. So a reader that finds nothing
//! must look again under the lock of the writers before it adds a value.

use std::sync::Arc;

use super::OnceArc;
use super::platform::{AtomicU64, AtomicUsize, Ordering};

/// The number of tables, each twice as large as the one before.
const TABLES: usize = 12;

/// See the [module](self). The first table has 2 to the power of `FIRST_BITS` entries.
#[derive(Debug)]
pub(crate) struct GrowingMap<T, const FIRST_BITS: u32 = 6> {
    tables: [OnceArc<Table<T>>; TABLES],
    /// The number of tables. The last one is in use.
    table_count: AtomicUsize,
    /// The number of values. Changed by the writers only.
    len: AtomicUsize,
}

#[derive(Debug)]
struct Table<T> {
    entries: Box<[Entry<T>]>,
    /// The number of bits of a hash that are not used.
    shift: u32,
}

/// Empty while it has no value. The key is set before the value.
#[derive(Debug)]
struct Entry<T> {
    key: AtomicU64,
    value: OnceArc<T>,
}

impl<T, const FIRST_BITS: u32> GrowingMap<T, FIRST_BITS> {
    /// The most values.
    pub(crate) const VALUES_MAX: usize = 1 << (FIRST_BITS as usize + TABLES - 2);

    /// Creates an empty map, which takes no memory of its own.
    pub(crate) fn new() -> Self {
        Self {
            tables: std::array::from_fn(|_| OnceArc::new()),
            table_count: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
        }
    }

    /// Returns the value with this key. See the [module](self) for values that were just added.
    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<&T> {
        self.table()?.get(key)
    }

    #[inline]
    fn table(&self) -> Option<&Table<T>> {
        let last = self.table_count.load(Ordering::Acquire).wrapping_sub(1);
        self.tables.get(last)?.get()
    }

    /// Adds a value under a key that the map does not contain. Calls must not overlap.
    ///
    /// # Panics
    ///
    /// If the map has [`VALUES_MAX`](Self::VALUES_MAX) values.
    pub(crate) fn add(&self, key: u64, value: Arc<T>) -> &T {
        let len = self.len.load(Ordering::Relaxed) + 1;
        let table = match self.table() {
            Some(table) if len * 2 <= table.entries.len() => table,
            full => self.grow(full),
        };
        self.len.store(len, Ordering::Relaxed);
        table.add(key, value)
    }

    /// Replaces the table by one of twice the size with the same values.
    fn grow(&self, full: Option<&Table<T>>) -> &Table<T> {
        let count = self.table_count.load(Ordering::Relaxed);
        let place = self.tables.get(count).expect("the map has fewer values than `VALUES_MAX`");
        let next = Table::new(full.map_or(FIRST_BITS, |table| u64::BITS - table.shift + 1));
        for entry in full.iter().flat_map(|table| &table.entries) {
            if let Some(value) = entry.value.share() {
                next.add(entry.key.load(Ordering::Relaxed), value);
            }
        }
        let next = place.set(Arc::new(next));
        // A reader that sees this number sees all values that were added before.
        self.table_count.store(count + 1, Ordering::Release);
        next
    }

    /// Returns all values, in no particular order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.table().into_iter().flat_map(|table| &table.entries).filter_map(|own| own.value.get())
    }
}

impl<T> Table<T> {
    /// Creates a table of 2 to the power of `bits` empty entries.
    fn new(bits: u32) -> Self {
        let empty = |_| Entry { key: AtomicU64::new(0), value: OnceArc::new() };
        Self { entries: (0..1 << bits).map(empty).collect(), shift: u64::BITS - bits }
    }

    #[inline]
    fn get(&self, key: u64) -> Option<&T> {
        // Ends because half of the entries are empty.
        self.from(key).find_map(|entry| match entry.value.get() {
            Some(_) if entry.key.load(Ordering::Relaxed) != key => None,
            value => Some(value),
        })?
    }

    fn add(&self, key: u64, value: Arc<T>) -> &T {
        let empty = self.from(key).find(|entry| entry.value.get().is_none());
        let entry = empty.expect("half of the entries are empty");
        // The store of the value releases the key.
        entry.key.store(key, Ordering::Relaxed);
        entry.value.set(value)
    }

    /// Returns the entries from the one at which a search for `key` begins, again and again.
    #[inline]
    fn from(&self, key: u64) -> impl Iterator<Item = &Entry<T>> {
        // Keys are often addresses with equal low bits, so the high bits of a product are used.
        let hash = key.wrapping_mul(0xAA78_4E2B_66CE_E669) >> self.shift;
        let (first, last) = (usize::try_from(hash).unwrap_or(0), self.entries.len() - 1);
        (first..).map(move |place| &self.entries[place & last])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_found_while_the_map_grows() {
        let map: GrowingMap<_> = GrowingMap::new();
        let key = |n: u64| n * 64;
        assert_eq!(map.get(0), None);
        for n in 0..1000 {
            assert_eq!(map.add(key(n), Arc::new(n)), &n);
            assert_eq!([map.get(key(n)), map.get(key(n + 1))], [Some(&n), None]);
        }
        assert!((0..1000).all(|n| map.get(key(n)) == Some(&n)));
        let mut values: Vec<_> = map.values().copied().collect();
        values.sort_unstable();
        assert!(values.into_iter().eq(0..1000));
    }

    #[test]
    fn a_lookup_among_many_values_takes_a_few_steps() {
        let map: GrowingMap<_> = GrowingMap::new();
        for n in 0..16_384 {
            map.add(0x1000 + n * 0x100, Arc::new(n));
        }
        let table = map.table().unwrap();
        let steps = |n: u64| {
            let key = 0x1000 + n * 0x100;
            let at = table.from(key).position(|own| own.key.load(Ordering::Relaxed) == key);
            at.unwrap() + 1
        };
        let all: usize = (0..16_384).map(steps).sum();
        assert!(all <= 2 * 16_384, "{all} steps for 16,384 lookups");
    }

    #[test]
    fn all_values_are_dropped_with_the_map() {
        let value = Arc::new(());
        let map: GrowingMap<_> = GrowingMap::new();
        (0..100).for_each(|n| _ = map.add(n, Arc::clone(&value)));
        drop(map);
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn threads_find_what_was_added_before_they_looked() {
        let (map, added): (GrowingMap<_>, _) = (GrowingMap::new(), AtomicU64::new(0));
        let count = if cfg!(miri) { 200 } else { 10_000 };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut random = 1u64;
                    loop {
                        let known = added.load(Ordering::Acquire);
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        if known > 0 {
                            let n = (random >> 33) % known;
                            assert_eq!(map.get(n * 64), Some(&n));
                        }
                        if known == count {
                            break;
                        }
                    }
                });
            }
            for n in 0..count {
                map.add(n * 64, Arc::new(n));
                added.store(n + 1, Ordering::Release);
            }
        });
    }
}
