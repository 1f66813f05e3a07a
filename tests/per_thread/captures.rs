//! Captures with per-thread default streams: when a block that was freed during a capture may be reused.

use super::*;

/// A capture of a stream and the scope that routes its requests to a new pool.
struct Graph<'a> {
    scope: PoolScope<'a>,
    pool: PoolId,
    stream: StreamId,
}

impl Fixture {
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
    /// Ends the capture, then the scope. The result keeps the pool in use until it is dropped.
    #[track_caller]
    fn end(self, fixture: &'a Fixture) -> impl Drop + use<'a> {
        Capture::end(&*fixture.device, self.stream).expect("all of it was joined");
        self.scope.finish()
    }
}

#[test]
fn what_is_waited_for_in_a_gone_threads_place_is_its_own_streams_only() {
    for conf in BOTH {
        let fixture = Fixture::new(20 * MIB, conf);
        let [captured, user] = [fixture.stream(), fixture.stream()];
        let graph = fixture.graph(captured);
        // Because a scope is open, the free of a block that `user` uses is deferred. Later only this thread
        // could record an event on its own stream, and it ends here.
        on_new_thread(|| {
            let block = fixture.take(20 * MIB, OWN);
            fixture.record(&block, user);
            fixture.give(block);
        });
        drop(graph.end(&fixture));
        fixture.process_events();
        let size = 20 << 20;
        assert_eq!(fixture.live_and_draining(), (0, size), "{conf}: only its thread can query it");
        fixture.device.interceptor().take_order();
        let events = fixture.device.inner().calls("record_event");
        // `empty_cache` synchronizes the device once. It also waits for an event of the other stream,
        // because that stream may belong to another device.
        fixture.empty_cache();
        assert_eq!(fixture.device.interceptor().take_order()[0], "synchronize_device", "{conf}");
        assert_eq!(fixture.device.inner().calls("record_event"), events + 1, "{conf}");
        assert_eq!(fixture.live_and_draining(), (0, 0), "{conf}");
        fixture.check();
    }
}

#[test]
fn what_a_thread_freed_in_its_capture_is_settled_when_it_ends_that() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let (address, stream) = on_new_thread(|| {
            let eager = fixture.take(MIB, OWN);
            let address = eager.address();
            let graph = fixture.graph(OWN);
            fixture.give(eager);
            drop(graph.end(&fixture));
            (address, fixture.device.interceptor().stream(OWN).unwrap())
        });
        let waits = fixture.device.inner().calls("synchronize_device");
        assert_ne!(fixture.probe(MIB, OWN), address, "{conf}: the other thread's work runs still");
        fixture.device.inner().complete_stream(stream);
        assert_eq!(fixture.probe(MIB, OWN), address, "{conf}");
        assert_eq!(fixture.device.inner().calls("synchronize_device"), waits, "{conf}");
        fixture.check();
    }
}

#[test]
fn a_thread_that_ends_its_capture_ends_no_use_in_anothers() {
    let fixture = Fixture::new(ROOMY, "");
    let [stream, user] = [fixture.stream(), fixture.stream()];
    let graph = fixture.graph(stream);
    let block = fixture.take(MIB, stream);
    let address = block.address();
    fixture.behind(user, fixture.mark(stream));
    fixture.record(&block, user);
    let block = fixture.worked(block, user);
    on_new_thread(|| {
        fixture.record(&block, OWN);
        fixture.give(block);
        drop(fixture.graph(OWN).end(&fixture));
        fixture.device.interceptor().finish_own();
        fixture.process_events();
    });
    assert_ne!(fixture.probe(MIB, stream), address, "the streams are not joined");
    fixture.behind(stream, fixture.mark(user));
    drop(graph.end(&fixture));
    fixture.check();
}

#[test]
fn a_captured_use_by_a_gone_threads_stream_ends_with_the_capture() {
    let fixture = Fixture::new(ROOMY, "");
    let stream = fixture.stream();
    let graph = fixture.graph(stream);
    let pool = graph.pool;
    let block = fixture.take(MIB, stream);
    let address = block.address();
    let begun = fixture.mark(stream);
    let done = on_new_thread(|| {
        fixture.behind(OWN, begun);
        fixture.record(&block, OWN);
        fixture.give(fixture.worked(block, OWN));
        fixture.mark(OWN)
    });
    fixture.behind(stream, done);
    let _kept = graph.end(&fixture);
    assert_eq!(fixture.use_in(pool, MIB, stream).address(), address);
}

#[test]
fn a_captured_use_by_another_threads_stream_outlasts_a_free_by_this_one() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let stream = fixture.stream();
        let graph = fixture.graph(stream);
        let pool = graph.pool;
        let block = fixture.take(MIB, stream);
        let address = block.address();
        fixture.behind(OWN, fixture.mark(stream));
        fixture.record(&block, OWN);
        let block = fixture.worked(block, OWN);
        on_new_thread(|| {
            fixture.give(block);
            fixture.device.interceptor().finish_own();
            fixture.process_events();
        });
        assert_ne!(fixture.probe(MIB, stream), address, "{conf}: the streams are not joined");
        fixture.behind(stream, fixture.mark(OWN));
        let _kept = graph.end(&fixture);
        assert_eq!(fixture.use_in(pool, MIB, stream).address(), address, "{conf}");
        fixture.check();
    }
}

