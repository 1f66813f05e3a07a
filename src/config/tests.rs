//! Tests that strings which PyTorch accepts on purpose keep their meaning, and that all others are
//! refused with the position of the error.

use quickcheck::{Arbitrary, Gen};

use super::*;
use crate::size::{GIB, MIB};

mod pinned;
mod versions;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, &KeyTable::default())
}

fn settings(text: &str) -> Settings {
    parse(text).unwrap().settings().clone()
}

fn divisions(text: &str) -> [u64; 16] {
    *settings(&format!("roundup_power2_divisions:{text}")).roundup.divisions()
}

/// Returns the error of an invalid text, as `byte: expected`.
fn wrong(text: &str) -> String {
    let error = parse(text).expect_err(text);
    assert!(error.span.at + error.span.len <= text.len(), "{error:?}");
    assert!(error.caret(text).contains('^'));
    assert!(error.to_string().starts_with(&error.key), "{error}");
    format!("{}: {}", error.span.at, error.expected)
}

#[test]
fn every_key_is_understood() {
    let s = settings(
        "backend:native, large_segment_size_mb:32, max_split_size_mb:64,\
         max_non_split_rounding_mb:40,garbage_collection_threshold:0.8,expandable_segments:True,\
         expandable_segments_ipc:True,release_lock_on_cudamalloc:True,graph_capture_record_stream_reuse:True,\
         per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,\
         expandable_segments_reserve:40G,expandable_segments_reserve_by_class:[a:0.25,b:8g],\
         pinned_use_background_threads:True,pinned_max_round_threshold_mb:0,\
         pinned_max_cached_size_mb:7,pinned_use_cuda_host_register:True,\
         pinned_num_register_threads:8,pinned_reserve_segment_size_mb:16,\
         pinned_free_catch_all:True,compat:pytorch,peers:none",
    );
    assert_eq!(s.large_segment_bytes, 32 * MIB);
    assert_eq!(s.max_split_bytes, Some(64 * MIB));
    assert_eq!(s.non_split_rounding_bytes(), 40 * MIB);
    assert_eq!(s.garbage_collection_threshold, Some(0.8));
    assert_eq!(s.per_process_memory_fraction, 0.5);
    assert_eq!(s.expandable_reserve, Some(Reserve::Bytes(40 * GIB)));
    let classes =
        [("a".to_owned(), Reserve::Fraction(0.25)), ("b".to_owned(), Reserve::Bytes(8 * GIB))];
    assert_eq!(s.expandable_reserve_by_class, classes);
    assert_eq!(s.pinned.max_round_threshold_bytes, Some(0));
    assert_eq!(s.pinned.register_threads, 8);
    assert!(s.expandable_segments_ipc);
    assert!(s.expandable_segments && s.release_lock_on_device_allocate && s.throw_on_device_oom);
    assert_eq!((s.compat, s.peers), (Compat::PyTorch, PeersSetting::None));
}

#[test]
fn aliases_quotes_white_space_and_a_trailing_comma_are_accepted() {
    assert!(settings("release_lock_on_hipmalloc:True").release_lock_on_device_allocate);
    assert!(settings("pinned_use_hip_host_register:True").pinned.use_host_register);
    assert_eq!(settings("backend:hipMallocAsync").backend, "cudaMallocAsync");
    assert_eq!(settings("backend:mine-2").backend, "mine-2");
    assert_eq!(settings(" max_split_size_mb : \"40\" , ").max_split_bytes, Some(40 * MIB));
    assert!(settings("expandable_segments:TRUE").expandable_segments, "an extension");
    assert_eq!(settings(""), Settings::default());
    assert_eq!(settings(" \t"), Settings::default());
}

#[test]
fn divisions_follow_the_reference() {
    let filled = |parts: &[(std::ops::Range<usize>, u64)]| {
        let mut all = [0; 16];
        parts.iter().for_each(|(range, d)| all[range.clone()].fill(*d));
        all
    };
    assert_eq!(divisions("4"), [4; 16]);
    assert_eq!(divisions("[64:8,256:4,>:2]"), filled(&[(0..7, 8), (8..9, 4), (9..16, 2)]));
    assert_eq!(divisions("[64:8,512:4]"), filled(&[(0..7, 8), (9..10, 4)]));
    assert_eq!(divisions("[131072:2]"), [2; 16]);
    assert_eq!(divisions("[]"), [0; 16]);
    assert_eq!(divisions("[>:4]"), filled(&[(1..16, 4)]));
    assert_eq!(divisions("[>:8,64:4]"), filled(&[(0..7, 4), (7..16, 8)]));
    assert_eq!(divisions("[512:8,64:4]"), filled(&[(0..10, 8), (6..7, 4)]));
    assert_eq!(divisions("[32768:2,>:4]"), [2; 16]);
    let list = "[64:8,128:2,256:4,512:2,1024:4,>:1]";
    assert_eq!(&divisions(list)[5..12], &[8, 8, 2, 4, 2, 4, 1]);
}

