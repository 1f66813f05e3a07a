//! A device for the event queue: its events pass when a thread completes them.

use loom::sync::Mutex;

use crate::ids::{EventId, StreamId, ThreadNumber};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    InvalidValue,
    CaptureActive,
}

#[derive(Debug)]
pub struct DriverError(DriverErrorKind);

impl DriverError {
    pub fn kind(&self) -> DriverErrorKind {
        self.0
    }
}

pub type DriverResult<T> = Result<T, DriverError>;
pub type Timeline = (StreamId, Option<ThreadNumber>);

/// The calls that the event queue makes.
pub trait Driver {
    fn create_event(&self) -> DriverResult<EventId>;
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()>;
    fn query_event(&self, event: EventId) -> DriverResult<bool>;
    fn synchronize_event(&self, event: EventId) -> DriverResult<()>;
    fn destroy_event(&self, event: EventId) -> DriverResult<()>;
    fn synchronize_device(&self) -> DriverResult<()>;
}

pub(crate) fn record_outside_graphs(
    driver: &dyn Driver,
    event: EventId,
    stream: StreamId,
) -> DriverResult<()> {
    driver.record_event(event, stream)
}

pub(crate) fn synchronize_outside_captures(driver: &dyn Driver) -> DriverResult<()> {
    driver.synchronize_device()
}

pub(crate) fn timeline_of(_: &dyn Driver, stream: StreamId) -> Timeline {
    (stream, None)
}

/// The state of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not recorded, or reported as passed.
    Idle,
    Recorded,
}

/// A device whose work is done at once. It checks that an event is not recorded again while it is in use.
#[derive(Debug, Default)]
pub struct Device(Mutex<Vec<State>>);

impl Device {
    fn pass(&self, event: EventId) {
        let index = usize::try_from(event.0).expect("events are few");
        let state = &mut self.0.lock().expect("no thread panics with the lock")[index];
        assert_eq!(*state, State::Recorded, "an event is reported once");
        *state = State::Idle;
    }
}

impl Driver for Device {
    fn create_event(&self) -> DriverResult<EventId> {
        let mut all = self.0.lock().expect("no thread panics with the lock");
        all.push(State::Idle);
        Ok(EventId(all.len() as u64 - 1))
    }

    fn record_event(&self, event: EventId, _: StreamId) -> DriverResult<()> {
        let index = usize::try_from(event.0).expect("events are few");
        let state = &mut self.0.lock().expect("no thread panics with the lock")[index];
        assert_eq!(*state, State::Idle, "an event in use is not recorded again");
        *state = State::Recorded;
        Ok(())
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.pass(event);
        Ok(true)
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        self.pass(event);
        Ok(())
    }

    fn destroy_event(&self, _: EventId) -> DriverResult<()> {
        Ok(())
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        Ok(())
    }
}
