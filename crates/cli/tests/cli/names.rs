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

#[test]
fn categories_follow_from_the_stacks_and_from_the_lives_of_blocks() {
    let torch = |file: &'static str, name| vec![(file, 1_u32, name), ("train.py", 9, "main")];
    let convert = torch("/v/site-packages/torch/nn/modules/module.py", "convert");
    let forward = torch("/v/site-packages/torch/nn/modules/module.py", "_call_impl");
    let step = torch("/v/site-packages/torch/optim/optimizer.py", "wrapper");
    let cache = torch("/v/site-packages/transformers/cache_utils.py", "update");
    let reduce = vec![("??", 0, "c10d::Reducer::initialize_buckets(int)")];
    let cast = vec![
        ("??", 0, "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&)"),
        ("/v/site-packages/torch/nn/modules/module.py", 1, "_call_impl"),
        ("train.py", 9, "main"),
    ];
    let node = vec![("??", 0, "torch::autograd::generated::MmBackward0::apply(int)")];
    let mut made = Made::default();
    let allocate = |made: &mut Made, at: u64, mib: u64, stack: &[(&str, u32, &str)]| {
        made.segment(at << 32, mib * MIB);
        made.alloc_with(at << 32, mib * MIB, &super::diff::frames(stack));
    };
    allocate(&mut made, 1, 100, &convert);
    allocate(&mut made, 2, 60, &forward);
    allocate(&mut made, 3, 30, &forward);
    made.free(3 << 32, 30 * MIB);
    allocate(&mut made, 4, 14, &cast);
    allocate(&mut made, 5, 16, &cache);
    allocate(&mut made, 6, 18, &reduce);
    allocate(&mut made, 7, 40, &node);
    allocate(&mut made, 8, 20, &node);
    made.free(2 << 32, 60 * MIB);
    made.free(8 << 32, 20 * MIB);
    allocate(&mut made, 9, 2, &node);
    allocate(&mut made, 10, 50, &step);
    allocate(&mut made, 11, 6, &step);
    made.free(11 << 32, 6 * MIB);
    allocate(&mut made, 12, 10, &step);
    allocate(&mut made, 13, 8, &forward);
    let folder = Folder::new("names-categories");
    let file = folder.file("step.json", &made.json());
    let json = ok(&["advise", "--quick", "--json", &file]).json();
    let of = |moment: &str| {
        let moments = json["moments"].as_array().expect("a list");
        let moment = moments.iter().find(|one| one["moment"] == moment).expect("it is listed");
        let row = |one: &Value| {
            let mib = one["requested_bytes"].as_u64().unwrap_or(0) / MIB;
            let by_life = one["by_life_bytes"].as_u64().unwrap_or(0) / MIB;
            (one["category"].as_str().unwrap_or_default().to_owned(), mib, by_life)
        };
        moment["categories"].as_array().expect("a list").iter().map(row).collect::<Vec<_>>()
    };
    let expected = |rows: &[(&str, u64, u64)]| {
        rows.iter().map(|(name, mib, life)| ((*name).to_owned(), *mib, *life)).collect::<Vec<_>>()
    };
    let at_peak = [
        ("parameters and buffers", 100, 0),
        ("gradients", 40, 40),
        ("activations kept for the backward pass", 60, 60),
        ("copies of autocast", 14, 0),
        ("temporary", 20, 20),
        ("communication buffers", 18, 0),
        ("KV cache", 16, 0),
    ];
    assert_eq!(of("peak of live bytes"), expected(&at_peak));
    let at_end = [
        ("parameters and buffers", 100, 0),
        ("gradients", 42, 42),
        ("optimizer state", 60, 60),
        ("activations", 8, 0),
        ("copies of autocast", 14, 0),
        ("communication buffers", 18, 0),
        ("KV cache", 16, 0),
    ];
    assert_eq!(of("end"), expected(&at_end));
    let rows = json["holders"]["by_stack"].as_array().expect("a list");
    let from = |category: &str| {
        let row = rows.iter().find(|row| row["category"] == category).expect("it is listed");
        let text = |name: &str| row["category_from"][name].as_str().map(str::to_owned);
        (text("frame").unwrap_or_default(), text("life"))
    };
    let kept = "freed by autograd in a backward pass".to_owned();
    let call = "torch/nn/modules/module.py:1 _call_impl".to_owned();
    assert_eq!(from("activations kept for the backward pass"), (call, Some(kept)));
    assert_eq!(from("copies of autocast"), ("cached_cast".to_owned(), None));
    assert_eq!(from("parameters and buffers").1, None);
    let plain = ok(&["advise", "--quick", &file]).stdout;
    assert!(plain.contains("\nThe category of all live bytes is known.\n"), "{plain}");
}