#[test]
fn ranges_are_checked_against_the_large_segment_wherever_it_stands() {
    assert_eq!(wrong("max_split_size_mb:19"), "18: a whole number >= 20");
    assert_eq!(settings("max_split_size_mb:20").max_split_bytes, Some(20 * MIB));
    assert_eq!(wrong("max_split_size_mb:20,large_segment_size_mb:64"), "18: a whole number >= 64");
    assert_eq!(wrong("max_non_split_rounding_mb:19"), "26: a whole number >= 20");
    assert_eq!(wrong("large_segment_size_mb:10"), "22: a whole number > 10");
    let large = parse("large_segment_size_mb:64").unwrap();
    let error = large.updated("max_split_size_mb:20", &KeyTable::default()).unwrap_err();
    assert_eq!(error.to_string(), "max_split_size_mb: expected a whole number >= 64 (byte 18)");
}

#[test]
fn sloppy_strings_are_refused_where_they_are_wrong() {
    for (text, expected) in [
        ("max_split_size_mb,40", "17: a colon and a value behind the key"),
        ("max_split_size_mb 40", "18: a colon and a value behind the key"),
        ("max split_size_mb:40", "0: a known key"),
        ("max_split_size_mb:40 expandable_segments:True", "21: a comma before the next key"),
        ("max_split_size_mb:[40]", "18: a whole number >= large_segment_size_mb"),
        ("expandable_segments", "19: a colon and a value behind the key"),
        (",", "0: a key"),
        (",expandable_segments:True", "0: a key"),
        ("expandable_segments:True,,", "25: a key"),
        ("expandable_segments:True;max_split_size_mb:40", "42: a comma before the next key"),
        ("per_process_memory_fraction:", "28: a value"),
        ("max_split_size_mb:40,foo:1", "21: a known key"),
        (
            "max_split_size_mb:20,backend:cudaMallocAsync,release_lock_on_cudamalloc:none",
            "72: True or False",
        ),
        ("pinned_use_cuda_host_register:none", "30: True or False"),
        ("roundup_power2_divisions:3", "25: a power of two, or [MiB:divisions,...,>:divisions]"),
        ("roundup_power2_divisions:0", "25: a power of two, or [MiB:divisions,...,>:divisions]"),
        ("roundup_power2_divisions:[64:3]", "29: 0 or a power of two as divisions"),
        ("roundup_power2_divisions:[63:2]", "26: a power of two of MiB, or >"),
        ("roundup_power2_divisions:[64:2", "25: a closing bracket for this one"),
        ("roundup_power2_divisions:[128:8,2048:8>:2]", "39: a comma or a closing bracket"),
        ("roundup_power2_divisions:[64]", "26: a power of two, or [MiB:divisions,...,>:divisions]"),
        ("backend:\"a b\"", "8: a strategy's name"),
        ("backend:\"native", "8: a closing double quote"),
        ("default", "0: a known key"),
        ("foo:1,bar:2", "0: a known key"),
    ] {
        assert_eq!(wrong(text), expected, "{text}");
    }
    for (key, expected, values) in [
        ("max_split_size_mb", "18: a whole number >= 20", "40x 40.9 -1 +40 18446744073709551616"),
        ("expandable_segments", "20: a value", " ,"),
        ("expandable_segments", "20: True or False", "none 1"),
        ("garbage_collection_threshold", "29: a number between 0 and 1", "1.2 0 nan 0.5x"),
        ("per_process_memory_fraction", "28: a number from 0 to 1", "1.1 -0.1 inf nan 1e3 half"),
        ("pinned_num_register_threads", "28: a power of two from 1 to 128", "none 3 1024 0"),
        ("pinned_reserve_segment_size_mb", "31: a whole number of MiB > 0", "0"),
        (
            "expandable_segments_reserve",
            "28: a positive fraction, or a size as 40G",
            "abc G -1 0 1e20G",
        ),
    ] {
        for value in values.split(' ') {
            assert_eq!(wrong(&format!("{key}:{value}")), expected, "{key}:{value}");
        }
    }
}

