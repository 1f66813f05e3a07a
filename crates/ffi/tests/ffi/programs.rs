//! C and C++ programs, compiled against the checked-in header and run with the built library.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::shared_library::shared_library;
use crate::common::unconfigured;

/// Compiles a program. Prints a message and returns `None` without a compiler.
fn compile(compiler: &str, source: &str, more: &[&str]) -> Option<PathBuf> {
    if Command::new(compiler).arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler ({compiler})");
        return None;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = shared_library();
    let folder = library.parent().expect("files lie in folders");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.replace('.', "-"));
    // Another test process may be running the same program. The file of a running program cannot be
    // overwritten, but another file can be renamed to its name.
    let own = program.with_extension(std::process::id().to_string());
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread"]).args(more);
    command.arg("-I").arg(root.join("include")).arg(root.join("tests/ffi").join(source));
    command.arg("-L").arg(folder).arg("-lstratalloc").arg("-ldl");
    command.arg(format!("-Wl,-rpath,{}", folder.display())).arg("-o").arg(&own);
    let output = command.output().expect("the compiler was there a moment ago");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(own, &program).expect("a file takes another's place");
    Some(program)
}

fn run(program: &Path, arguments: &[&str], device: &str) -> String {
    let mut command = unconfigured(program);
    // The test runner sets `LD_LIBRARY_PATH` to its own output folder, which may contain an older
    // library and takes precedence over the path that the program was linked with.
    command.env_remove("LD_LIBRARY_PATH");
    let output = command.args(arguments).env("STRATALLOC_DEVICE", device).output();
    let output = output.expect("what was compiled runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?} {device}: {}: {errors}", output.status);
    assert_eq!(output.stdout, b"good\n");
    errors
}

/// Programs that get the name of the device as argument, and succeed on `sim` and `host`.
macro_rules! good_on_both {
    ($($name:ident: $source:literal, $standard:literal;)+) => {$(
        #[test]
        fn $name() {
            let Some(program) = compile("cc", $source, &[$standard]) else { return };
            for device in ["sim", "host"] {
                run(&program, &[device], device);
            }
        }
    )+};
}

good_on_both! {
    a_c_program_uses_every_call: "use.c", "-std=c11";
    user_data_of_threads_is_released_once_also_at_destruction: "lent.c", "-std=c11";
    a_hostile_c_program_gets_a_status_for_everything: "hostile.c", "-std=c11";
    functions_of_callers_may_call_the_library: "inside.c", "-std=gnu11";
}

#[test]
fn tensors_leave_and_enter_in_both_structures() {
    let Some(program) = compile("cc", "tensors.c", &["-std=c11"]) else { return };
    run(&program, &[], "host");
}

#[test]
fn a_c_program_reaches_everything_an_allocator_can_do() {
    let Some(program) = compile("cc", "reach.c", &["-std=c11"]) else { return };
    for device in ["sim", "host"] {
        run(&program, &[device], device);
    }
    for variable in ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"] {
        // Any value turns the cache off, as in PyTorch.
        for value in ["1", "0", ""] {
            let mut command = Command::new(&program);
            command.env_remove("LD_LIBRARY_PATH").env("STRATALLOC_DEVICE", "sim");
            let output = command.args(["sim", "uncached"]).env(variable, value).output();
            let output = output.expect("what was compiled runs");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.stdout, b"good\n", "{variable}={value}: {errors}");
        }
    }
}

#[test]
fn memory_is_mapped_under_valgrind_too() {
    let Some(program) = compile("cc", "mapped.c", &["-std=c11"]) else { return };
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: no valgrind");
        return;
    }
    run(Path::new("valgrind"), &["-q", program.to_str().expect("a plain path")], "host");
}

#[test]
fn a_cpp_program_calls_as_pytorch_does() {
    let Some(program) = compile("c++", "torch.cpp", &["-std=c++17"]) else { return };
    let library = shared_library();
    for device in ["sim", "host"] {
        let errors = run(&program, &[library.to_str().expect("a plain path")], device);
        assert!(errors.contains("stratalloc: out of memory on device 0"), "{errors}");
        assert!(errors.lines().filter(|line| line.starts_with("stratalloc: ")).count() <= 32);
    }
}

