//! Pages in a browser. Headless Chromium opens a copy of the page with the added script `exercise.js`,
//! which uses the page and returns the results. With `STRATALLOC_TIMES=1` each reaction must take at
//! most 100 ms.

use std::sync::LazyLock;

use super::super::advise::recording_that_begins_late;
use super::super::*;
use super::made;
use crate::common::prelude::*;

/// Returns an installed browser that starts. Without one, prints that the tests are skipped.
pub(super) fn chromium() -> Option<PathBuf> {
    static FOUND: LazyLock<Option<PathBuf>> = LazyLock::new(find_chromium);
    FOUND.clone()
}

fn find_chromium() -> Option<PathBuf> {
    let Some(browser) = installed() else {
        eprintln!("skipped: no Chromium");
        return None;
    };
    let mut blank = Command::new(&browser);
    blank.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    let started = blank.args(["--dump-dom", "about:blank"]).output();
    if started.is_ok_and(|output| output.status.success()) {
        return Some(browser);
    }
    eprintln!("skipped: {} does not start", browser.display());
    None
}

fn installed() -> Option<PathBuf> {
    if let Some(output) = std::env::var_os("CHROMIUM") {
        return Some(output.into());
    }
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect())?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    names.iter().flat_map(|name| folders.iter().map(move |f| f.join(name))).find(|p| p.is_file())
}

/// A script at the start of the page that collects errors and network requests.
const WATCH: &str = "<head><script>var problems = [];\
    addEventListener('error', (event) => problems.push(`error: ${event.message}`));\
    addEventListener('unhandledrejection', (event) => problems.push(`rejection: ${event.reason}`));\
    addEventListener('securitypolicyviolation', (event) => problems.push(`request: ${event.blockedURI}`));\
    for (const name of ['error', 'warn']) console[name] = (...output) => problems.push(`console: ${output.join(' ')}`);\
    </script>";

/// The window in which a page is shown.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) width: u32,
    pub(super) is_dark: bool,
}

pub(super) const USUAL: Window = Window { width: 1280, is_dark: false };

/// Opens a page in a window, runs `exercise.js` on it and returns the results.
pub(super) fn used(browser: &Path, folder: &Folder, page: &str, window: Window) -> Value {
    opened(browser, folder, page, window, include_str!("exercise.js"))
}

/// Opens a page in a window, runs a script on it and returns the results.
pub(super) fn opened(
    browser: &Path,
    folder: &Folder,
    page: &str,
    window: Window,
    script: &str,
) -> Value {
    shown(browser, folder, page, window, script, "--timeout=120000")
}

/// Does the same, and waits for a script that goes on after the page has loaded.
pub(super) fn awaited(
    browser: &Path,
    folder: &Folder,
    page: &str,
    window: Window,
    script: &str,
) -> Value {
    shown(browser, folder, page, window, script, "--virtual-time-budget=60000")
}

/// `until` is the option that limits the time of the browser.
fn shown(
    browser: &Path,
    folder: &Folder,
    page: &str,
    window: Window,
    script: &str,
    until: &str,
) -> Value {
    let page = std::fs::read_to_string(page).expect("the page was written");
    let copy = page.replacen("<head>", WATCH, 1);
    let exercise = format!("<script>{script}</script></body>");
    let copy = copy.replacen("</body>", &exercise, 1);
    folder.file("used.html", &copy);
    // Chromium's windows are at least 500 pixels wide, but a frame inside a page can be narrower.
    let Window { width, is_dark } = window;
    let frame = format!(
        "<!doctype html><body style=\"margin: 0\"><iframe src=\"used.html\" style=\"width: {width}px; height: 900px; \
         border: 0\"></iframe><script>addEventListener('message', ({{ data }}) => document.body.append(data))</script>"
    );
    let path = folder.file("frame.html", &frame);
    let output = Command::new(browser)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"])
        .args(["--disable-background-networking", "--enable-logging=stderr", until])
        .arg("--disable-dev-shm-usage")
        .arg(format!("--window-size={},900", width.max(500)))
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!is_dark)))
        .arg(format!("--user-data-dir={}", folder.path("browser")))
        .arg(format!("file://{path}"))
        .output()
        .expect("the browser runs");
    let (dom, log) = (text(output.stdout), String::from_utf8_lossy(&output.stderr).into_owned());
    // Ignores Chromium's warning that reading a canvas back is slow. The test does that on purpose.
    let errors = log.lines().filter(|line| line.contains("CONSOLE") && !line.contains("willRead"));
    assert_eq!(errors.collect::<Vec<_>>(), [""; 0]);
    let result = dom.rsplit_once("RESULT").and_then(|(_, rest)| rest.split_once("TLUSER"));
    let (result, _) = result.unwrap_or_else(|| panic!("the page prints nothing: {log}"));
    // The frame's document contains the result as escaped text.
    let result = result.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    let json: Value = serde_json::from_str(&result).expect("the page prints JSON");
    assert_eq!((&json["width"], &json["dark"]), (&width.into(), &is_dark.into()));
    json
}

