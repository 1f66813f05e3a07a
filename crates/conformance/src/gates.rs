//! Gates that delay the work of a stream for some operations of a test. If an allocator reuses memory too
//! early, the delayed work then overwrites the new contents, which the test detects.
//!
//! The delay is counted in operations, because time passes irregularly on a busy machine. A gate also opens
//! after a fixed time, because an allocator that waits for the work would otherwise never reach the next
//! operation. So if the test's thread is not scheduled for that long, its gates are open early.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use stratalloc::ids::StreamId;

/// The number of operations after which a gate opens at the latest.
const STEPS: u64 = 8;
/// The time after which a gate opens at the latest.
const HELD: Duration = Duration::from_millis(2);

#[derive(Debug)]
struct Closed<G> {
    stream: StreamId,
    at_step: u64,
    until: Instant,
    _gate: G,
}

#[derive(Debug)]
struct Book<G> {
    /// The closed gates, in the order in which their time ends.
    closed: VecDeque<Closed<G>>,
    step: u64,
    ends: bool,
}

#[derive(Debug)]
struct Shared<G> {
    held: Duration,
    book: Mutex<Book<G>>,
    changed: Condvar,
}

impl<G> Shared<G> {
    fn open_in_time(&self) {
        let mut book = self.book.lock();
        while !book.ends {
            match book.closed.front().map(|first| first.until) {
                None => self.changed.wait(&mut book),
                Some(until) if until <= Instant::now() => drop(book.closed.pop_front()),
                Some(until) => drop(self.changed.wait_until(&mut book, until)),
            }
        }
        book.closed.clear();
    }
}

/// Closed gates, and a thread that opens each gate when its time is over.
#[derive(Debug)]
pub(super) struct Gates<G> {
    shared: Arc<Shared<G>>,
    opener: Option<JoinHandle<()>>,
}

impl<G: Send + 'static> Gates<G> {
    pub(super) fn new() -> Self {
        Self::that_open_after(HELD)
    }

    fn that_open_after(held: Duration) -> Self {
        let book = Mutex::new(Book { closed: VecDeque::new(), step: 0, ends: false });
        let shared = Arc::new(Shared { held, book, changed: Condvar::new() });
        let own = Arc::clone(&shared);
        Self { shared, opener: Some(spawn(move || own.open_in_time())) }
    }
}

impl<G> Gates<G> {
    /// Keeps the gate in front of `stream` closed until 8 operations or 2 ms have passed, or until it is
    /// opened.
    pub(super) fn keep(&self, stream: StreamId, gate: G) {
        let mut book = self.shared.book.lock();
        let (at_step, until) = (book.step + STEPS, Instant::now() + self.shared.held);
        book.closed.push_back(Closed { stream, at_step, until, _gate: gate });
        self.shared.changed.notify_one();
    }

    /// Opens the gates in front of `stream`, because a caller waits for the work behind them.
    pub(super) fn open(&self, stream: StreamId) {
        self.shared.book.lock().closed.retain(|closed| closed.stream != stream);
    }

    /// Opens all gates at the end of the test.
    pub(super) fn open_all(&self) {
        self.shared.book.lock().closed.clear();
    }

    /// Counts an operation, and opens the gates whose number of operations is reached.
    pub(super) fn step(&self) {
        let mut book = self.shared.book.lock();
        book.step += 1;
        let step = book.step;
        book.closed.retain(|closed| closed.at_step > step);
    }
}

impl<G> Drop for Gates<G> {
    fn drop(&mut self) {
        self.shared.book.lock().ends = true;
        self.shared.changed.notify_one();
        if let Some(opener) = self.opener.take() {
            opener.join().expect("gates open");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Returns a gate, and a weak reference that is dead once the gate is open.
    fn gate() -> (Arc<()>, Weak<()>) {
        let gate = Arc::new(());
        let closed = Arc::downgrade(&gate);
        (gate, closed)
    }

    fn is_closed(closed: &Weak<()>) -> bool {
        closed.strong_count() > 0
    }

    #[test]
    fn a_gate_opens_at_a_wait_or_after_steps() {
        let gates = Gates::that_open_after(Duration::from_secs(600));
        let ((one, first), (two, second)) = (gate(), gate());
        gates.keep(StreamId(1), one);
        gates.keep(StreamId(2), two);
        gates.open(StreamId(1));
        assert!(!is_closed(&first) && is_closed(&second));
        (1..STEPS).for_each(|_| gates.step());
        assert!(is_closed(&second));
        gates.step();
        assert!(!is_closed(&second));
        let (three, third) = gate();
        gates.keep(StreamId(1), three);
        assert!(is_closed(&third));
        drop(gates);
        assert!(!is_closed(&third));
    }

    /// Sends a message when it is dropped.
    struct Signal(Sender<()>);

    impl Drop for Signal {
        fn drop(&mut self) {
            self.0.send(()).expect("the test waits for it");
        }
    }

    #[test]
    fn a_gate_opens_by_itself() {
        let gates = Gates::new();
        let (opens, is_open) = channel();
        gates.keep(StreamId(1), Signal(opens));
        is_open.recv().expect("the gate was dropped");
    }
}