/// Returns a recording in which expandable segments save much: each segment keeps a block, and the free parts
/// are too small for what follows. Its requests have this innermost frame. It has no times.
fn of_platform(frame: (&str, u32, &str)) -> String {
    let mut made = Made::default();
    let stack = super::diff::frames(&[frame, ("train.py", 9, "main")]);
    for at in 1..9_u64 {
        made.segment(at << 32, 20 * MIB);
        made.alloc_with(at << 32, 9 * MIB, &stack);
        made.alloc_with((at << 32) + 9 * MIB, 9 * MIB, &stack);
    }
    (1..9).for_each(|at| made.free(at << 32, 9 * MIB));
    for at in 9..14_u64 {
        made.segment(at << 32, 16 * MIB);
        made.alloc_with(at << 32, 15 * MIB, &stack);
    }
    made.json().replace(r#""time_us""#, r#""not_a_time""#)
}

#[test]
fn a_recording_of_rocm_gets_settings_that_work_there() {
    let folder = Folder::new("names-rocm");
    let hip = ("HIPCachingAllocator.cpp", 0, "c10::hip::HIPCachingAllocator::malloc(void**)");
    let cuda = ("CUDACachingAllocator.cpp", 0, "c10::cuda::CUDACachingAllocator::malloc(void**)");
    let [hip, cuda] = [("hip.json", hip), ("cuda.json", cuda)]
        .map(|(name, frame)| folder.file(name, &of_platform(frame)));
    let answer = |file: &str, more: &[&str]| {
        let args = [&["advise", "--quick", file][..], more].concat();
        (ok(&args).stdout, ok(&[&args[..], &["--json"]].concat()).json())
    };
    let (text, json) = answer(&cuda, &[]);
    assert_eq!(json["platform"], Value::Null);
    assert!(text.contains("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), "{text}");
    let rocm = |(text, json): (String, Value)| {
        assert_eq!(json["platform"], "ROCm");
        let is_ours = |setting: &Value| setting["paste_for"] == "stratalloc";
        assert!(!json["tried"].as_array().expect("a list").iter().any(is_ours), "{json}");
        for absent in ["CUDA context", "NCCL, cuBLAS", "PYTORCH_CUDA_ALLOC_CONF"] {
            assert!(!text.contains(absent), "{absent}: {text}");
        }
        assert!(
            text.contains("This is PyTorch for ROCm") && text.contains("HIP context"),
            "{text}"
        );
        text
    };
    // Before PyTorch 2.12, PyTorch for ROCm ignores the key.
    for text in [rocm(answer(&hip, &[])), rocm(answer(&hip, &["--torch", "2.8"]))] {
        assert!(!text.contains("expandable_segments:True"), "{text}");
    }
    let line = "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True";
    for (file, torch) in [(&hip, "2.12"), (&cuda, "2.13.0+rocm7.1")] {
        let text = rocm(answer(file, &["--torch", torch]));
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn a_setting_that_pytorch_ignored_is_not_replayed() {
    let folder = Folder::new("names-ignored");
    let made = |conf, is_expandable| {
        let mut made = Made::with_conf(conf);
        made.entry(if is_expandable { "segment_map" } else { "segment_alloc" }, 1 << 32, 20 * MIB);
        made.alloc(1 << 32, 9 * MIB);
        made.alloc((1 << 32) + 9 * MIB, 9 * MIB);
        made.json()
    };
    let of = |name: &str, conf, is_expandable| {
        let file = folder.file(name, &made(conf, is_expandable));
        let Ended { stdout, stderr, .. } = ok(&["advise", "--quick", "--json", &file]);
        let json: Value = serde_json::from_str(&stdout).expect("it is JSON");
        (json["recorded"]["conf"].as_str().unwrap_or_default().to_owned(), stderr)
    };
    let both = "max_split_size_mb:64,expandable_segments:True";
    let (conf, remarks) = of("ignored.json", both, false);
    assert_eq!(conf, "max_split_size_mb:64");
    assert!(remarks.contains("none of its segments is expandable"), "{remarks}");
    let (conf, remarks) = of("used.json", "expandable_segments:True", true);
    assert_eq!(
        (conf.as_str(), remarks.contains("expandable")),
        ("expandable_segments:True", false)
    );
}
