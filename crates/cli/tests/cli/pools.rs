//! Private pools: free memory that graphs keep, and pools that the program made itself.

use super::made::{MIB, Made};
use super::*;

/// Returns a recording with 500 MiB that stay live, and these private pools. Each pool has six blocks of
/// 100 MiB, of which the first stays live, on stream 0x10. Pools are named by capture and number.
fn with_pools(pools: &[[u64; 2]]) -> String {
    let mut made = Made::default();
    made.segment(1 << 40, 400 * MIB);
    made.alloc(1 << 40, 400 * MIB);
    made.on_stream(0x10);
    let base = |at: usize| (2 << 40) + ((at as u64) << 36);
    for at in 0..pools.len() {
        let blocks = (0..6).map(|block| base(at) + (block << 32));
        blocks.clone().for_each(|address| {
            made.segment(address, 100 * MIB);
            made.alloc(address, 100 * MIB);
        });
        blocks.skip(1).for_each(|address| made.free(address, 100 * MIB));
    }
    // The peak of reserved bytes is behind the captures.
    made.on_stream(0);
    made.segment(1 << 50, 100 * MIB);
    made.alloc(1 << 50, 100 * MIB);
    let mut recording: Value = made.json().parse().expect("it is JSON");
    for segment in recording["segments"].as_array_mut().expect("a list") {
        let address = segment["address"].as_u64().expect("a number");
        let pool = (0..pools.len()).find(|at| (base(*at)..base(at + 1)).contains(&address));
        segment["segment_pool_id"] = pool.map_or([0, 0], |at| pools[at]).to_vec().into();
    }
    recording.to_string()
}

#[test]
fn free_memory_that_graphs_keep_is_named_and_what_one_pool_would_need() {
    let folder = Folder::new("graph-pools");
    let file = folder.file("graphs.json", &with_pools(&[[1, 0], [2, 0], [3, 0], [4, 0], [5, 0]]));
    let sentence = "2,500 MiB (71 %) are free in 5 private pools: their graphs keep them, empty_cache does not \
                    release them; one pool for all captures (pool=), the largest captured first, would need \
                    about 1,000 MiB instead of 3,000 MiB.";
    let answer = ok(&["advise", "--quick", "--json", &file]).json();
    assert!(answer["sentence"].as_str().unwrap().contains(sentence), "{}", answer["sentence"]);
    let pools = &answer["causes"]["peak_reserved"]["graph_pools"];
    assert_eq!(pools["pools"], 5);
    assert_eq!(pools["reserved_bytes"], 3000 * MIB);
    assert_eq!(pools["free_bytes"], 2500 * MIB);
    assert_eq!(pools["shared_need_bytes"], 1000 * MIB);
    let text = ok(&["advise", "--quick", &file]).stdout;
    assert!(text.contains("5 private pools  stream 0\n") && !text.contains("pool 5.0"), "{text}");
    assert!(!text.contains("are completely free segments."), "{text}");
    // A few pools have a column each.
    let few = folder.file("few.json", &with_pools(&[[1, 0], [2, 0]]));
    let text = ok(&["advise", "--quick", &few]).stdout;
    assert!(text.contains("stream 1 pool 2.0"), "{text}");
    assert!(text.contains("are free in 2 private pools"), "{text}");
}

#[test]
fn pools_of_the_program_are_named_as_such_and_one_pool_of_a_graph_is_not() {
    let folder = Folder::new("other-pools");
    let user: Vec<[u64; 2]> = (1..6).map(|number| [0, number]).collect();
    for (name, pools) in [("shared", &[[7, 0]][..]), ("user", &user)] {
        let file = folder.file(&format!("{name}.json"), &with_pools(pools));
        let text = ok(&["advise", "--quick", &file]).stdout;
        assert!(!text.contains("graphs") && !text.contains("pool="), "{text}");
        let sentence = "2,500 MiB (71 %) are free in 5 private pools that the program made (torch.cuda.MemPool or \
                        graph_pool_handle): requests outside do not use them.";
        // In the headline, and at the peak of reserved bytes.
        assert_eq!(text.matches(sentence).count(), if name == "user" { 2 } else { 0 }, "{text}");
        assert!(text.contains("completely free segments"), "{text}");
    }
}