#[test]
fn unknown_keys_are_answered_with_the_nearest_known_one() {
    for (text, nearest) in [
        ("expandable_segment:True", Some("expandable_segments")),
        ("Max_Split_Size_MB:40", Some("max_split_size_mb")),
        ("roundup_power2_division:4", Some("roundup_power2_divisions")),
        ("completely_different:1", None),
        ("page_size:2", None),
    ] {
        assert_eq!(parse(text).unwrap_err().nearest.as_deref(), nearest, "{text}");
    }
    let table = KeyTable::default().with(UserKey::anything("arena_bytes", "its strategy reads it"));
    let error = Config::parse("arena_byte:1", &table).unwrap_err();
    assert_eq!(error.nearest.as_deref(), Some("arena_bytes"));
}

#[test]
fn misspelt_values_are_answered_with_the_nearest_one_in_place() {
    for (text, at, nearest) in [
        ("expandable_segments:Ture", 20, Some("True")),
        ("expandable_segments:flase", 20, Some("False")),
        ("expandable_segments:1", 20, None),
        ("expandable_segments:none", 20, None),
        ("compat:pytroch", 7, Some("pytorch")),
        ("compat:Default", 7, Some("default")),
        ("compat:xyzzy", 7, None),
        ("compat:pytorch-2.9", 7, Some("pytorch-2.10")),
        ("compat:pytorch-2.16", 7, Some("pytorch-2.10")),
        ("native", 0, Some("backend:native")),
        ("max_split_size_mb:40,cpu", 21, Some("backend:cpu")),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!((error.span.at, error.nearest.as_deref()), (at, nearest), "{text}");
        assert_eq!(error.span.len, text.len() - at, "{text}");
    }
}

#[test]
fn what_other_tools_would_take_is_answered_with_what_is_right_here() {
    for (text, expected) in [
        ("backend=native", "7: a colon instead of ="),
        ("release_lock_on_hipmalloc=True", "25: a colon instead of ="),
        ("backnd=native", "0: a known key"),
        ("layers:limit:8GiB", "7: a list in brackets, as [limit:8GiB,track,log:\"PATH\",...]"),
        (
            "roundup_power2_divisions:64:8",
            "25: a list in brackets, as [MiB:divisions,...,>:divisions]",
        ),
        ("compat:default:1", "14: a comma before the next key"),
        (
            "max_split_size_mb:64KiB",
            "18: a whole number >= 20, or whole MiB with their unit as 64MiB",
        ),
        (
            "large_segment_size_mb:9M",
            "22: a whole number > 10, or whole MiB with their unit as 64MiB",
        ),
        (
            "cpu_cached_max_mb:4GB",
            "18: a whole number of MiB, or whole MiB with their unit as 64MiB",
        ),
        ("max_split_size_mb:MiB", "18: a whole number >= 20"),
        ("cpu_alignment:4KiB", "14: a power of two of bytes from 16 to 2097152"),
    ] {
        assert_eq!(wrong(text), expected, "{text}");
    }
    assert!(wrong("layers:track").starts_with("7: a list in brackets of limit:SIZE, "));
}

#[test]
fn a_caret_stands_under_the_wrong_word() {
    let text = "backend:native,expandable_segmets:True";
    let error = parse(text).unwrap_err();
    assert_eq!(error.caret(text), format!("{text}\n{}{}", " ".repeat(15), "^".repeat(18)));
    let long = format!("{}x:1", "expandable_segments:True,".repeat(40));
    let error = parse(&long).unwrap_err();
    assert!(error.caret(&long).lines().all(|line| line.chars().count() < 140));
    let odd = "b\u{1b}ackend:ü,\u{0}";
    assert!(!parse(odd).unwrap_err().caret(odd).contains('\u{1b}'));
}

#[test]
fn carets_are_counted_in_columns() {
    for (text, indent, carets) in [
        ("日本語:1", 0, 6),
        ("compat:default,größe:1", 15, 5),
        ("layers:[log:\"日本\",x]", 19, 1),
        ("compat:e\u{301}", 7, 1),
        ("compat:\u{202e}\u{200d}", 7, 2),
    ] {
        let shown = parse(text).unwrap_err().caret(text);
        let marks = format!("{}{}", " ".repeat(indent), "^".repeat(carets));
        assert_eq!(shown.lines().last().unwrap(), marks, "{shown}");
        assert!(!shown.contains(['\u{202e}', '\u{200d}']), "{shown:?}");
    }
}

