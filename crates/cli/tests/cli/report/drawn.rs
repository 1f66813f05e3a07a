//! `report --no-search`, and `report --open` with a program in the place of the browser.

use super::super::*;
use super::{recordings, written};

#[test]
fn a_page_without_a_search_has_the_facts_and_no_settings() {
    let folder = Folder::new("no-search");
    let (out, searched) = (folder.path("out.html"), folder.path("searched.html"));
    for name in ["unet.frac045", "multistream.default"] {
        let path = &trace(name);
        let page = written(&["report", "--no-search", path, "-o", &out], &out);
        let [data] = &recordings(&page)[..] else { panic!("one recording") };
        let sentence = data["advice"]["sentence"].as_str().unwrap_or_default();
        assert!(sentence.contains("Settings were not searched (--no-search)"), "{sentence}");
        assert_eq!(data["needs"]["rows"].as_array().map(Vec::len), Some(0), "{name}");
        let page = written(&["report", "--quick", path, "-o", &searched], &searched);
        let [with_settings] = &recordings(&page)[..] else { panic!("one recording") };
        for part in ["peak_live", "peak_reserved", "failures", "headline", "holders"] {
            assert_eq!(data[part], with_settings[part], "{name}: {part}");
        }
    }
    for option in ["--quick", "--seconds=5", "--conf=max_split_size_mb:64"] {
        fails(&["report", "--no-search", option, "x.pickle"], 2, "--no-search");
    }
}

#[test]
fn without_replays_a_limit_is_not_called_missing() {
    let folder = Folder::new("no-search-limit");
    let out = folder.path("out.html");
    let page = written(&["report", "--no-search", &trace("cudagraph.default"), "-o", &out], &out);
    assert!(page.contains("the memory limit without replays, which were left out"));
    // Its limit is inferred from garbage collections, too.
    let page = written(&["report", "--no-search", &trace("2.15.0.gcfrac"), "-o", &out], &out);
    assert!(!page.contains("limit that the recording does not show"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_page_is_opened_by_the_program_of_the_desktop() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Folder::new("open");
    let (path, out) = (trace("cudagraph.default"), folder.path("a page;touch x.html"));
    let opener = folder.file("xdg-open", "#!/bin/sh\nprintf '%s' \"$*\" > \"$0.args\"\n");
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&opener, all).expect("it is ours");
    let with_path = |path_variable: &str| {
        let args = ["report", "--no-search", "--open", &path, "-o", &out];
        ended(stratalloc().args(args).env("PATH", path_variable))
    };
    let opened = with_path(&format!("{}:/bin:/usr/bin", folder.path("")));
    assert_eq!((opened.code, opened.stderr.as_str()), (Some(0), ""), "{}", opened.stdout);
    assert!(!opened.stdout.contains("open it in a browser"), "{}", opened.stdout);
    let given = std::fs::read_to_string(format!("{opener}.args")).expect("it was called");
    assert_eq!(given, out);
    std::fs::remove_file(&out).expect("it was written");
    let none = with_path(&folder.path("nothing"));
    assert_eq!(none.code, Some(2));
    assert!(none.stderr.contains("no browser could be started"), "{}", none.stderr);
    assert!(std::path::Path::new(&out).exists() && none.stdout.contains("page;touch"));
    fails(&["report", "--open", &path, "-o", "-"], 2, "--open needs a file");
}
