//! `compat:` and the versions of PyTorch that it names.

use super::*;

#[test]
fn compat_names_a_version_of_pytorch() {
    for minor in 10..=15 {
        let text = format!("compat:pytorch-2.{minor}");
        let config = parse(&text).unwrap();
        let named = Compat::Version(TorchVersion::nearest(2, minor));
        assert_eq!(config.settings().compat, named);
        assert_eq!(config.to_text(), text);
        assert_eq!(named.or_version(TorchVersion::V2_11), named, "a version that is named stays");
    }
    let expected = "default, pytorch, or pytorch-2.10 to pytorch-2.15";
    for text in ["compat:pytorch-2.9", "compat:pytorch-2.16", "compat:pytorch-2", "compat:pytorch-"]
    {
        assert_eq!(parse(text).unwrap_err().expected, expected, "{text}");
    }
    let running = Compat::PyTorch.or_version(TorchVersion::nearest(2, 13));
    assert_eq!(running.decisions().ties, Ties::SegmentAge);
    assert_eq!(Compat::PyTorch.decisions(), TorchVersion::V2_11.decisions());
}

#[test]
fn a_version_of_pytorch_that_is_not_known_counts_as_the_nearest_one() {
    for (release, name) in [
        ((1, 13), "pytorch-2.10"),
        ((2, 3), "pytorch-2.10"),
        ((2, 12), "pytorch-2.12"),
        ((2, 99), "pytorch-2.15"),
        ((3, 0), "pytorch-2.15"),
    ] {
        assert_eq!(TorchVersion::nearest(release.0, release.1).name(), name);
    }
}

/// The first version of PyTorch whose libraries contain the name of each key. Found with
/// `strings libc10.so libc10_cuda.so` in the wheels of PyTorch 2.1 to 2.15 for Linux. Keys of 2.1 may
/// be older.
const KEYS_OF_WHEELS: [(&str, &str); 20] = [
    ("backend", "2.1"),
    ("expandable_segments", "2.1"),
    ("garbage_collection_threshold", "2.1"),
    ("max_split_size_mb", "2.1"),
    ("roundup_power2_divisions", "2.1"),
    ("pinned_num_register_threads", "2.2"),
    ("pinned_use_cuda_host_register", "2.2"),
    ("release_lock_on_cudamalloc", "2.2"),
    ("max_non_split_rounding_mb", "2.6"),
    ("pinned_use_background_threads", "2.6"),
    ("graph_capture_record_stream_reuse", "2.9"),
    ("per_process_memory_fraction", "2.10"),
    ("pinned_reserve_segment_size_mb", "2.10"),
    ("large_segment_size_mb", "2.11"),
    ("pinned_free_catch_all", "2.12"),
    ("throw_on_cudamalloc_oom", "2.12"),
    ("pinned_max_cached_size_mb", "2.13"),
    ("pinned_max_round_threshold_mb", "2.13"),
    ("expandable_segments_reserve", "2.15"),
    ("expandable_segments_reserve_by_class", "2.15"),
];

#[test]
fn keys_have_the_version_whose_wheel_has_them_first() {
    let with_version = BUILT_IN.iter().filter_map(|key| Some((key.name, key.since?.to_string())));
    let mut table: Vec<(&str, String)> = with_version.collect();
    let mut wheels = KEYS_OF_WHEELS.map(|(key, version)| (key, version.to_owned()));
    table.sort();
    wheels.sort();
    assert_eq!(table, wheels);
}

#[test]
fn versions_are_read_as_pytorch_prints_them() {
    for (text, shown) in [("2.8", "2.8"), ("2.10.0", "2.10"), ("2.15.0+cu132", "2.15")] {
        assert_eq!(text.parse::<TorchVersion>().unwrap().to_string(), shown);
    }
    for text in ["", "2", "2.", "2.0", "1.13", "3.1", "2.x", "two"] {
        assert!(text.parse::<TorchVersion>().is_err(), "{text}");
    }
    let order = ["2.9", "2.10", "2.99"].map(|text| text.parse::<TorchVersion>().unwrap());
    assert!(order.is_sorted());
    assert_eq!(order.map(TorchVersion::name), ["pytorch-2.10", "pytorch-2.10", "pytorch-2.15"]);
}

#[test]
fn a_version_accepts_the_strings_whose_keys_it_has() {
    let accepts =
        |version: &str, text: &str| parse(text).unwrap().is_accepted_by(version.parse().unwrap());
    let text = "max_split_size_mb:32,large_segment_size_mb:12,compat:pytorch";
    assert!(!accepts("2.10", text) && accepts("2.11", text));
    assert!(accepts("2.1", "backend:native,expandable_segments:True,"));
    assert!(accepts("2.1", ""));
    assert!(!accepts("2.15", "cpu_zero_fill:True"), "no key of PyTorch's");
    assert!(!accepts("2.9", "max_split_size_mb:20") && accepts("2.10", "max_split_size_mb:20"));
}