#[test]
fn errors_repeat_nothing_that_a_terminal_would_obey() {
    let text = format!("layers:[a\u{1b}[2J{}:[", "x".repeat(10_000));
    let message = parse(&text).unwrap_err().to_string();
    assert!(!message.contains(char::is_control) && message.len() < 200, "{message:?}");
    let text = "layers:[a\u{1b}:,b]";
    let message = parse(text).unwrap_err().to_string();
    assert_eq!(message, "layers: expected a value for this layer (byte 10)");
}

#[test]
fn users_words_that_look_like_lists_are_written_as_words() {
    let word = UserKey::one_of("mine_mode", &["[slow]"], "a word");
    let table =
        KeyTable::default().with(UserKey::anything("mine_any", "its strategy reads it")).with(word);
    for text in ["mine_any:\"[a\"", "mine_mode:\"[slow]\"", "mine_any:[a,\"]\"]", "mine_any:\"\""] {
        let config = Config::parse(text, &table).unwrap();
        let again = Config::parse(&config.to_text(), &table).unwrap();
        assert_eq!(again.settings(), config.settings(), "{text} as {}", config.to_text());
    }
}

#[test]
fn what_a_text_does_not_mention_is_reset_or_sticks() {
    let table = KeyTable::default();
    let all = "max_split_size_mb:40,roundup_power2_divisions:4,garbage_collection_threshold:0.5,\
               max_non_split_rounding_mb:30,large_segment_size_mb:24,expandable_segments:True,\
               release_lock_on_cudamalloc:True,compat:pytorch";
    let later = parse(all).unwrap().updated("", &table).unwrap();
    let s = later.settings();
    assert_eq!((s.max_split_bytes, s.garbage_collection_threshold), (None, None));
    assert_eq!(s.roundup, Settings::default().roundup);
    assert_eq!(*s.roundup.divisions(), [0; 16]);
    assert_eq!(s.non_split_rounding_bytes(), 24 * MIB, "the large segment's size");
    assert!(s.expandable_segments && s.release_lock_on_device_allocate);
    assert_eq!(s.compat, Compat::PyTorch);
    assert_eq!(later.origin("expandable_segments"), Origin::Earlier);
    assert_eq!(later.origin("max_split_size_mb"), Origin::Default);
}

#[test]
fn a_value_set_by_code_is_distinguished_from_the_default() {
    let given =
        Settings { expandable_segments: true, compat: Compat::Default, ..Settings::default() };
    let config = Config::from_settings(given).with_compat(Compat::Default);
    assert_eq!(config.origin("expandable_segments"), Origin::Code);
    assert_eq!(config.origin("compat"), Origin::Code, "set, although it is the default");
    assert_eq!(config.origin("backend"), Origin::Default);
    let larger = Settings { large_segment_bytes: 64 * MIB, ..Settings::default() };
    let config_of_larger = Config::from_settings(larger);
    assert_eq!(config_of_larger.origin("large_segment_size_mb"), Origin::Code);
    let follows = "max_non_split_rounding_mb";
    assert_eq!(config_of_larger.origin(follows), Origin::Default, "it follows the other");
    let slack = Settings { max_non_split_rounding_bytes: Some(20 * MIB), ..Settings::default() };
    assert_eq!(Config::from_settings(slack).origin(follows), Origin::Code);
    let later = config.updated("backend:cpu", &KeyTable::default()).unwrap();
    assert_eq!(later.origin("expandable_segments"), Origin::Earlier);
    assert_eq!(later.origin("backend"), Origin::Text { at: 0 });
    assert!(later.warnings().is_empty(), "code and a text repeat nothing");
}