/// Checks the results that must hold for every page.
pub(super) fn is_well(value: &Value) {
    assert_eq!(value["problems"], serde_json::json!([]), "{value:#}");
    assert_eq!(value["requests"], serde_json::json!([]), "{value:#}");
    assert_eq!(value["images"], 0, "{value:#}");
    for seen in value["recordings"].as_array().expect("a list") {
        assert_eq!(seen["panels"].as_array().map(Vec::len), Some(6), "{seen:#}");
        let text = |name: &str| seen[name].as_str().unwrap_or_default().to_owned();
        assert!(
            text("sentence").len() > 20 && text("causes").contains("MiB are reserved"),
            "{seen:#}"
        );
        assert!(text("needs").len() > 20 && text("sums").contains("reserved"), "{seen:#}");
        let number = |name: &str| seen[name].as_u64().unwrap_or(0);
        assert!(number("timelineColours") > 4 && number("segmentsColours") > 2, "{seen:#}");
        assert!(number("flames") > 1 && number("holders") > 0, "{seen:#}");
        assert!(seen["opensAt"] == true && seen["followsAddress"] == true, "{seen:#}");
        let flames = &seen["flamesUsed"];
        assert!(flames["found"].as_u64() > Some(0), "{flames:#}");
        assert!(flames["sum"].as_str().is_some_and(|sum| sum.contains('%')), "{flames:#}");
        assert!(flames["high"] == true && flames["same"] == true, "{flames:#}");
        assert!(flames["rowsFound"] == true && flames["isEmpty"] == true, "{flames:#}");
        for used in [&flames["tip"], &seen["copied"], &seen["needsUsed"]] {
            assert_ne!(used, false, "{seen:#}");
        }
        assert_eq!(seen["tooWide"], serde_json::json!([]), "{seen:#}");
        assert!(seen["peakShown"] == true, "{seen:#}");
        assert!(seen["zoomed"] == true || number("events") < 16, "{seen:#}");
        if seen["block"] != Value::Null {
            assert!(
                seen["block"]["hasSize"] == true && seen["block"]["hasStack"] == true,
                "{seen:#}"
            );
        }
        assert_ne!(seen["area"], false, "{seen:#}");
        for used in ["ways", "ranges"] {
            assert_eq!(seen[used], serde_json::json!([]), "{seen:#}");
        }
        if number("events") > 3 {
            assert_ne!(seen["start"], seen["otherMoment"], "{seen:#}");
            assert!(seen["otherMap"] == true && number("keyMoment") > 0, "{seen:#}");
        }
        // The limit is loose, because the machine may run other tests. With `STRATALLOC_TIMES` it is
        // strict.
        let most_ms = if std::env::var_os("STRATALLOC_TIMES").is_some() { 100.0 } else { 1000.0 };
        for (what, ms) in seen["answers"].as_object().expect("times") {
            let ms = ms.as_f64().unwrap_or(f64::INFINITY);
            assert!(ms < most_ms, "{what} takes {ms:.0} ms: {seen:#}");
        }
    }
}

/// Parts of the names of frames that belong to the unwinder, the allocator, the interpreter, the
/// dispatcher and wrappers.
const MACHINERY: [&str; 6] =
    ["unwind", "CachingAllocator", "_PyEval", "_ops::", "_call_impl", "_start"];

