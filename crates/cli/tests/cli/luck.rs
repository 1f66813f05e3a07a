//! Needs that depend on the addresses that a device returns.

use stratalloc::registry::build;
use stratalloc_analysis::{Memory, Need, Recording, SearchOptions};
use stratalloc_recording::{Silent, Trace, TraceEvent, is_served};
use stratalloc_sim::RecordedAddresses;

use super::made::{MIB, Made};
use super::{Folder, run};
use crate::common::prelude::*;

/// `+BYTES` is a request on the default stream, `+BYTES@7` one on stream 7; `-N` frees the block of
/// request N. This list was shortened from 800 random requests. The addresses decide which of two free
/// segments the last requests use.
const REQUESTS: &str = include_str!("luck.txt");

fn trace() -> Trace {
    let (mut events, mut blocks) = (Vec::new(), Vec::new());
    for word in REQUESTS.split_whitespace() {
        if let Some(number) = word.strip_prefix('-') {
            let (address, bytes, stream) = blocks[number.parse::<usize>().expect("a number")];
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                events.push(TraceEvent::new(action, address, bytes, stream));
            }
        } else {
            let (bytes, stream) = word[1..].split_once('@').unwrap_or((&word[1..], "0"));
            let (bytes, stream) =
                (bytes.parse().expect("bytes"), StreamId(stream.parse().expect("a stream")));
            let address = blocks.len() as u64 * 4 * MIB + MIB;
            blocks.push((address, bytes, stream));
            events.push(TraceEvent::new(Action::Alloc, address, bytes, stream));
        }
    }
    Trace { events, ..Trace::default() }
}

/// Returns true if the recording runs on a device of `bytes` that assigns addresses to segments in a
/// random order.
fn fits_in_random_order(recording: &Recording, config: &Config, bytes: u64, seed: u64) -> bool {
    let mut rng = Rng::new(seed);
    let mut segments: Vec<u64> = (1..=200).map(|at| at << 30).collect();
    for at in (1..segments.len()).rev() {
        segments.swap(at, rng.below(at + 1));
    }
    let event_mode = EventMode::Manual;
    let sim = Sim::new(SimOptions { total_bytes: bytes, event_mode, ..SimOptions::default() });
    let addresses = RecordedAddresses { segments, mappings: Vec::new() };
    let device = Arc::new(addresses.before(Arc::new(sim)));
    let strategy = build(config, device, BuildOptions::default()).expect("it builds");
    is_served(&recording.workload, &strategy, None).expect("it runs")
}

#[test]
fn no_order_of_addresses_needs_more_than_the_need() {
    let conf = "max_split_size_mb:20,compat:pytorch";
    let config = Config::parse(conf, &KeyTable::default()).unwrap();
    let recording = Recording::new(trace(), None, Memory::default());
    let mut need = Need::search(&recording, &config, &SearchOptions::QUICK, &Silent).unwrap();
    need.try_other_addresses(&recording, &config, &SearchOptions::QUICK, &Silent).unwrap();
    let (needs, luck) = (need.needs_bytes.unwrap(), need.with_luck_bytes.unwrap());
    assert!(needs - luck >= 16 * MIB, "{needs} {luck}");
    let orders = 0..12;
    let mut lucky = 0;
    for order in orders.clone() {
        for more in (0..40 * MIB).step_by(2 << 20) {
            let fits = fits_in_random_order(&recording, &config, needs + more, order);
            assert!(fits, "order {order} needs more than {needs} and {more} bytes");
        }
        lucky += usize::from(fits_in_random_order(&recording, &config, luck, order));
    }
    assert!((1..orders.count()).contains(&lucky), "some orders are lucky: {lucky}");
}

/// Other orders of addresses are tried only for settings that are printed.
#[test]
fn a_need_that_depends_on_addresses_is_printed_with_both_numbers() {
    let mut made = Made::default();
    for event in trace().events {
        made.on_stream(event.stream.0);
        match event.action {
            Action::Alloc => made.alloc(event.address, event.size_bytes),
            Action::FreeRequested => made.free(event.address, event.size_bytes),
            _ => {}
        }
    }
    let folder = Folder::new("luck");
    let file = folder.file("luck.json", &made.json());
    let conf = ["--conf", "max_split_size_mb:20,compat:pytorch"];
    let row = |command: &str| run(&[&[command, &file, "--json"], &conf[..]].concat()).json();
    for row in [row("compare"), row("replay")] {
        let (needs, luck) = (row["needs_bytes"].as_u64(), row["needs_with_luck_bytes"].as_u64());
        assert!(luck.zip(needs).is_some_and(|(luck, needs)| luck + 16 * MIB <= needs), "{row}");
    }
    let table = run(&[&["compare", &file], &conf[..]].concat()).stdout;
    assert!(table.contains(" with luck)") && table.contains("with luck: which of two"), "{table}");
    let advised = run(&["advise", "--quick", "--json", &file]).json();
    let best = &advised["best"];
    assert_eq!(best["all_address_orders"], true, "{best}");
}