/// For each backend, checks which keys need another allocator when their values change.
#[test]
fn keys_that_are_read_once_take_another_allocator() {
    let all = ["native", "cudaMallocAsync", "pluggable", "cpu", "pinned", "mine"];
    for (given, backends) in [
        ("layers:[track]", &all[..]),
        ("layers:[limit:8GiB]", &all[..]),
        ("malloc_async_own_pool:True", &["cudaMallocAsync", "mine"]),
        ("cpu_alignment:128", &["cpu", "mine"]),
        ("cpu_huge_pages:True", &["cpu", "mine"]),
        ("cpu_numa_node:0", &["cpu", "mine"]),
        ("cpu_zero_fill:True", &[]),
        ("pinned_numa:auto", &["pinned", "mine"]),
        ("pinned_use_background_threads:True", &["pinned", "mine"]),
        ("pinned_max_cached_size_mb:3,pinned_rounding:power_of_two,pinned_trim_age_s:1", &[]),
        ("max_split_size_mb:64,expandable_segments:True,compat:pytorch", &[]),
        ("per_process_memory_fraction:0.5", &[]),
    ] {
        for backend in all {
            let built = settings(&format!("backend:{backend}"));
            let other = settings(&format!("backend:{backend},{given}"));
            assert!(built.is_built_alike(&built));
            let alike = built.is_built_alike(&other);
            assert_eq!(alike, !backends.contains(&backend), "backend:{backend}, {given}");
        }
    }
    let functions = BUILT_IN.iter().filter(|key| key.backends == ["pluggable"]);
    assert_eq!(functions.clone().count(), 11);
    for key in functions {
        let other = |backend| settings(&format!("backend:{backend},{}:x", key.name));
        let alike =
            |backend| settings(&format!("backend:{backend}")).is_built_alike(&other(backend));
        assert_eq!(all.map(alike), [true, true, false, true, true, false], "{}", key.name);
    }
    assert!(!settings("backend:native").is_built_alike(&settings("backend:cpu")));
}

#[test]
fn values_set_by_code_are_not_read_as_others_with_the_same_text() {
    let log = |path: &str| LayerSetting::Log { path: path.to_owned() };
    let layers = |layers| Settings { layers, ..Settings::default() };
    let one = layers(vec![log("a\",track,log:\"b")]);
    assert!(!one.is_built_alike(&layers(vec![log("a"), LayerSetting::Track, log("b")])));
    let library = |path: Option<&str>| {
        let mut own = settings("backend:pluggable");
        own.pluggable.library = path.map(str::to_owned);
        own
    };
    let all = [None, Some("unset"), Some("\"unset\""), Some("")].map(library);
    for (i, one) in all.iter().enumerate() {
        for (j, other) in all.iter().enumerate() {
            assert_eq!(one.is_built_alike(other), i == j, "{i} {j}");
        }
    }
}

#[test]
fn a_text_that_fails_changes_nothing() {
    let before = parse("max_split_size_mb:40").unwrap();
    let copy = before.clone();
    assert!(before.updated("max_split_size_mb:60,foo:1", &KeyTable::default()).is_err());
    assert_eq!(before, copy);
}

#[test]
fn the_last_of_repeated_keys_counts_and_is_warned_about() {
    let config = parse("max_split_size_mb:40,max_split_size_mb:50").unwrap();
    assert_eq!(config.settings().max_split_bytes, Some(50 * MIB));
    let key = "max_split_size_mb".to_owned();
    assert_eq!(config.warnings(), [ConfigWarning::Repeated { key, earlier_at: 0, last_at: 21 }]);
    assert_eq!(config.origin("max_split_size_mb"), Origin::Text { at: 21 });
}

#[test]
fn users_keys_are_passed_on_as_text() {
    let table = KeyTable::default()
        .with(UserKey::anything("wrappers", "its strategy reads it"))
        .with(UserKey::anything("arena_file", "its strategy reads it"));
    let text = "backend:mine,wrappers:[limit:8GiB,track],arena_file:\"/a,b:c\"";
    let config = Config::parse(text, &table).unwrap();
    let extra = &config.settings().extra;
    assert_eq!(extra[0], ("wrappers".to_owned(), "[limit:8GiB,track]".to_owned()));
    assert_eq!(extra[1], ("arena_file".to_owned(), "/a,b:c".to_owned()));
    let deep = format!("wrappers:{}", "[".repeat(100_000));
    assert!(Config::parse(&deep, &table).is_err());
}

#[test]
fn a_misspelt_layer_is_answered_with_the_nearest_one() {
    for (text, nearest) in [("layers:[trak]", "track"), ("layers:[track,limt:1GiB]", "limit")] {
        let error = Config::parse(text, &KeyTable::default()).unwrap_err();
        assert_eq!(error.nearest.as_deref(), Some(nearest));
    }
    let error = Config::parse("layers:[xyzzy]", &KeyTable::default()).unwrap_err();
    assert_eq!(error.nearest, None);
}

