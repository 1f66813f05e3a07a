//! The names of code: paths of every system, copies of autocast, and never the functions of libc.

use super::made::{MIB, Made};
use super::*;

/// A frame: its folder and file with `/`, its line, and its function.
type Recorded = (&'static str, u32, &'static str);

const CONVERT: &[Recorded] =
    &[("venv/torch/nn/modules/module.py", 1355, "convert"), ("app/train.py", 20, "main")];
const STATE: &[Recorded] =
    &[("venv/torch/optim/adamw.py", 171, "_init_group"), ("app/train.py", 40, "main")];
const FORWARD: &[Recorded] = &[
    ("venv/torch/nn/functional.py", 373, "einsum"),
    ("app/net/block.py", 12, "forward"),
    ("venv/torch/nn/modules/module.py", 1790, "_call_impl"),
    ("standard/threading.py", 1012, "run"),
    ("app/train.py", 31, "main"),
];

/// Returns a recording of one program on a system. `place` returns a path as the system writes it.
fn on_system(place: &dyn Fn(&str) -> String) -> String {
    let mut made = Made::default();
    let stacks = [CONVERT, STATE, FORWARD, FORWARD];
    for (at, stack) in (1_u64..).zip(stacks) {
        let files: Vec<String> = stack.iter().map(|(file, ..)| place(file)).collect();
        let frames = files.iter().zip(stack).map(|(file, (_, line, name))| (&**file, *line, *name));
        made.segment(at << 32, 16 * MIB);
        let frames: Vec<_> = frames.collect();
        made.alloc_with(at << 32, 16 * MIB, &super::diff::frames(&frames));
    }
    made.json()
}

/// Replaces the first folder of a path.
fn placed(file: &str, folders: [(&str, &str); 3]) -> String {
    let (first, rest) = file.split_once('/').expect("it has a folder");
    let (_, folder) = folders.iter().find(|(name, _)| *name == first).expect("it is listed");
    format!("{folder}/{rest}")
}

#[test]
fn a_program_gets_the_same_answer_on_every_system() {
    let folder = Folder::new("names-systems");
    let linux = |file: &str| {
        placed(
            file,
            [
                ("app", "/home/u/proj"),
                ("venv", "/home/u/.venv/lib/python3.12/site-packages"),
                ("standard", "/usr/lib/python3.12"),
            ],
        )
    };
    // In JSON a backslash is written twice.
    let windows = |file: &str| {
        let of = [
            ("app", r"D:\proj"),
            ("venv", r"C:\v\Lib\site-packages"),
            ("standard", r"C:\Python312\Lib"),
        ];
        placed(file, of).replace('/', r"\").replace('\\', r"\\")
    };
    let share = |file: &str| {
        let of = [
            ("app", r"\\server\share\proj"),
            ("venv", r"C:\miniconda3\envs\x\lib\site-packages"),
            ("standard", r"C:\miniconda3\envs\x\lib"),
        ];
        placed(file, of).replace('\\', r"\\")
    };
    let first = folder.file("linux.json", &on_system(&linux));
    let answer = |file: &str| {
        let lines = ok(&["advise", "--quick", file]).stdout;
        lines.split_once('\n').expect("the name is the first line").1.to_owned()
    };
    let expected = answer(&first);
    let row = "block.py:12 forward < train.py:31 main, in torch/nn/functional.py:373 einsum";
    for part in ["[optimizer state]", "[parameters and buffers]", row] {
        assert!(expected.contains(part), "{part}: {expected}");
    }
    for (name, place) in
        [("windows.json", &windows as &dyn Fn(&str) -> String), ("unc.json", &share)]
    {
        let other = folder.file(name, &on_system(place));
        assert_eq!(answer(&other), expected, "{name}");
        let diff = ok(&["diff", &first, &other]).stdout;
        assert!(diff.contains("\nNothing differs: 4 requests"), "{diff}");
    }
}