#[test]
fn a_cpp_program_calls_as_rmm_and_tensorrt_do() {
    let current = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ffi/stand_ins");
    let old = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ffi/stand_ins_before_26");
    for more in [&[][..], &["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"], &["-I", old]] {
        let options = [&["-std=c++17", "-I", current], more].concat();
        let Some(program) = compile("c++", "libraries.cpp", &options) else { return };
        run(&program, &[], "sim");
    }
}

#[test]
fn a_c_program_calls_as_pytorchs_class_does() {
    let Some(program) = compile("cc", "class.c", &["-std=c11"]) else { return };
    for device in ["sim", "host"] {
        run(&program, &[], device);
    }
}

/// The variable `FORKS` sets the number of children, such as `FORKS=500`.
#[test]
fn children_of_a_fork_make_their_own_allocators_whatever_the_parents_threads_do() {
    let Some(program) = compile("cc", "forks.c", &["-std=gnu11"]) else { return };
    let forks = std::env::var("FORKS").unwrap_or_else(|_| "60".to_owned());
    for device in ["sim", "host"] {
        run(&program, &[device, &forks], device);
    }
}

const BACKENDS: [&str; 3] =
    ["backend:native", "backend:native,expandable_segments:True", "backend:cudaMallocAsync"];

#[test]
fn every_call_works_in_the_last_destructors_of_a_thread() {
    if let Some(program) = compile("cc", "ends.c", &["-std=c11"]) {
        for (conf, device) in BACKENDS.iter().flat_map(|conf| [(conf, "sim"), (conf, "host")]) {
            // The argument selects what is on: nothing, the history, the history with callbacks, everything.
            for mode in ["0", "1", "3", "15"] {
                run(&program, &[conf, device, mode], device);
            }
        }
        run(&program, &["layers:[track,statistics]", "sim", "15"], "sim");
    }
    if let Some(program) = compile("c++", "ends.cpp", &["-std=c++17"]) {
        run(&program, &["sim"], "sim");
        run(&program, &["host"], "host");
    }
}

#[test]
fn a_name_may_be_open_when_its_thread_ends() {
    let Some(program) = compile("cc", "names.c", &["-std=c11"]) else { return };
    run(&program, &[], "sim");
    run(&program, &["main"], "sim");
}

#[test]
fn threads_that_end_give_their_share_of_a_limit_back() {
    let Some(program) = compile("cc", "limit.c", &["-std=c11"]) else { return };
    for layers in ["limit:64MiB", "track,limit:64MiB", "statistics,limit:64MiB"] {
        for threads in ["4", "48"] {
            let conf = format!("backend:native,layers:[{layers}]");
            run(&program, &[&conf, "sim", "67108864", threads], "sim");
        }
    }
}

#[test]
fn a_bad_environment_is_reported_and_returns_null() {
    let Some(program) = compile("cc", "broken.c", &["-std=c11"]) else { return };
    let no_text = OsStr::from_bytes(b"backend:native\xff");
    for (variable, value, words) in [
        ("ALLOC_CONF", OsStr::new("max_split_size:1"), "did you mean max_split_size_mb"),
        ("ALLOC_CONF", no_text, "expected text in UTF-8"),
        ("STRATALLOC_DEVICE", OsStr::new("gpu"), "\"gpu:0\" is no device"),
        ("STRATALLOC_DEVICE", OsStr::from_bytes(b"si\xff"), "is no device"),
    ] {
        let mut command = Command::new(&program);
        command.env_remove("LD_LIBRARY_PATH");
        command.env("STRATALLOC_DEVICE", "sim").env(variable, value);
        let output = command.output().expect("what was compiled runs");
        assert_eq!(output.stdout, b"good\n");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(words), "{errors}");
    }
}