#[test]
fn layers_stand_in_the_order_given_and_mistakes_are_shown_in_place() {
    let given = settings("backend:native,layers:[track,limit:512MiB,fault:[above:4KiB],limit:7B]");
    let above = FaultSetting { above_bytes: Some(4096), ..FaultSetting::default() };
    let (outer, inner) =
        (LayerSetting::Limit { bytes: 512 * MIB }, LayerSetting::Limit { bytes: 7 });
    assert_eq!(given.layers, [LayerSetting::Track, outer, LayerSetting::Fault(above), inner]);
    for (text, at) in [
        ("layers:track", 7),
        ("layers:[tracks]", 8),
        ("layers:[track,]", 13),
        ("layers:[track:1]", 8),
        ("layers:[limit]", 8),
        ("layers:[limit:8GB]", 14),
        ("layers:[limit:0]", 14),
        ("layers:[limit:0B]", 14),
        ("layers:[limit:99999999999GiB]", 14),
        ("layers:[limit:-1]", 14),
        ("layers:[limit::]", 13),
        ("layers:[log:\"\"]", 12),
        ("layers:[fault]", 8),
        ("layers:[fault:[]]", 8),
        ("layers:[fault:[seed:3]]", 8),
        ("layers:[fault:[call:0]]", 20),
        ("layers:[fault:[probability:1.5]]", 27),
        ("layers:[fault:[probability:NaN]]", 27),
        ("layers:[fault:[when:1]]", 15),
        ("layers:[fault:[call:[1]]]", 15),
        ("layers:[oom_retry:0]", 18),
        ("layers:[align:3]", 14),
        ("layers:[align:2GiB]", 14),
        ("layers:[front:2MiB]", 14),
        ("layers:[front:[x]]", 8),
        ("layers:[track track]", 14),
    ] {
        let found = wrong(text);
        assert!(found.starts_with(&format!("{at}: ")), "{text}: {found}");
    }
    // The largest limit that the error message names is valid.
    let largest = settings("layers:[limit:1073741824GiB]").layers;
    assert_eq!(largest, [LayerSetting::Limit { bytes: 1 << 60 }]);
    assert!(wrong("layers:[limit:1EiB]").ends_with("from 1B to 1073741824GiB"));
    let many = format!("layers:[{}]", ["track"; 17].join(","));
    assert!(wrong(&many).contains("at most 16"));
}

#[test]
fn settings_far_from_the_defaults_are_written_as_they_are() {
    for text in [
        "large_segment_size_mb:64",
        "max_non_split_rounding_mb:20",
        "max_non_split_rounding_mb:99999999999999999",
        "pinned_reserve_segment_size_mb:99999999999999999",
        "expandable_segments_reserve:0.00000000001G",
        "roundup_power2_divisions:[64:8,256:4,>:2],compat:pytorch,backend:mine,peers:none",
        "expandable_segments_reserve_by_class:[a:0.25,b:8g]",
        "layers:[limit:8GiB,statistics,track,log:\"/a b,c]\",oom_retry:3,align:4KiB,guard,front]",
        "layers:[fault:[call:5,probability:0.25,seed:7,above:1000B],front:4KiB,limit:1B]",
        "layers:[]",
    ] {
        let config = parse(text).unwrap();
        let again = parse(&config.to_text()).unwrap();
        assert_eq!(again.settings(), config.settings(), "{text} as {}", config.to_text());
    }
    let long = format!("{}:1", "x".repeat(60_000));
    assert!(parse(&long).unwrap_err().to_string().len() < 200);
}

#[test]
fn the_first_variable_that_is_set_counts() {
    let table = KeyTable::default();
    let lookup = |name: &str| match name {
        "PYTORCH_CUDA_ALLOC_CONF" => Some("max_split_size_mb:40".to_owned()),
        "PYTORCH_ALLOC_CONF" => Some("max_split_size_mb:50".to_owned()),
        _ => None,
    };
    let found = from_environment(&table, lookup).unwrap();
    assert_eq!(found.source.as_ref().unwrap().0, "PYTORCH_CUDA_ALLOC_CONF");
    assert_eq!(found.config.settings().max_split_bytes, Some(40 * MIB));
    assert_eq!(found.config.warnings().len(), 1);
    let own = from_environment(&table, |name| {
        if name == "ALLOC_CONF" { Some(String::new()) } else { lookup(name) }
    });
    assert_eq!(own.unwrap().config.settings(), &Settings::default());
    let bad = from_environment(&table, |_| Some("foo:1".to_owned())).unwrap_err();
    assert_eq!(bad.variable, "ALLOC_CONF");
}

