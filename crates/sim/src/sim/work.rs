//! Streams and events: which work has been submitted, and which has finished.
//!
//! A **mark** is a point of a stream. All marks are numbered in one sequence, so the progress of a stream is
//! the number up to which it has finished. Marks of one stream finish in order, except those that a test
//! finishes out of order (`early`).
//!
//! Without threads no work runs. Waits between streams are kept as pairs of such numbers: finishing a mark
//! also finishes the marks that it waited for. With threads (`workers`), tasks, waits and gates are jobs,
//! which are numbered in the same sequence. When a job ends, its stream has finished all marks before its
//! next job.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use hashbrown::HashMap;

use super::workers::{Job, WORKERS};
use super::{Done, EventMode, Refusal, ensure, invalid};
use stratalloc::driver::NodeId;
use stratalloc::ids::{EventId, StreamId};

#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    stream: usize,
    number: u64,
    /// The simulated time at which it finishes by itself, in `EventMode::After`.
    ready_ns: u64,
}

impl Mark {
    /// Returns the later of two marks of one stream.
    pub(super) fn later(self, other: Self) -> Self {
        if other.number > self.number { other } else { self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// Never recorded: counts as finished.
    Fresh,
    /// Recorded on a stream that is not captured.
    Marked(Mark),
    /// Recorded on a captured stream.
    Captured {
        capture: u64,
        /// The node of the record.
        node: NodeId,
    },
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Life {
    #[default]
    /// Not created by this device, but named by a call: stream 0, or a handle of a recording.
    Named,
    Created,
    Destroyed,
}

#[derive(Debug, Default)]
struct Stream {
    id: StreamId,
    life: Life,
    /// All marks up to this number have finished.
    done: u64,
    /// Marks above `done` that a test finished out of order.
    early: Vec<u64>,
    /// The simulated time at which all marks so far finish by themselves, in `EventMode::After`.
    ready_ns: u64,
    /// Marks of this stream after number `.0` wait for mark `.1`. Used in `EventMode::Manual` only.
    waits: Vec<(u64, Mark)>,
    /// Jobs that worker threads have still to run, by number.
    jobs: VecDeque<(u64, Job)>,
    is_running: bool,
}

impl Stream {
    fn is_idle(&self) -> bool {
        self.jobs.is_empty() && !self.is_running
    }
}

#[derive(Debug, Default)]
pub(super) struct Work {
    mode: EventMode,
    streams: Vec<Stream>,
    by_id: HashMap<StreamId, usize>,
    /// The stream of the last call and its index. The next call often names the same stream.
    last: Option<(StreamId, usize)>,
    /// Events that were created and not destroyed.
    pub(super) events: HashMap<EventId, Event>,
    /// The number of the last mark or job.
    pub(super) last_mark: u64,
    last_event: u64,
    last_stream: u64,
    /// Whether worker threads finish the work. The mode is `Manual` then.
    pub(super) has_threads: bool,
    pub(super) workers: Vec<JoinHandle<()>>,
    /// The number of threads to start.
    pub(super) workers_max: usize,
    /// The device is being dropped: gates no longer hold work back, and workers end when nothing is left.
    pub(super) is_ending: bool,
}

/// Handles of created streams start here, far from the handles of recordings.
const FIRST_STREAM: u64 = 0x51_0000;

impl Work {
    pub(super) fn new(mode: EventMode, has_threads: bool) -> Self {
        let last_stream = FIRST_STREAM;
        Self { mode, has_threads, last_stream, workers_max: WORKERS, ..Self::default() }
    }

    pub(super) fn create_stream(&mut self) -> StreamId {
        loop {
            self.last_stream += 1;
            let id = StreamId(self.last_stream);
            if !self.by_id.contains_key(&id) {
                self.add_stream(id, Life::Created);
                return id;
            }
        }
    }

    pub(super) fn destroy_stream(&mut self, stream: StreamId) -> Done<()> {
        match self.by_id.get(&stream) {
            Some(&index) if self.streams[index].life == Life::Created => {
                self.streams[index].life = Life::Destroyed;
                Ok(())
            }
            _ => Err(invalid(format!("stream {stream} was not created here or is destroyed"))),
        }
    }

    fn add_stream(&mut self, id: StreamId, life: Life) -> usize {
        let index = self.streams.len();
        self.by_id.insert(id, index);
        self.streams.push(Stream { id, life, ..Stream::default() });
        index
    }

    /// Returns the index of a stream. Adds a stream that is not known yet, and refuses a destroyed one.
    #[inline]
    pub(super) fn stream(&mut self, id: StreamId) -> Done<usize> {
        let index = match self.last {
            Some((last, index)) if last == id => index,
            _ => self.any_stream(id),
        };
        self.last = Some((id, index));
        ensure!(self.streams[index].life != Life::Destroyed, "stream {id} is destroyed");
        Ok(index)
    }

    pub(super) fn create_event(&mut self) -> EventId {
        self.last_event += 1;
        let id = EventId(self.last_event);
        self.events.insert(id, Event::Fresh);
        id
    }

    pub(super) fn destroy_event(&mut self, event: EventId) -> Done<()> {
        self.events.remove(&event).map(drop).ok_or_else(|| unknown_event(event))
    }

    #[inline]
    pub(super) fn event(&self, event: EventId) -> Done<Event> {
        let found = self.events.get(&event).copied();
        found.ok_or_else(|| unknown_event(event))
    }

    /// Changes an event that was created and not destroyed.
    pub(super) fn set_event(&mut self, event: EventId, to: Event) {
        if let Some(event) = self.events.get_mut(&event) {
            *event = to;
        }
    }

    /// Marks the current end of the stream. In `EventMode::After`, the mark counts as work that takes that
    /// time.
    #[inline]
    pub(super) fn mark(&mut self, stream: usize, now_ns: u64) -> Mark {
        if let EventMode::After(ns) = self.mode {
            let own = &mut self.streams[stream];
            own.ready_ns = own.ready_ns.max(now_ns.saturating_add(ns));
        }
        self.end_of(stream)
    }

    /// Returns a new mark at the current end of a stream, after all submitted work and waits.
    #[inline]
    pub(super) fn end_of(&mut self, stream: usize) -> Mark {
        self.last_mark += 1;
        let own = &mut self.streams[stream];
        if self.has_threads && own.is_idle() {
            own.done = self.last_mark;
        }
        Mark { stream, number: self.last_mark, ready_ns: own.ready_ns }
    }

    /// Returns new marks at the current ends of all streams.
    pub(super) fn ends(&mut self) -> Vec<Mark> {
        (0..self.streams.len()).map(|stream| self.end_of(stream)).collect()
    }

    /// Adds a job for the worker threads.
    pub(super) fn push(&mut self, stream: usize, job: Job) {
        self.last_mark += 1;
        self.streams[stream].jobs.push_back((self.last_mark, job));
    }

    /// Takes the next job of a stream whose next job is ready.
    pub(super) fn next_job(&mut self) -> Option<(usize, Job)> {
        let is_ready = |own: &Stream| {
            !own.is_running
                && own.jobs.front().is_some_and(|(_, job)| match job {
                    Job::Run(_) => true,
                    Job::Wait(mark) => self.is_finished(*mark, 0),
                    Job::Gate(open) => self.is_ending || open.load(Ordering::Acquire),
                })
        };
        let stream = self.streams.iter().position(is_ready)?;
        let own = &mut self.streams[stream];
        let (_, job) = own.jobs.pop_front()?;
        own.is_running = true;
        Some((stream, job))
    }

    /// Ends the running job of a stream. Finishes the marks between it and the next job.
    pub(super) fn end_job(&mut self, stream: usize) {
        let own = &mut self.streams[stream];
        own.is_running = false;
        own.done = own.jobs.front().map_or(self.last_mark, |(next, _)| *next - 1);
    }

    #[inline]
    pub(super) fn is_finished(&self, mark: Mark, now_ns: u64) -> bool {
        let by_itself = match self.mode {
            EventMode::Immediate => true,
            EventMode::Manual => false,
            EventMode::After(_) => now_ns >= mark.ready_ns,
        };
        let stream = &self.streams[mark.stream];
        by_itself || mark.number <= stream.done || stream.early.contains(&mark.number)
    }

    /// Makes later marks of `stream` wait for `mark`.
    pub(super) fn wait(&mut self, stream: usize, mark: Mark, now_ns: u64) {
        let finished = self.is_finished(mark, now_ns);
        let position = self.last_mark;
        let own = &mut self.streams[stream];
        own.ready_ns = own.ready_ns.max(mark.ready_ns);
        if self.has_threads && !finished {
            // No worker has to be woken: the new job is not ready before the mark is finished.
            self.push(stream, Job::Wait(mark));
        } else if self.mode == EventMode::Manual && !finished {
            own.waits.push((position, mark));
        }
    }

    /// Finishes a mark, all marks before it on its stream, and the marks that these waited for. Returns the
    /// simulated time at which the mark would have finished by itself.
    pub(super) fn finish(&mut self, mark: Mark) -> u64 {
        let mut todo = Vec::new();
        let mut next = Some((mark.stream, mark.number));
        while let Some((stream, number)) = next {
            next = todo.pop();
            let own = &mut self.streams[stream];
            if number <= own.done {
                continue;
            }
            own.done = number;
            own.early.retain(|early| *early > number);
            if own.waits.is_empty() {
                continue;
            }
            let waits = own.waits.extract_if(.., |(position, _)| *position < number);
            todo.extend(waits.map(|(_, mark)| (mark.stream, mark.number)));
            next = next.or_else(|| todo.pop());
        }
        mark.ready_ns
    }

    /// Finishes all marks of all streams.
    pub(super) fn finish_all(&mut self) {
        for own in &mut self.streams {
            own.done = self.last_mark;
            own.early.clear();
            own.waits.clear();
        }
    }

    /// Finishes one mark alone. Marks before it stay unfinished.
    pub(super) fn finish_early(&mut self, mark: Mark) {
        let stream = &mut self.streams[mark.stream];
        if mark.number > stream.done && !stream.early.contains(&mark.number) {
            stream.early.push(mark.number);
        }
    }

    /// Finishes the work of a stream up to and including the mark with this number.
    pub(super) fn finish_until(&mut self, stream: usize, number: u64) {
        self.finish(Mark { stream, number, ready_ns: 0 });
    }

    /// Like [`stream`](Self::stream), but finds destroyed streams too.
    pub(super) fn any_stream(&mut self, id: StreamId) -> usize {
        self.known_stream(id).unwrap_or_else(|| self.add_stream(id, Life::Named))
    }

    /// Like [`any_stream`](Self::any_stream), but adds none.
    pub(super) fn known_stream(&self, id: StreamId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// Returns the unfinished events, in the order in which they were recorded.
    pub(super) fn pending(&self, now_ns: u64) -> Vec<(EventId, StreamId)> {
        let marked = self.events.iter().filter_map(|(id, event)| match event {
            Event::Marked(mark) if !self.is_finished(*mark, now_ns) => Some((*id, *mark)),
            _ => None,
        });
        let mut pending: Vec<_> = marked.collect();
        pending.sort_unstable_by_key(|(_, mark)| mark.number);
        let named = pending.into_iter().map(|(id, mark)| (id, self.streams[mark.stream].id));
        named.collect()
    }
}

fn unknown_event(event: EventId) -> Refusal {
    invalid(format!("event {event} was never created or is destroyed"))
}
