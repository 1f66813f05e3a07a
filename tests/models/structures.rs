//! The models. Each runs a few calls on two or three threads and checks what the structure promises.

#![expect(unsafe_code, reason = "loom checks the accesses of its cells")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::driver::Device;
use crate::event_queue::EventQueue;
use crate::ids::StreamId;
use crate::model;
use crate::sync::{GrowingMap, OnceArc, Quota, ShortLock, Swap};

/// A number in a cell. Loom finds an access to it that is not ordered with a change.
struct Checked(UnsafeCell<u64>);

// SAFETY: loom checks that no two threads access the cell at once.
unsafe impl Sync for Checked {}
// SAFETY: the cell contains a plain number.
unsafe impl Send for Checked {}

impl Checked {
    fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    fn get(&self) -> u64 {
        // SAFETY: loom checks that no thread changes the number at the same time.
        self.0.with(|value| unsafe { *value })
    }

    fn set(&self, new: u64) {
        // SAFETY: loom checks that no thread accesses the number at the same time.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}

/// The number of a value that was dropped.
const DROPPED: u64 = 99;

/// A value that is removed while a thread may read it is not dropped, and the end of that read reports it.
pub fn a_missed_removal_is_reported_by_the_end_of_the_read() {
    model(|| {
        let swap = Arc::new(Swap::new(Checked::new(1)));
        let reader = {
            let swap = Arc::clone(&swap);
            thread::spawn(move || {
                let read = swap.read();
                assert_ne!(read.get(), DROPPED);
                read.leave()
            })
        };
        swap.replace(Checked::new(2));
        let removed = swap.take_retired(|_| true);
        let was_removed = removed.inspect(|old| old.set(DROPPED)).is_some();
        let is_reported = reader.join().expect("the reader ends");
        assert!(was_removed || is_reported, "nobody removes the old value");
        assert_eq!(swap.take_retired(|_| true).is_some(), !was_removed);
    });
}

/// As above, with a second replacement and a second read on the same thread.
pub fn two_replacements_during_reads_lose_no_value() {
    model(|| {
        let swap = Arc::new(Swap::new(Checked::new(1)));
        let reader = {
            let swap = Arc::clone(&swap);
            thread::spawn(move || {
                let first = swap.read();
                assert_ne!(first.get(), DROPPED);
                let was_replaced = first.leave();
                let second = swap.read();
                assert_ne!(second.get(), DROPPED);
                second.leave() | was_replaced
            })
        };
        let mut removed = 0;
        for next in [2, 3] {
            swap.replace(Checked::new(next));
            if let Some(old) = swap.take_retired(|_| true) {
                old.set(DROPPED);
                removed += 1;
            }
        }
        let is_reported = reader.join().expect("the reader ends");
        assert!(removed == 2 || is_reported, "nobody removes the rest");
        assert_eq!(swap.retired(), 2 - removed);
    });
}

/// Holders of the lock exclude each other and see each other's changes.
pub fn the_short_lock_orders_its_holders() {
    model(|| {
        let lock = Arc::new(ShortLock::new(Checked::new(0)));
        drop(lock.lock());
        let add = |lock: &ShortLock<Checked>| {
            let sum = lock.lock();
            sum.set(sum.get() + 1);
        };
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || add(&lock))
        };
        add(&lock);
        other.join().expect("the other thread ends");
        assert_eq!(lock.try_lock().expect("no thread holds it").get(), 2);
    });
}

/// A thread with a part of the free bytes, and one that collects all parts, never exceed the limit together.
/// A request is refused only if its bytes are held.
pub fn the_quota_is_never_exceeded_and_refuses_nothing_that_fits() {
    const LIMIT: u64 = 1024;
    model(|| {
        let quota = Arc::new(Quota::new(LIMIT));
        let other = {
            let quota = Arc::clone(&quota);
            thread::spawn(move || {
                if quota.take(3).is_ok() {
                    quota.put_back(3);
                }
                u64::from(quota.take(1).is_ok())
            })
        };
        let most = LIMIT - 3;
        assert_eq!(quota.take(most), Ok(()), "the other thread holds at most 3 bytes");
        let more = u64::from(quota.take(3).is_ok()) * 3;
        let held = most + more + other.join().expect("the other thread ends");
        assert!(held <= LIMIT, "{held} bytes are held");
        assert_eq!(quota.held_bytes(), held);
    });
}

/// All threads get the value that was set first, with what was written to it before.
pub fn a_value_is_set_once() {
    model(|| {
        let cell = Arc::new(OnceArc::new());
        let set = |cell: &OnceArc<Checked>, value: u64| {
            let new = Checked::new(0);
            new.set(value);
            cell.set(Arc::new(new)).get()
        };
        let other = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || set(&cell, 1))
        };
        let seen = cell.get().map(Checked::get);
        let own = set(&cell, 2);
        assert!(seen.is_none_or(|seen| seen == own));
        assert_eq!(other.join().expect("the other thread ends"), own);
    });
}

/// A reader finds every value that was added before, while the table is replaced.
pub fn a_growing_map_loses_no_value_to_readers() {
    model(|| {
        let map: Arc<GrowingMap<Checked, 1>> = Arc::new(GrowingMap::new());
        map.add(1, Arc::new(Checked::new(1)));
        let reader = {
            let map = Arc::clone(&map);
            thread::spawn(move || {
                assert_eq!(map.get(1).map(Checked::get), Some(1));
                let second = map.get(2).map(Checked::get);
                assert!(second.is_none_or(|second| second == 2));
                // A value that was seen once is seen again.
                assert!(second.is_none() || map.get(2).is_some());
            })
        };
        // The first table has two entries, so this value takes the second table.
        map.add(2, Arc::new(Checked::new(2)));
        assert_eq!(map.get(2).map(Checked::get), Some(2));
        reader.join().expect("the reader ends");
    });
}

/// Each event is reported once, while other threads push, poll and drain.
pub fn the_event_queue_reports_each_event_once() {
    model(|| {
        let (queue, device) = (Arc::new(EventQueue::default()), Arc::new(Device::default()));
        queue.return_unused(&[]);
        let push = |queue: &EventQueue<u32>, device: &Device, item: u32| {
            let recorded = queue.record(device, [StreamId(1)]).expect("the device works");
            queue.push(device, &recorded, item);
        };
        let other = {
            let (queue, device) = (Arc::clone(&queue), Arc::clone(&device));
            thread::spawn(move || {
                push(&queue, &device, 1);
                let mut passed = Vec::new();
                queue.try_poll(&*device, |item| passed.push(item)).expect("the device works");
                passed
            })
        };
        push(&queue, &device, 2);
        let mut passed = Vec::new();
        queue.drain(&*device, |item| item == 2, |item| passed.push(item)).expect("it works");
        passed.extend(other.join().expect("the other thread ends"));
        queue.poll(&*device, |item| passed.push(item)).expect("the device works");
        passed.sort_unstable();
        assert_eq!(passed, [1, 2]);
    });
}
