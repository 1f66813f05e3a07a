//! The short form of `advise`: the answer is on the screen when the prompt returns.

use super::*;

/// The rows of a terminal, and its columns.
const SCREEN: [usize; 2] = [24, 80];

/// Runs `advise` on a terminal of this many columns.
fn advised(path: &str, columns: usize, more: &[&str]) -> Ended {
    let mut command = stratalloc();
    command.args(["advise", "--quick", path]).args(more);
    ended(command.env("COLUMNS", columns.to_string()))
}

/// Returns recordings of every kind: with and without stacks, with failures, with growth, of several devices,
/// without a history, and files that have only totals.
fn recordings() -> Vec<String> {
    let root = shared_library::root();
    let in_folder = |folder: &str| {
        let files = std::fs::read_dir(root.join(folder)).expect("it is a folder");
        files.map(|file| file.expect("it can be read").path().display().to_string())
    };
    let is_recording = |path: &String| !path.ends_with(".py") && !path.ends_with(".md");
    let forms = in_folder("tests/forms").filter(is_recording);
    let truth = in_folder("tests/truth").filter(|path| path.ends_with(".xz"));
    let cases =
        ["oom_with_free_memory", "two_devices_second_fails", "torch215_graphs", "state_only"];
    let cases = cases.iter().map(|name| case(name));
    let traces =
        ["serve.default", "unet.frac045", "cudagraph.default"].iter().map(|one| trace(one));
    forms.chain(truth).chain(cases).chain(traces).collect()
}

#[test]
fn the_answer_and_the_prompt_fit_a_terminal_of_24_rows() {
    let [rows, columns] = SCREEN;
    for path in recordings() {
        let ended = advised(&path, columns, &[]);
        assert_eq!(ended.code, Some(0), "{path}: {}", ended.stderr);
        let lines: Vec<&str> = ended.stdout.lines().collect();
        // The prompt has a row of its own.
        assert!(lines.len() < rows, "{path}: {} rows: {}", lines.len(), ended.stdout);
        let widest = lines.iter().map(|line| line.chars().count()).max();
        assert!(widest <= Some(columns), "{path}: {}", ended.stdout);
        let end = lines.iter().rfind(|line| !line.is_empty());
        assert!(
            end.is_some_and(|end| end.starts_with("--all prints the rest")),
            "{}",
            ended.stdout
        );
    }
}

#[test]
fn it_has_the_line_to_paste_five_holders_a_cause_a_chart_and_lacking_data() {
    let text = advised(&trace("serve.default"), 80, &[]).stdout;
    for words in [
        "\n  PyTorch 2.1 or later: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:",
        "\nMemory over 15,232 events: █ live  ░ reserved\n",
        "\nAt the peak of live bytes, 59 blocks hold 1,336 MiB:\n",
        "(51 %) are completely free segments",
        "\nNot recorded: the memory limit (--total-memory or --memory-fraction sets it)",
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let holders = text.lines().filter(|line| line.contains(" bytes on stream ")).count();
    assert_eq!(holders, 5, "{text}");
    let failed = advised(&trace("unet.frac045"), 80, &[]).stdout;
    assert!(failed.contains("┄ limit, 6,366 MiB  × failed\n"), "{failed}");
    assert!(failed.contains("\n6,366 MiB ┄") && failed.contains('×'), "{failed}");
}

#[test]
fn what_it_leaves_out_is_printed_on_request() {
    let path = case("torch215_graphs");
    let short = advised(&path, 80, &[]).stdout;
    for words in ["needs MiB", "blocks  category", "requests ago"] {
        assert!(!short.contains(words), "{short}");
        for option in ["--all", "-v", "--all-frames", "--conf=backend:native"] {
            let all = advised(&path, 80, &[option]).stdout;
            assert!(all.contains(words), "{option}: {words} is not in {all}");
        }
        let markdown = advised(&path, 80, &["--format", "markdown"]).stdout;
        assert!(markdown.contains(words.trim_start_matches("blocks  ")), "{markdown}");
    }
    let handles = advised(&path, 80, &["-v"]).stdout;
    assert!(handles.contains("Handles: stream 1 is 0x1010."), "{handles}");
    assert!(!short.contains("0x1010") && !advised(&path, 80, &["--all"]).stdout.contains("0x1010"));
    // What was asked for is answered, however short.
    let fits = advised(&path, 80, &["--fits", "80GiB"]).stdout;
    assert!(fits.contains("Yes: ") && !fits.contains("Memory over"), "{fits}");
}

#[test]
fn of_several_devices_a_table_compares_them_and_the_first_is_answered() {
    let path = case("two_devices_second_fails");
    let ended = advised(&path, 80, &[]);
    let expected = "2 devices; requests failed on device 1 only.\n\
                    device  reserved at most  live at most  failed\n     \
                    1          19.5 GiB      19.5 GiB       1\n     \
                    0           420 MiB       403 MiB       0\n\n\
                    two_devices_second_fails device 1\nNo setting can help: ";
    assert!(ended.stdout.starts_with(expected), "{}", ended.stdout);
    assert_eq!(ended.stderr, "");
    let other = advised(&path, 80, &["--recorded-device", "0"]).stdout;
    assert!(other.starts_with("two_devices_second_fails\nSet expandable_segments"), "{other}");
}

#[test]
fn output_into_a_pipe_is_not_wrapped() {
    let path = &trace("serve.default");
    let piped = ended(stratalloc().args(["advise", "--quick", path])).stdout;
    let headline = piped.lines().nth(1).expect("a line");
    assert!(headline.len() > 100 && headline.ends_with("(31 % less)."), "{piped}");
    let narrow = advised(path, 40, &[]).stdout;
    let beyond = narrow.lines().filter(|line| line.chars().count() > 40);
    assert!(
        beyond.clone().all(|line| line.contains("ALLOC_CONF=") || !line.trim().contains(' ')),
        "{narrow}"
    );
}

/// A graph that is kept although no backward pass follows: the peak without it is named.
#[test]
fn a_graph_kept_in_evaluation_has_the_peak_without_it() {
    let path = format!(
        "{}/tests/truth/evaluation_keeps_graph.pickle.xz",
        shared_library::root().display()
    );
    let text = advised(&path, 80, &[]).stdout.replace('\n', " ");
    let advice = "torch.no_grad() or torch.inference_mode() frees each as soon as the next operators have used \
                  it. The peak is then 145 MiB and what single operators hold.";
    assert!(text.contains(advice), "{text}");
    let answer = ok(&["advise", "--quick", "--json", &path]).json();
    let peak = |name: &str| answer[name].as_u64().expect("a number");
    let activations = answer["moments"][0]["categories"].as_array().expect("a list").iter();
    let activations = activations.filter(|row| row["category"] == "activations");
    let bytes: u64 = activations.filter_map(|row| row["requested_bytes"].as_u64()).sum();
    // The peak moves to a moment that is not the one with the graph.
    assert!(peak("peak_without_activations_bytes") >= peak("live_peak_bytes") - bytes);
    let trained = ok(&["advise", "--quick", "--json", &trace("serve.default")]).json();
    assert_eq!(trained["peak_without_activations_bytes"], Value::Null);
}
