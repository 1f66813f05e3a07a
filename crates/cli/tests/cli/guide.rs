//! The commands in the pages of the user's guide.

use std::path::Path;

use super::*;

/// Returns the lines in a page's shell blocks that run the program `stratalloc`.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("\n```sh\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let lines = blocks.flat_map(str::lines).filter(|line| line.starts_with("stratalloc "));
    lines.map(str::to_owned).collect()
}

#[test]
fn each_command_of_the_guide_runs() {
    let root = shared_library::root();
    let docs = std::fs::read_dir(root.join("docs")).expect("the guide is there");
    let docs = docs.map(|entry| entry.expect("it can be read").path());
    let pages = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let folder = Folder::new("guide");
    for recording in ["run.pickle", "before.pickle"] {
        std::fs::copy(trace("cudagraph.default"), folder.path(recording)).expect("there is room");
    }
    for batch in [2, 4, 6] {
        let copy = folder.path(&format!("batch{batch}.pickle"));
        std::fs::copy(forecast::recorded("gpt", batch), copy).expect("there is room");
    }
    let mut count = 0;
    for path in pages.chain([root.join("README.md")]) {
        let page = std::fs::read_to_string(&path).expect("it is text");
        for line in commands(&page) {
            let words = line.split('#').next().expect("one part").split_whitespace().skip(1);
            let ended = ended(stratalloc().args(words).current_dir(folder.path("")));
            assert_eq!(ended.code, Some(0), "{}: {line}: {}", path.display(), ended.stderr);
            count += 1;
        }
    }
    assert!(count >= 6, "{count} commands");
    assert!(Path::new(&folder.path("run.html")).is_file());
}