#[test]
fn settings_without_effect_are_noted() {
    let config = parse(
        "max_non_split_rounding_mb:30,pinned_num_register_threads:2,\
         garbage_collection_threshold:0.5,expandable_segments_reserve:0.5",
    );
    let rows = config.unwrap().explain();
    let note = |key: &str| rows.iter().find(|row| row.key == key).unwrap().note.clone();
    assert!(note("max_non_split_rounding_mb").contains("max_split_size_mb only"));
    assert!(note("pinned_num_register_threads").contains("backend:pinned only"));
    assert!(note("garbage_collection_threshold").contains("memory limit"));
    assert!(note("expandable_segments_reserve").contains("expandable_segments:True only"));
    assert_eq!(rows.len(), BUILT_IN.len());
}

#[test]
fn oversize_rules_have_no_effect_in_expandable_segments_unless_pytorchs_letter_counts() {
    let both = "max_split_size_mb:64,max_non_split_rounding_mb:30";
    for (more, acts) in [
        ("expandable_segments:True", false),
        ("expandable_segments:True,compat:pytorch", true),
        ("expandable_segments:False", true),
    ] {
        let rows = parse(&format!("{both},{more}")).unwrap().explain();
        for key in ["max_split_size_mb", "max_non_split_rounding_mb"] {
            let row = rows.iter().find(|row| row.key == key).unwrap();
            assert_eq!(row.idle.is_none(), acts, "{more}: {}", row.note);
        }
    }
}

#[test]
fn explanations_name_the_backends_of_each_key() {
    let given = "graph_capture_record_stream_reuse:True,per_process_memory_fraction:0.5,compat:pytorch,\
                malloc_async_own_pool:True,cpu_zero_fill:True,roundup_power2_divisions:4,\
                pinned_free_catch_all:True";
    let all = ["native", "cudaMallocAsync", "pluggable", "cpu", "pinned", "mine"];
    for (key, backends) in [
        ("graph_capture_record_stream_reuse", &all[..1]),
        ("roundup_power2_divisions", &all[..1]),
        ("compat", &all[..2]),
        ("malloc_async_own_pool", &all[1..2]),
        ("cpu_zero_fill", &all[3..4]),
        ("pinned_free_catch_all", &all[4..5]),
        ("per_process_memory_fraction", &all[..5]),
    ] {
        for backend in all {
            let config = Config::parse(&format!("backend:{backend},{given}"), &KeyTable::default());
            let rows = config.unwrap().explain();
            let note = &rows.iter().find(|row| row.key == key).unwrap().note;
            let acts = !note.contains("not in effect");
            assert_eq!(acts, backends.contains(&backend), "backend:{backend}, {key}: {note}");
        }
    }
}

/// A text composed of parts of configuration strings.
#[derive(Clone, Debug)]
struct Plausible(String);

impl Arbitrary for Plausible {
    fn arbitrary(g: &mut Gen) -> Self {
        let parts = ", : [ ] \" True False 40 -1 0.5 > ü \0 64:8 max_split_size_mb:40 \
                     roundup_power2_divisions:[ backend:native,";
        let parts = parts.split(' ').chain([" "]);
        let names: Vec<&str> = BUILT_IN.iter().map(|key| key.name).chain(parts).collect();
        let count = usize::arbitrary(g) % 12;
        Self((0..count).map(|_| *g.choose(&names).unwrap()).collect())
    }
}

quickcheck::quickcheck! {
    fn no_text_panics_and_errors_lie_inside_it(text: String) -> bool {
        check_any(&text)
    }

    fn no_plausible_text_panics(text: Plausible) -> bool {
        check_any(&text.0)
    }
}

fn check_any(text: &str) -> bool {
    match parse(text) {
        Ok(config) => {
            let again = parse(&config.to_text()).expect("written text can be read");
            assert_eq!(again.settings(), config.settings());
        }
        Err(error) => {
            assert!(error.span.at + error.span.len <= text.len().max(1));
            let _ = (error.to_string(), error.caret(text));
        }
    }
    true
}
