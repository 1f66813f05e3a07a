//! Compiled libraries, as users write them for PyTorch.

use stratalloc::error::AddressFault;

use super::build;
use crate::common::compiled::{compile, conf};
use crate::common::prelude::*;

const MAIN: StreamId = StreamId(64);

fn take_calls(log: &Path) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let _ = fs::remove_file(log);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_library_written_for_pytorch_works_unchanged() {
    let Some((library, log)) = compile("cc", "functions.c", "plain") else { return };
    let text = conf(&library, "alloc_fn:my_alloc,free_fn:my_free");
    let own = build(&text).unwrap();
    assert_eq!(own.name(), "pluggable");
    own.give(own.take_on(1000, MAIN));
    assert_eq!(take_calls(&log), ["alloc 1000 0 64", "free 1 1000 0 64"]);
    let huge = own.try_allocate(1 << 37, MAIN);
    assert!(
        matches!(huge, Err(AllocError::OutOfMemory(report)) if report.requested_bytes == 1 << 37)
    );
    let live = own.take_on(64, MAIN);
    assert!(live.address() != 0);
    drop(own);
    assert_eq!(take_calls(&log), ["alloc 64 0 64", "free 1 64 0 64"], "its memory is freed");
}

#[test]
fn every_optional_function_is_found_and_called() {
    let Some((library, log)) = compile("cc", "functions.c", "whole") else { return };
    let text = conf(
        &library,
        "alloc_fn:my_alloc,free_fn:my_free,init_fn:my_init,reset_fn:my_reset,\
         memory_fraction_fn:my_fraction,base_alloc_fn:my_base,record_stream_fn:my_record,\
         begin_allocate_to_pool_fn:my_begin,end_allocate_to_pool_fn:my_end,\
         release_pool_fn:my_release,per_process_memory_fraction:0.5",
    );
    let own = build(&text).unwrap();
    assert_eq!(take_calls(&log), ["init 1", "fraction 0.50 0"]);
    let caching = own.caching();
    caching.empty_cache().unwrap();
    caching.set_memory_fraction(0.25).unwrap();
    let block = own.take_on(1000, MAIN);
    own.record(&block, StreamId(128));
    let base = caching.base_allocation(&block).unwrap();
    assert_eq!((base.address % 4096, base.size_bytes), (0, 4096));
    own.give(block);
    let pools = own.private_pools();
    let pool = PoolId { capture: 3, user: 4 };
    pools.open_scope(pool, ScopeFilter::this_thread()).unwrap();
    pools.close_scope(pool).unwrap();
    pools.release_pool(pool).unwrap();
    let calls = take_calls(&log);
    let expected = [
        "reset",
        "fraction 0.25 0",
        "alloc 1000 0 64",
        "record 1 128",
        "free 1 1000 0 64",
        "begin 0 3 4 1",
        "end 0 3 4",
        "release 0 3 4",
    ];
    assert_eq!(calls, expected);
    drop(own);
    let again = build(&text).unwrap();
    assert_eq!(take_calls(&log), ["fraction 0.50 0"], "a library is initialised once");
    drop(again);
}

#[test]
fn a_cpp_library_copies_the_filter_and_asks_it() {
    let Some((library, _)) = compile("c++", "filter.cpp", "filter") else { return };
    let text = conf(
        &library,
        "alloc_fn:pool_alloc,free_fn:pool_free,begin_allocate_to_pool_fn:pool_begin,\
         end_allocate_to_pool_fn:pool_end,release_pool_fn:pool_release",
    );
    let own = build(&text).unwrap();
    let pools = own.private_pools();
    let take = |stream| own.take_on(64, stream);
    let marked = |id: PoolId| (id.user & 0xFF) + 1;
    let id = PoolId::next_user();
    pools.open_scope(id, ScopeFilter::Stream(MAIN)).unwrap();
    let (inside, outside) = (take(MAIN), take(StreamId(65)));
    assert_eq!((inside.address() >> 40, outside.address() >> 40), (marked(id), 0));
    pools.close_scope(id).unwrap();
    pools.release_pool(id).unwrap();
    let after = take(MAIN);
    assert_eq!(after.address() >> 40, 0);
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let scope = pool.enter().unwrap();
    let mine = take(MAIN);
    assert_eq!(mine.address() >> 40, marked(pool.id()));
    let elsewhere = on_new_thread(|| take(MAIN));
    assert_eq!(elsewhere.address() >> 40, 0);
    drop(scope);
    for block in [inside, outside, after, mine, elsewhere] {
        own.give(block);
    }
}

#[test]
fn answers_of_a_bad_library_are_errors() {
    let Some((library, log)) = compile("cc", "functions.c", "wild") else { return };
    let build =
        |alloc: &str| build(&conf(&library, &format!("alloc_fn:{alloc},free_fn:my_free"))).unwrap();
    let own = build("same_alloc");
    let first = own.take_on(64, MAIN);
    let fault_of = |error| match error {
        Err(AllocError::BadAddress { fault, .. }) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault_of(own.try_allocate(64, MAIN)), AddressFault::Live);
    assert_eq!(take_calls(&log), [""; 0], "the live block was not freed");
    own.give(first);
    let own = build("odd_alloc");
    let odd = fault_of(own.try_allocate(64, MAIN));
    assert_eq!(odd, AddressFault::Misaligned { alignment_bytes: 16 });
    let own = build("last_alloc");
    assert_eq!(fault_of(own.try_allocate(64, MAIN)), AddressFault::PastTheEnd);
    assert_eq!(take_calls(&log).len(), 3, "freed once each");
}

#[test]
fn paths_with_commas_and_colons_are_quoted_and_printed_back() {
    let text = "backend:pluggable,library:\"/a,b:c d.so\",alloc_fn:f,free_fn:unset";
    let parsed = config(text);
    assert_eq!(parsed.settings().pluggable.library.as_deref(), Some("/a,b:c d.so"));
    let again = config(&parsed.to_text());
    assert_eq!(again.settings(), parsed.settings(), "{}", parsed.to_text());
    let idle = config("library:a.so");
    let row = idle.explain().into_iter().find(|row| row.key == "library").unwrap();
    assert!(row.note.contains("backend:pluggable only"), "{}", row.note);
}
