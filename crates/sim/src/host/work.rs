//! Streams as queues of jobs, run by a few worker threads.
//!
//! The jobs of a stream are numbered and run in order. The progress of a stream is the number of its
//! last finished job, and the mark of an event is such a number. A job that waits (for a mark or a gate)
//! blocks no worker: workers skip streams whose next job is not ready.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::refusal::{Done, Refusal, invalid};
use stratalloc::ids::{EventId, StreamId};

const WORKERS: usize = 4;

/// A point of a stream. It is passed when the stream has finished the job with this number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) stream: StreamId,
    number: u64,
}

impl Mark {
    /// Returns the later of two marks of one stream.
    pub(super) fn later(self, other: Self) -> Self {
        debug_assert_eq!(self.stream, other.stream);
        if other.number > self.number { other } else { self }
    }
}

enum Job {
    Run(Box<dyn FnOnce() + Send>),
    Wait(Mark),
    Gate(Arc<AtomicBool>),
}

#[derive(Default)]
struct Stream {
    jobs: VecDeque<(u64, Job)>,
    submitted: u64,
    done: u64,
    running: bool,
    destroyed: bool,
}

/// State that the workers and the driver's calls share.
#[derive(Default)]
pub(super) struct Queues {
    streams: HashMap<StreamId, Stream>,
    events: HashMap<EventId, Option<Mark>>,
    next_stream: u64,
    next_event: u64,
    workers: Vec<JoinHandle<()>>,
    ending: bool,
}

/// Handles of created streams start here. Other handles are addresses or small numbers.
const FIRST_STREAM: u64 = 0x5710_0000_0000_0000;

impl Queues {
    pub(super) fn create_stream(&mut self) -> StreamId {
        self.next_stream += 1;
        let stream = StreamId(FIRST_STREAM + self.next_stream);
        self.streams.insert(stream, Stream::default());
        stream
    }

    pub(super) fn destroy_stream(&mut self, stream: StreamId) -> Done<()> {
        let created = stream.0 > FIRST_STREAM && stream.0 <= FIRST_STREAM + self.next_stream;
        match self.streams.get_mut(&stream) {
            Some(own) if created && !own.destroyed => {
                own.destroyed = true;
                Ok(())
            }
            _ => Err(invalid(format!("stream {stream} was not created here or is gone"))),
        }
    }

    pub(super) fn check(&self, stream: StreamId) -> Done<()> {
        match self.streams.get(&stream) {
            Some(own) if own.destroyed => Err(invalid(format!("stream {stream} is destroyed"))),
            _ => Ok(()),
        }
    }

    /// Returns the number of events that were created and not destroyed.
    pub(super) fn events_alive(&self) -> u64 {
        self.events.len() as u64
    }

    pub(super) fn create_event(&mut self) -> EventId {
        self.next_event += 1;
        let event = EventId(self.next_event);
        self.events.insert(event, None);
        event
    }

    pub(super) fn destroy_event(&mut self, event: EventId) -> Done<()> {
        self.events.remove(&event).map(drop).ok_or_else(|| unknown(event))
    }

    /// Returns the event's mark, if it was ever recorded.
    pub(super) fn mark(&self, event: EventId) -> Done<Option<Mark>> {
        self.events.get(&event).copied().ok_or_else(|| unknown(event))
    }

    /// Records the event at the current end of the stream.
    pub(super) fn record(&mut self, event: EventId, stream: StreamId) -> Done<()> {
        let number = self.streams.entry(stream).or_default().submitted;
        let mark = self.events.get_mut(&event).ok_or_else(|| unknown(event))?;
        *mark = Some(Mark { stream, number });
        Ok(())
    }

    pub(super) fn is_passed(&self, mark: Mark) -> bool {
        self.streams.get(&mark.stream).is_none_or(|own| own.done >= mark.number)
    }

    /// Returns the current end of a stream.
    pub(super) fn end_of(&self, stream: StreamId) -> Mark {
        let number = self.streams.get(&stream).map_or(0, |own| own.submitted);
        Mark { stream, number }
    }