#[test]
fn a_captured_use_by_one_threads_stream_is_not_joined_by_way_of_anothers() {
    let fixture = Fixture::new(ROOMY, "graph_capture_record_stream_reuse:True");
    let stream = fixture.stream();
    let graph = fixture.graph(stream);
    let block = fixture.take(MIB, stream);
    let address = block.address();
    let begun = fixture.mark(stream);
    fixture.behind(OWN, begun);
    fixture.record(&block, OWN);
    let block = fixture.worked(block, OWN);
    let done = on_new_thread(|| {
        fixture.behind(OWN, begun);
        fixture.give(block);
        fixture.mark(OWN)
    });
    fixture.behind(stream, done);
    assert_ne!(fixture.probe(MIB, stream), address, "this thread's own stream is not joined");
    fixture.behind(stream, fixture.mark(OWN));
    drop(graph.end(&fixture));
    fixture.check();
}

#[test]
fn a_graph_orders_only_what_was_taken_in_it() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let first = fixture.graph(OWN);
        let pool = first.pool;
        let result = fixture.take(MIB, OWN);
        let address = result.address();
        let _kept = first.end(&fixture);
        // This work is pending and not part of a graph.
        let result = fixture.worked(result, OWN);
        let second = fixture.graph(OWN);
        fixture.probe(512, OWN);
        fixture.give(result);
        let other = on_new_thread(|| fixture.use_in(pool, MIB, OWN));
        assert_ne!(other.address(), address, "{conf}: work runs on it still");
        drop(second.end(&fixture));
        fixture.device.inner().complete_all();
        assert_eq!(fixture.use_in(pool, MIB, OWN).address(), address, "{conf}");
        fixture.check();
    }
}

#[test]
fn a_graph_does_not_order_one_threads_stream_behind_anothers() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let graph = fixture.graph(OWN);
        fixture.probe(4 * MIB, OWN);
        let begun = fixture.mark(OWN);
        let block = fixture.take(MIB, OWN);
        let mine = fixture.probe(2 * MIB, OWN);
        let ends = Capture::frontier(&*fixture.device, OWN).unwrap();
        let address = block.address();
        let done = on_new_thread(|| {
            fixture.behind(OWN, begun);
            fixture.give(block);
            assert_ne!(
                fixture.probe(MIB, OWN),
                address,
                "{conf}: the other's work is not before it"
            );
            // A block that the first thread freed may be reused only if that thread's work precedes the
            // reuse.
            let taken = fixture.take_on(2 * MIB, OWN);
            let before = Capture::frontier(&*fixture.device, OWN).unwrap();
            let is_behind = ends.iter().all(|node| {
                let mut todo = before.clone();
                while let Some(next) = todo.pop() {
                    if next == *node {
                        return true;
                    }
                    todo.extend(Capture::dependencies(&*fixture.device, next).unwrap());
                }
                false
            });
            assert!(taken.address() != mine || is_behind, "{conf}");
            fixture.give(fixture.worked(taken, OWN));
            fixture.mark(OWN)
        });
        // Both threads have allocated from the pool. So even the same thread does not get a freed block
        // at once: the other thread could have allocated it in between.
        let again = fixture.probe(3 * MIB, OWN);
        assert_ne!(fixture.probe(3 * MIB, OWN), again, "{conf}: the other could have taken it");
        fixture.behind(OWN, done);
        drop(graph.end(&fixture));
        fixture.process_events();
        fixture.check();
    }
}

#[test]
fn frees_deferred_in_an_unannounced_capture_cost_no_query_each() {
    let fixture = Fixture::new(ROOMY, "");
    Capture::begin(&*fixture.device, OWN).unwrap();
    let first = fixture.probe(MIB, OWN);
    assert_ne!(fixture.probe(MIB, OWN), first, "a launch of the graph precedes no work yet");
    let queries = || {
        let before = fixture.device.inner().calls("capture_status");
        fixture.probe(512, OWN);
        fixture.device.inner().calls("capture_status") - before
    };
    // The first request allocates a segment, which queries more often.
    queries();
    let few = queries();
    for _ in 0..50 {
        fixture.probe(512, OWN);
    }
    assert_eq!(queries(), few);
    Capture::end(&*fixture.device, OWN).unwrap();
    assert_ne!(on_new_thread(|| fixture.probe(MIB, OWN)), first, "it waits for its own thread");
    fixture.device.inner().complete_all();
    fixture.process_events();
    fixture.device.inner().complete_all();
    fixture.process_events();
    assert_eq!(fixture.live_and_draining().1, 0);
    fixture.check();
}

#[test]
fn cached_memory_of_such_a_stream_is_released_while_another_thread_captures() {
    for conf in BOTH {
        let fixture = Fixture::new(20 * MIB, conf);
        let [captured, other] = [fixture.stream(), fixture.stream()];
        fixture.probe(20 * MIB, OWN);
        fixture.device.interceptor().finish_own();
        fixture.process_events();
        let graph = fixture.graph(captured);
        on_new_thread(|| fixture.probe(20 * MIB, other));
        drop(graph.end(&fixture));
        fixture.check();
    }
}

#[test]
fn pages_whose_work_is_known_to_be_done_are_unmapped_without_a_wait() {
    let fixture = Fixture::new(ROOMY, "expandable_segments:True");
    let blocks = [0; 5].map(|_| fixture.take(20 * MIB, OWN));
    for (at, block) in blocks.into_iter().enumerate() {
        if at % 2 == 0 { fixture.give(block) } else { drop(block) }
    }
    fixture.device.interceptor().finish_own();
    fixture.process_events();
    fixture.device.interceptor().take_order();
    fixture.empty_cache();
    assert_eq!(fixture.device.interceptor().take_order(), ["unmap"; 3]);
}
