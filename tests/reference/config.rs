//! Configuration strings: what the reference's tests of its parser pin, and where we refuse what it
//! half applies.

use stratalloc::config::ConfigError;
use stratalloc::registry::build;

use crate::common::prelude::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, &KeyTable::default())
}

/// A bed whose settings come from a string.
fn bed(total_bytes: u64, text: &str) -> Bed {
    let config = parse(text).expect("a legal string");
    Bed::with(total_bytes, config.settings().clone())
}

// The reference: 0, one half and 1 are accepted and can be read back; -0.1 and 1.1 are refused.
#[test]
fn a_memory_fraction_in_the_string_must_be_a_fraction_and_becomes_the_limit() {
    for (text, limit) in [("0.0", Some(0)), ("0.5", Some(GIB)), ("1.0", None)] {
        let bed = bed(2 * GIB, &format!("per_process_memory_fraction:{text}"));
        assert_eq!(bed.caching().limit_bytes(), limit);
        if limit == Some(0) {
            let OutOfMemory { limit_bytes, .. } = bed.fail(1, HOME);
            assert_eq!(limit_bytes, limit);
        }
    }
    for text in ["-0.1", "1.1", "nan", "inf", "1e3", "half", ""] {
        let error = parse(&format!("per_process_memory_fraction:{text}")).unwrap_err();
        assert_eq!(error.key, "per_process_memory_fraction", "{text}");
    }
}

/// Bytes of the block that a request of `mib` gets.
fn block_mib(bed: &Bed, mib: u64) -> u64 {
    let before = bed.stats().memory_allocated();
    let block = bed.take(mib * MIB);
    let bytes = (bed.stats().memory_allocated() - before).unsigned_abs();
    bed.give(block);
    bed.empty_cache();
    bytes / MIB
}

// The reference: settings change at run time; a string that does not mention the divisions resets
// them; a list sets steps per size.
#[test]
fn strings_change_the_rounding_at_run_time_and_reset_what_they_do_not_mention() {
    let bed = bed(8 * GIB, "");
    let mut config = Config::default();
    for (text, at_84, at_400) in [
        ("", 84, 400),
        ("roundup_power2_divisions:4", 96, 448),
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84, 400),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 88, 512),
        ("roundup_power2_divisions:1", 84, 400),
    ] {
        config = config.updated(text, &KeyTable::default()).unwrap();
        bed.caching().apply(&config).expect("the device can");
        assert_eq!((block_mib(&bed, 84), block_mib(&bed, 400)), (at_84, at_400), "{text}");
    }
}

// The reference raises an error for each of these; half of the string may be in force then. Here
// nothing is, and the error says which byte.
#[test]
fn illegal_strings_are_refused_whole_with_the_key_and_its_place() {
    let before = parse("max_split_size_mb:60,garbage_collection_threshold:0.7").unwrap();
    for (text, key, at) in [
        ("foo:1,bar:2", "foo", 0),
        ("max_split_size_mb:40,foo:1", "foo", 21),
        ("garbage_collection_threshold:1.2", "garbage_collection_threshold", 29),
        ("garbage_collection_threshold:0", "garbage_collection_threshold", 29),
        ("max_split_size_mb:2", "max_split_size_mb", 18),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb", 26),
        ("large_segment_size_mb:10", "large_segment_size_mb", 22),
        ("release_lock_on_cudamalloc:none", "release_lock_on_cudamalloc", 27),
        ("expandable_segments:1", "expandable_segments", 20),
        ("pinned_use_cuda_host_register:none", "pinned_use_cuda_host_register", 30),
        ("pinned_num_register_threads:none", "pinned_num_register_threads", 28),
        ("pinned_num_register_threads:1024", "pinned_num_register_threads", 28),
        ("pinned_num_register_threads:3", "pinned_num_register_threads", 28),
        ("roundup_power2_divisions:3", "roundup_power2_divisions", 25),
    ] {
        let table = KeyTable::default();
        let error = before.updated(text, &table).unwrap_err();
        assert_eq!((error.key.as_str(), error.at()), (key, at), "{text}: {error}");
        assert!(error.to_string().starts_with(key), "{error}");
    }
    assert_eq!(before.settings().max_split_bytes, Some(60 * MIB));
}

// The reference's scan for the backend reads past a broken key. Here a broken string selects nothing;
// put right, it selects that backend wherever it stands.
#[test]
fn a_broken_string_selects_no_backend_and_its_mended_form_does() {
    let text = "max_split_size_mb:20,backend:cudaMallocAsync,release_lock_on_cudamalloc:none";
    let error = parse(text).unwrap_err();
    assert_eq!((error.key.as_str(), error.at()), ("release_lock_on_cudamalloc", 72));
    let mended = parse(&text.replace("none", "True")).unwrap();
    assert_eq!(mended.settings().backend, "cudaMallocAsync");
    let sim = bed(GIB, "").device;
    let built = build(&mended, sim, BuildOptions::default()).expect("a known backend");
    assert_eq!(built.name(), "cudaMallocAsync");
    let unknown = parse("backend:no_such").unwrap();
    let error = build(&unknown, bed(GIB, "").device, BuildOptions::default()).unwrap_err();
    assert!(error.to_string().contains("native"), "{error}");
}

// The reference's own test of its settings: every value is read back, and a second string changes
// what it says and resets the rest.
#[test]
fn every_value_is_read_back_and_a_second_string_resets_the_rest() {
    let first = parse(
        "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,\
         roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,\
         pinned_use_background_threads:True,throw_on_cudamalloc_oom:True",
    )
    .unwrap();
    let Settings { max_split_bytes, garbage_collection_threshold, roundup, .. } = first.settings();
    assert_eq!((*max_split_bytes, *garbage_collection_threshold), (Some(40 * MIB), Some(0.5)));
    assert_eq!(first.settings().non_split_rounding_bytes(), 30 * MIB);
    assert!(first.settings().expandable_segments && first.settings().throw_on_device_oom);
    assert!(first.settings().pinned.use_background_threads);
    for (mib, divisions) in [
        (1, 8),
        (32, 8),
        (64, 8),
        (128, 2),
        (256, 4),
        (512, 2),
        (1024, 4),
        (2048, 1),
        (32 * 1024, 1),
        (1024 * 1024, 1),
    ] {
        assert_eq!(roundup.for_size(mib * MIB), divisions, "{mib} MiB");
    }

    let second = first.updated("garbage_collection_threshold:0.8", &KeyTable::default()).unwrap();
    let settings = second.settings();
    assert_eq!(settings.garbage_collection_threshold, Some(0.8));
    assert_eq!((settings.max_split_bytes, settings.non_split_rounding_bytes()), (None, 20 * MIB));
    assert_eq!(*settings.roundup.divisions(), [0; 16]);
    assert!(settings.expandable_segments, "what is not reset sticks");
}
