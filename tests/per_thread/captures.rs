//! Captures with per-thread default streams: a graph orders only the work of one thread on its own
//! stream in one capture.

use super::*;

/// A capture of a stream and the scope that routes its requests to a new pool.
struct Graph<'a> {
    scope: PoolScope<'a>,
    pool: PoolId,
    stream: StreamId,
}

impl Bed {
    fn graph(&self, stream: StreamId) -> Graph<'_> {
        let pool = PoolId::next_capture();
        let scope = self.capture(stream, pool);
        Graph { scope, pool, stream }
    }

    #[track_caller]
    fn use_in(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Allocation {
        self.worked(self.take_in(pool, bytes, stream), stream)
    }
}

impl<'a> Graph<'a> {
    /// Ends the capture, then the scope. The pool keeps a user.
    #[track_caller]
    fn end(self, bed: &'a Bed) -> impl Drop + use<'a> {
        Capture::end(&*bed.device, self.stream).expect("all of it was joined");
        self.scope.finish()
    }
}

#[test]
fn what_is_waited_for_in_a_gone_threads_place_is_its_own_streams_only() {
    for conf in BOTH {
        let bed = Bed::new(20 * MIB, conf);
        let [captured, user] = [bed.stream(), bed.stream()];
        let graph = bed.graph(captured);
        // As far as the allocator can tell, this work may precede the capture.
        elsewhere(|| {
            let block = bed.take(20 * MIB, OWN);
            bed.record(&block, user);
            bed.give(block);
        });
        drop(graph.end(&bed));
        bed.process_events();
        let size = 20 << 20;
        assert_eq!(bed.live_and_draining(), (0, size), "{conf}: only its thread could tell");
        bed.device.interceptor().take_order();
        let events = bed.device.inner().calls("record_event");
        // `empty_cache` synchronizes the device once, and waits for the other stream with an event,
        // because that stream may belong to another device.
        bed.empty_cache();
        assert_eq!(bed.device.interceptor().take_order()[0], "synchronize_device", "{conf}");
        assert_eq!(bed.device.inner().calls("record_event"), events + 1, "{conf}");
        assert_eq!(bed.live_and_draining(), (0, 0), "{conf}");
        bed.check();
    }
}

#[test]
fn what_a_thread_freed_in_its_capture_is_settled_when_it_ends_that() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let (address, stream) = elsewhere(|| {
            let eager = bed.take(MIB, OWN);
            let address = eager.address();
            let graph = bed.graph(OWN);
            bed.give(eager);
            drop(graph.end(&bed));
            (address, bed.device.interceptor().stream(OWN).unwrap())
        });
        let waits = bed.device.inner().calls("synchronize_device");
        assert_ne!(bed.look(MIB, OWN), address, "{conf}: the other thread's work runs still");
        bed.device.inner().complete_stream(stream);
        assert_eq!(bed.look(MIB, OWN), address, "{conf}");
        assert_eq!(bed.device.inner().calls("synchronize_device"), waits, "{conf}");
        bed.check();
    }
}

#[test]
fn a_thread_that_ends_its_capture_ends_no_use_in_anothers() {
    let bed = Bed::new(ROOMY, "");
    let [stream, user] = [bed.stream(), bed.stream()];
    let graph = bed.graph(stream);
    let block = bed.take(MIB, stream);
    let address = block.address();
    bed.behind(user, bed.mark(stream));
    bed.record(&block, user);
    let block = bed.worked(block, user);
    elsewhere(|| {
        bed.record(&block, OWN);
        bed.give(block);
        drop(bed.graph(OWN).end(&bed));
        bed.device.interceptor().finish_own();
        bed.process_events();
    });
    assert_ne!(bed.look(MIB, stream), address, "the streams are not joined");
    bed.behind(stream, bed.mark(user));
    drop(graph.end(&bed));
    bed.check();
}

#[test]
fn a_captured_use_by_a_gone_threads_stream_ends_with_the_capture() {
    let bed = Bed::new(ROOMY, "");
    let stream = bed.stream();
    let graph = bed.graph(stream);
    let pool = graph.pool;
    let block = bed.take(MIB, stream);
    let address = block.address();
    let begun = bed.mark(stream);
    let done = elsewhere(|| {
        bed.behind(OWN, begun);
        bed.record(&block, OWN);
        bed.give(bed.worked(block, OWN));
        bed.mark(OWN)
    });
    bed.behind(stream, done);
    let _kept = graph.end(&bed);
    assert_eq!(bed.use_in(pool, MIB, stream).address(), address);
}

#[test]
fn a_captured_use_by_another_threads_stream_outlasts_a_free_by_this_one() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let stream = bed.stream();
        let graph = bed.graph(stream);
        let pool = graph.pool;
        let block = bed.take(MIB, stream);
        let address = block.address();
        bed.behind(OWN, bed.mark(stream));
        bed.record(&block, OWN);
        let block = bed.worked(block, OWN);
        elsewhere(|| {
            bed.give(block);
            bed.device.interceptor().finish_own();
            bed.process_events();
        });
        assert_ne!(bed.look(MIB, stream), address, "{conf}: the streams are not joined");
        bed.behind(stream, bed.mark(OWN));
        let _kept = graph.end(&bed);
        assert_eq!(bed.use_in(pool, MIB, stream).address(), address, "{conf}");
        bed.check();
    }
}

