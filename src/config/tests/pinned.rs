//! Tests of the keys of `backend:pinned`.

use super::*;
use crate::config::{PinnedNuma, PinnedRounding};

#[test]
fn sizes_nodes_and_ages_are_understood() {
    let own = |text: &str| settings(text).pinned;
    assert_eq!(own("").rounding, PinnedRounding::Exact);
    assert_eq!(own("pinned_rounding:power_of_two").rounding, PinnedRounding::PowerOfTwo);
    for (value, numa) in
        [("any", PinnedNuma::Any), ("auto", PinnedNuma::Auto), ("3", PinnedNuma::Node(3))]
    {
        let config = parse(&format!("pinned_numa:{value}")).unwrap();
        assert_eq!(config.settings().pinned.numa, numa);
        assert_eq!(settings(&config.to_text()).pinned.numa, numa);
    }
    let half = std::time::Duration::from_millis(500);
    assert_eq!(own("pinned_trim_age_s:0.5").trim_age, Some(half));
    for wrong in ["pinned_rounding:exactly", "pinned_numa:-1", "pinned_numa:none"] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn keys_of_pinned_memory_note_the_key_without_which_they_have_no_effect() {
    for (key, needed) in [
        ("pinned_max_round_threshold_mb:64", "pinned_rounding:power_of_two"),
        ("pinned_num_register_threads:2", "pinned_use_cuda_host_register:True"),
        ("pinned_num_register_threads:2", "pinned_numa:0"),
    ] {
        let idle = |text: &str| {
            let rows = parse(&format!("backend:pinned,{text}")).unwrap().explain();
            let row = rows.into_iter().find(|row| key.starts_with(&row.key));
            row.unwrap().idle
        };
        assert!(idle(key).is_some_and(|why| why.contains("only")), "{key}");
        assert_eq!(idle(&format!("{key},{needed}")), None);
    }
}