    /// Returns the current ends of all streams.
    pub(super) fn ends(&self) -> Vec<Mark> {
        self.streams.keys().map(|&stream| self.end_of(stream)).collect()
    }

    fn push(&mut self, stream: StreamId, job: Job) {
        let own = self.streams.entry(stream).or_default();
        own.submitted += 1;
        own.jobs.push_back((own.submitted, job));
    }

    /// Returns a stream whose next job is ready.
    fn ready(&self) -> Option<StreamId> {
        let is_ready = |own: &Stream| {
            !own.running
                && own.jobs.front().is_some_and(|(_, job)| match job {
                    Job::Run(_) => true,
                    Job::Wait(mark) => self.is_passed(*mark),
                    Job::Gate(open) => self.ending || open.load(Ordering::Acquire),
                })
        };
        self.streams.iter().find(|(_, own)| is_ready(own)).map(|(stream, _)| *stream)
    }
}

fn unknown(event: EventId) -> Refusal {
    invalid(format!("event {event} is unknown"))
}

/// The queues, and the condition variable for changes to them.
#[derive(Default)]
pub(super) struct Work {
    queues: Mutex<Queues>,
    changed: Condvar,
}

impl Work {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock()
    }

    /// Submits a job. The first one starts the workers.
    pub(super) fn submit(self: &Arc<Self>, stream: StreamId, run: Box<dyn FnOnce() + Send>) {
        self.enqueue(stream, Job::Run(run));
    }

    /// Makes later jobs of `stream` wait for the mark.
    pub(super) fn wait_for(self: &Arc<Self>, stream: StreamId, mark: Mark) {
        self.enqueue(stream, Job::Wait(mark));
    }

    /// Makes later jobs of `stream` wait until the gate is open.
    pub(super) fn hold(self: &Arc<Self>, stream: StreamId) -> Gate {
        let open = Arc::new(AtomicBool::new(false));
        self.enqueue(stream, Job::Gate(Arc::clone(&open)));
        Gate { open, work: Arc::clone(self) }
    }

    fn enqueue(self: &Arc<Self>, stream: StreamId, job: Job) {
        let mut queues = self.lock();
        queues.push(stream, job);
        if queues.workers.is_empty() {
            let start = |_| {
                let work = Arc::clone(self);
                std::thread::spawn(move || work.serve())
            };
            queues.workers = (0..WORKERS).map(start).collect();
        }
        self.changed.notify_all();
    }

    /// Waits until all marks are passed.
    pub(super) fn synchronize(&self, marks: &[Mark]) {
        let mut queues = self.lock();
        while !marks.iter().all(|mark| queues.is_passed(*mark)) {
            self.changed.wait(&mut queues);
        }
    }

    /// Runs jobs until the device is dropped. Each worker thread runs this.
    fn serve(&self) {
        let mut queues = self.lock();
        loop {
            let Some(stream) = queues.ready() else {
                if queues.ending {
                    return;
                }
                self.changed.wait(&mut queues);
                continue;
            };
            let Some(own) = queues.streams.get_mut(&stream) else { continue };
            let Some((number, job)) = own.jobs.pop_front() else { continue };
            if let Job::Run(run) = job {
                own.running = true;
                MutexGuard::unlocked(&mut queues, run);
            }
            if let Some(own) = queues.streams.get_mut(&stream) {
                own.running = false;
                own.done = number;
            }
            self.changed.notify_all();
        }
    }

    /// Finishes all submitted work, even behind closed gates, and ends the workers.
    pub(super) fn end(&self) {
        let workers = {
            let mut queues = self.lock();
            queues.ending = true;
            std::mem::take(&mut queues.workers)
        };
        self.changed.notify_all();
        for worker in workers {
            // Workers run only copies and fills of this driver, which do not panic.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work {{ streams: {} }}", self.lock().streams.len())
    }
}

/// Holds back work submitted to a stream after it, until it is opened or dropped.
#[derive(Debug)]
pub struct Gate {
    open: Arc<AtomicBool>,
    work: Arc<Work>,
}

impl Gate {
    /// Lets the stream run.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _queues = self.work.lock();
        self.open.store(true, Ordering::Release);
        self.work.changed.notify_all();
    }
}