#[test]
fn a_captured_use_by_one_threads_stream_is_not_joined_by_way_of_anothers() {
    let bed = Bed::new(ROOMY, "graph_capture_record_stream_reuse:True");
    let stream = bed.stream();
    let graph = bed.graph(stream);
    let block = bed.take(MIB, stream);
    let address = block.address();
    let begun = bed.mark(stream);
    bed.behind(OWN, begun);
    bed.record(&block, OWN);
    let block = bed.worked(block, OWN);
    let done = elsewhere(|| {
        bed.behind(OWN, begun);
        bed.give(block);
        bed.mark(OWN)
    });
    bed.behind(stream, done);
    assert_ne!(bed.look(MIB, stream), address, "this thread's own stream is not joined");
    bed.behind(stream, bed.mark(OWN));
    drop(graph.end(&bed));
    bed.check();
}

#[test]
fn a_graph_orders_only_what_was_taken_in_it() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let first = bed.graph(OWN);
        let pool = first.pool;
        let result = bed.take(MIB, OWN);
        let address = result.address();
        let _kept = first.end(&bed);
        // This work is pending and belongs to no graph.
        let result = bed.worked(result, OWN);
        let second = bed.graph(OWN);
        bed.look(512, OWN);
        bed.give(result);
        let other = elsewhere(|| bed.use_in(pool, MIB, OWN));
        assert_ne!(other.address(), address, "{conf}: work runs on it still");
        drop(second.end(&bed));
        bed.device.inner().complete_all();
        assert_eq!(bed.use_in(pool, MIB, OWN).address(), address, "{conf}");
        bed.check();
    }
}

#[test]
fn a_graph_does_not_order_one_threads_stream_behind_anothers() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let graph = bed.graph(OWN);
        bed.look(4 * MIB, OWN);
        let begun = bed.mark(OWN);
        let block = bed.take(MIB, OWN);
        let mine = bed.look(2 * MIB, OWN);
        let ends = Capture::frontier(&*bed.device, OWN).unwrap();
        let address = block.address();
        let done = elsewhere(|| {
            bed.behind(OWN, begun);
            bed.give(block);
            assert_ne!(bed.look(MIB, OWN), address, "{conf}: the other's work is not before it");
            // A block that the first thread freed may be reused, but only if that thread's work is
            // ordered before.
            let taken = bed.take_on(2 * MIB, OWN);
            let before = Capture::frontier(&*bed.device, OWN).unwrap();
            let is_behind = ends.iter().all(|node| {
                let mut todo = before.clone();
                while let Some(next) = todo.pop() {
                    if next == *node {
                        return true;
                    }
                    todo.extend(Capture::dependencies(&*bed.device, next).unwrap());
                }
                false
            });
            assert!(taken.address() != mine || is_behind, "{conf}");
            bed.give(bed.worked(taken, OWN));
            bed.mark(OWN)
        });
        // From now on both threads allocate from the pool.
        let again = bed.look(3 * MIB, OWN);
        assert_ne!(bed.look(3 * MIB, OWN), again, "{conf}: the other could have taken it");
        bed.behind(OWN, done);
        drop(graph.end(&bed));
        bed.process_events();
        bed.check();
    }
}

#[test]
fn frees_put_off_in_a_capture_that_nobody_told_of_cost_no_question_each() {
    let bed = Bed::new(ROOMY, "");
    Capture::begin(&*bed.device, OWN).unwrap();
    let first = bed.look(MIB, OWN);
    assert_ne!(bed.look(MIB, OWN), first, "a launch of the graph is before nobody's work yet");
    let asked = || {
        let before = bed.device.inner().calls("capture_status");
        bed.look(512, OWN);
        bed.device.inner().calls("capture_status") - before
    };
    // The first request allocates a segment, which needs extra queries.
    asked();
    let few = asked();
    for _ in 0..50 {
        bed.look(512, OWN);
    }
    assert_eq!(asked(), few);
    Capture::end(&*bed.device, OWN).unwrap();
    assert_ne!(elsewhere(|| bed.look(MIB, OWN)), first, "it waits for its own thread");
    bed.device.inner().complete_all();
    bed.process_events();
    bed.device.inner().complete_all();
    bed.process_events();
    assert_eq!(bed.live_and_draining().1, 0);
    bed.check();
}

#[test]
fn cached_memory_of_such_a_stream_is_released_while_another_thread_captures() {
    for conf in BOTH {
        let bed = Bed::new(20 * MIB, conf);
        let [captured, other] = [bed.stream(), bed.stream()];
        bed.look(20 * MIB, OWN);
        bed.device.interceptor().finish_own();
        bed.process_events();
        let graph = bed.graph(captured);
        elsewhere(|| bed.look(20 * MIB, other));
        drop(graph.end(&bed));
        bed.check();
    }
}

#[test]
fn pages_whose_work_is_known_to_be_done_are_unmapped_without_a_wait() {
    let bed = Bed::new(ROOMY, "expandable_segments:True");
    let blocks = [0; 5].map(|_| bed.take(20 * MIB, OWN));
    for (at, block) in blocks.into_iter().enumerate() {
        if at % 2 == 0 { bed.give(block) } else { drop(block) }
    }
    bed.device.interceptor().finish_own();
    bed.process_events();
    bed.device.interceptor().take_order();
    bed.empty_cache();
    assert_eq!(bed.device.interceptor().take_order(), ["unmap"; 3]);
}