#[test]
fn a_page_answers_in_a_browser_and_asks_nothing_of_the_network() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("browser");
    let shipped = ["serve.default", "unet.frac045"].map(trace);
    let made = [
        folder.file("hostile.json", &made::hostile()),
        folder.file("no_history.json", &made::without_history()),
        folder.file("two.json", &made::two_devices()),
        folder.file("cut.json", &made::cut("multistream.default")),
        folder.file("log.csv", &made::log()),
        folder.file("late.json", &recording_that_begins_late()),
    ];
    let page = folder.path("page.html");
    let files: Vec<&str> = shipped.iter().chain(&made).map(String::as_str).collect();
    ok(&[&["report", "--quick", "-o", &page][..], &files].concat());
    let json = used(&browser, &folder, &page, USUAL);
    is_well(&json);
    assert_eq!(json["chooser"], true);
    let first = &json["recordings"][0];
    assert_eq!(first["address"], format!("#recording=0&moment={}", first["start"]));
    let seen = json["recordings"].as_array().expect("a list");
    assert_eq!(seen.len(), 9, "one file has two devices: {json:#}");
    let of = |name: &str| seen.iter().find(|seen| seen["name"] == name).expect("it is shown");
    let owners = of("hostile")["account"].as_str().expect("it is shown");
    let rows = [made::HOSTILE, "60.0 MiB\t150 %", "unknown\tk\t-20.0 MiB\t-50.0 %\tf"];
    assert!(rows.iter().all(|row| owners.contains(row)), "{owners}");
    let serve = of("serve.default");
    assert!(serve["account"].is_null(), "{serve:#}");
    assert_eq!(serve["otherMap"], true);
    assert!(serve["area"] == true && serve["block"]["hasSize"] == true, "{serve:#}");
    assert!(
        serve["sums"]
            .as_str()
            .is_some_and(|sums| sums.contains("8,568 MiB reserved, 1,228 MiB live")),
        "{serve:#}"
    );
    let hostile = of("hostile");
    assert!(hostile["block"]["frames"].as_u64() > Some(0), "{hostile:#}");
    let shown = hostile["block"]["text"].as_str().unwrap_or_default();
    assert!(shown.contains("</script><img src=x onerror=alert(1)>"), "{shown}");
    let late = of("late");
    let unknown = late["unknown"].as_str().unwrap_or_default();
    assert!(unknown.starts_with("The recording does not show:the memory limit ("), "{unknown}");
    assert!(unknown.contains("what lived before its first event (call torch."), "{unknown}");
    let flames = &late["flamesUsed"];
    let of_flames = |name: &str| flames[name].as_str().unwrap_or_default();
    assert!(of_flames("first").contains("nn.py:6 softmax < model.py:432 attention"), "{flames:#}");
    for part in MACHINERY {
        assert!(!of_flames("own").contains(part), "{part}: {flames:#}");
        assert!(of_flames("all").contains(part), "{part}: {flames:#}");
    }
    let tip = late["block"]["text"].as_str().unwrap_or_default();
    assert!(tip.starts_with("nn.py:6 softmax < model.py:432 attention"), "{tip}");
}

#[test]
fn a_page_fits_narrow_and_wide_windows_light_and_dark() {
    let Some(browser) = chromium() else { return };
    let folder = Folder::new("windows");
    let page = folder.path("page.html");
    let (failed, late) =
        (trace("unet.frac045"), folder.file("late.json", &recording_that_begins_late()));
    let failed = &failed;
    ok(&["report", "--quick", failed, &late, "-o", &page]);
    // Each width is tested with one of the two colour schemes; in a full run, with both.
    for (width, is_dark, is_full) in [
        (390, true, false),
        (1440, false, false),
        (2560, true, false),
        (390, false, true),
        (1440, true, true),
        (2560, false, true),
    ] {
        if is_full && runs(1) == 1 {
            continue;
        }
        let json = used(&browser, &folder, &page, Window { width, is_dark });
        is_well(&json);
        let [failed, late] = &json["recordings"].as_array().expect("a list")[..] else {
            panic!("two recordings: {json:#}")
        };
        assert!(failed["copied"] == true && failed["needsUsed"] == true, "{failed:#}");
        assert_eq!(late["flamesUsed"]["tip"], true, "{late:#}");
        assert!(failed["firstScreen"] == true && late["firstScreen"] == true, "{width}");
    }
}

/// Tests the same for the recordings in the folder given by `STRATALLOC_RECORDINGS`.
#[test]
fn pages_of_recordings_from_elsewhere_answer_too() {
    let Some(browser) = chromium() else { return };
    for path in &recordings_from_elsewhere(&[".pickle", ".json", ".csv"]) {
        let folder = Folder::new("elsewhere");
        let page = folder.path("page.html");
        ok(&["report", "--quick", path, "-o", &page]);
        assert!(std::fs::metadata(&page).expect("it is there").len() <= 10_000_000, "{path}");
        let json = used(&browser, &folder, &page, USUAL);
        is_well(&json);
        for seen in json["recordings"].as_array().expect("a list") {
            let flames = |name: &str| seen["flamesUsed"][name].as_str().unwrap_or_default();
            for part in MACHINERY {
                assert!(!flames("own").contains(part), "{part}: {seen:#}");
            }
            if seen["name"] == "medium_512_training" {
                let first = "nn_utils.py:6 softmax < model.py:432 scaled_dot_product_attention";
                assert!(flames("first").starts_with("1,536 MiB13 %24"), "{seen:#}");
                assert!(flames("first").contains(first), "{seen:#}");
                assert!(flames("own").contains("< model.py:399 forward, in einops/"), "{seen:#}");
            }
            eprintln!("{path}: load {} ms, {}", json["load"], seen["answers"]);
        }
    }
}
