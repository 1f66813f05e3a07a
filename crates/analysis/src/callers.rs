//! Callers: which code made a request, derived from the recorded stacks.
//!
//! Two stacks have the same caller if they agree in the program's own frames, in the library code that the
//! innermost of these frames called, and in the category. Of the library code, only frames of installed
//! packages other than PyTorch are compared, or all of its frames if there are none of these. Frames of the
//! runtime ([`FrameKind::Runtime`]) are compared only with [`Compared::AllFrames`].
//!
//! Threads of the backward pass have no Python code. There the caller is the node of the backward pass, or
//! else the compiled code. Requests from one line with different categories, such as for a tensor and for a
//! workspace, have two callers.

use std::collections::{HashMap, HashSet};

use super::categories::Category;
use stratalloc_recording::{Frame, FrameKind, Runtime, StackId, Stacks, thread_entries};

/// The frames that are compared to tell callers apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compared {
    /// Frames of the program's code, and of the library that its innermost line called.
    #[default]
    Code,
    /// All frames.
    AllFrames,
}

/// A caller: the code that one or several stacks have in common, as frame numbers, innermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Caller {
    /// The program's own frames. If there are none, the frames of libraries. If there are none of these
    /// either, the node of the backward pass, or else all compiled frames.
    chain: Vec<u32>,
    /// The library code that the innermost frame of `chain` called.
    library: Vec<u32>,
    /// The reason why `chain` is empty.
    bare: Bare,
    category: Category,
    /// The stack itself, if all frames are compared.
    stack: Option<StackId>,
}

/// The kind of a stack that has no frame to name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Bare {
    /// The stack has frames to name, or none that are known.
    #[default]
    Other,
    /// Autograd's engine made the request, between nodes of the backward pass.
    Engine,
    /// Autograd's engine sums a gradient over the dimensions in which the parameter was broadcast.
    ReducedGradient,
}

/// The callers of all stacks of a recording.
#[derive(Debug)]
pub struct Callers<'a> {
    stacks: &'a Stacks,
    callers: Vec<Caller>,
    /// The frame that shows the category, for each caller.
    shown_by: Vec<Option<u32>>,
    /// The caller's number for each stack, by the index of the stack.
    of_stacks: Vec<u32>,
    kinds: Vec<FrameKind>,
}

/// A label shows at least this many frames of a chain, if it has so many.
const FRAMES_LEAST: usize = 2;
/// Labels with more frames than this leave out frames in the middle.
const FRAMES_WHOLE: usize = 4;
/// If more files than this have the same name, their whole paths are shown.
const FILES_MOST: usize = 256;
/// The maximum number of frames that are added to a label. Labels that are then still equal stay equal.
const FRAMES_MOST: usize = 64;

impl<'a> Callers<'a> {
    /// Finds the caller of each stack.
    pub fn of(stacks: &'a Stacks, compared: Compared) -> Self {
        let frames = || (0..stacks.frame_count()).map(|number| stacks.frame(number));
        let kinds = frames().zip(thread_entries(stacks)).map(|(frame, is_entry)| match is_entry {
            true => FrameKind::Runtime(Runtime::System),
            false => frame.kind(),
        });
        let kinds = kinds.collect();
        let rules: Vec<_> = frames().map(|frame| Category::rule_of(&frame)).collect();
        let (callers, shown_by, of_stacks) = Default::default();
        let mut all = Self { stacks, callers, shown_by, of_stacks, kinds };
        let mut known: HashMap<Caller, u32> = HashMap::new();
        for stack in stacks.ids() {
            let mut caller = all.caller_of(stack);
            let frames = || stacks.frame_numbers(stack).iter().copied();
            let rule_of = |frame: u32| rules[frame as usize];
            let category = Category::of_rules(frames().map(rule_of));
            // Labels do not show the category activations. So the same code must not become two callers
            // only because one of its requests is an activation.
            caller.category = match category {
                Category::Activations => Category::Unknown,
                named => named,
            };
            caller.stack = (compared == Compared::AllFrames).then_some(stack);
            let (callers, shown_by) = (&mut all.callers, &mut all.shown_by);
            let number = *known.entry(caller).or_insert_with_key(|caller| {
                callers.push(Caller { category, ..caller.clone() });
                let with_rule = frames().filter(|&frame| rule_of(frame).is_some());
                shown_by.push(with_rule.min_by_key(|&frame| rule_of(frame)));
                u32::try_from(callers.len() - 1).unwrap_or(0)
            });
            all.of_stacks.push(number);
        }
        all
    }

    fn caller_of(&self, stack: StackId) -> Caller {
        let numbers = self.stacks.frame_numbers(stack);
        let of_kind = |kind: FrameKind| {
            let frames = numbers.iter().copied().filter(move |&frame| self.kind(frame) == kind);
            frames.collect::<Vec<u32>>()
        };
        let chain = of_kind(FrameKind::Program);
        if let Some(innermost) = chain.first() {
            let called = numbers.iter().copied().take_while(|frame| frame != innermost);
            let library = called.filter(|&frame| self.kind(frame) == FrameKind::Library);
            let library = self.of_packages(library.collect());
            return Caller { chain, library, ..Caller::default() };
        }
        let chain = self.of_packages(of_kind(FrameKind::Library));
        if !chain.is_empty() {
            return Caller { chain, ..Caller::default() };
        }
        let compiled = of_kind(FrameKind::Compiled);
        let node = compiled.iter().find(|&&frame| self.frame(frame).backward_node().is_some());
        if let Some(&node) = node {
            return Caller { chain: vec![node], ..Caller::default() };
        }
        let is_engine =
            numbers.iter().any(|&f| self.kind(f) == FrameKind::Runtime(Runtime::Autograd));
        let bare = match is_engine {
            true if self.reduces_gradient(numbers) => Bare::ReducedGradient,
            true if compiled.is_empty() => Bare::Engine,
            _ => Bare::Other,
        };
        let chain = if bare == Bare::ReducedGradient { Vec::new() } else { compiled };
        Caller { chain, bare, ..Caller::default() }
    }

    /// Returns true if autograd's engine sums a gradient to the shape of the tensor that it belongs to. It
    /// does so in `reduce_grad`, in earlier versions in `validate_outputs` itself.
    fn reduces_gradient(&self, numbers: &[u32]) -> bool {
        let has = |part: &str| numbers.iter().any(|&f| self.frame(f).function.contains(part));
        has("InputMetadata::reduce_grad") || (has("validate_outputs") && has("sum_to"))
    }

    /// Returns the frames of packages other than PyTorch and Python's standard library. If there are
    /// none, returns all frames.
    fn of_packages(&self, library: Vec<u32>) -> Vec<u32> {
        let is_of_package = |&&number: &&u32| {
            let file = self.frame(number).installed_file();
            file.is_some_and(|file| !file.starts_with("torch/"))
        };
        let others: Vec<u32> = library.iter().filter(is_of_package).copied().collect();
        if others.is_empty() { library } else { others }
    }

    /// Returns the index of the caller to which a stack belongs. Stacks of requests by the same code have one
    /// index. Returns 0 for an unknown stack.
    pub fn of_stack(&self, stack: StackId) -> u32 {
        self.of_stacks.get(stack.index()).copied().unwrap_or(0)
    }

    /// Returns the label of the code that has a stack, if the stack was recorded.
    #[must_use]
    pub fn code_of(&self, stack: Option<StackId>) -> Option<String> {
        Some(self.label_of(self.of_stack(stack?)))
    }

    /// Returns the label of one caller.
    pub(crate) fn label_of(&self, caller: u32) -> String {
        self.labels(&[caller]).concat()
    }

    /// Returns the frames of a caller, innermost first, as frame numbers of the recording.
    pub fn frames(&self, caller: u32) -> impl Iterator<Item = u32> {
        let Caller { library, chain, .. } = &self.callers[caller as usize];
        library.iter().chain(chain).copied()
    }

    /// Returns the number of callers. All numbers of callers are below it.
    pub fn count(&self) -> u32 {
        u32::try_from(self.callers.len()).unwrap_or(u32::MAX)
    }

    /// Returns the reason why a caller has no frames.
    pub(crate) fn bare(&self, caller: u32) -> Bare {
        self.callers[caller as usize].bare
    }

    /// Returns a frame as labels show it.
    pub(crate) fn frame_text(&self, frame: u32) -> String {
        self.text(frame, &self.program_files())
    }

    /// Returns the stacks of the recording.
    pub(crate) fn stacks(&self) -> &'a Stacks {
        self.stacks
    }

    /// Returns true if the caller is Python code.
    pub(crate) fn is_python(&self, caller: u32) -> bool {
        self.frames(caller).any(|frame| self.is_python_frame(frame))
    }

    fn is_python_frame(&self, frame: u32) -> bool {
        matches!(self.kind(frame), FrameKind::Program | FrameKind::Library)
    }

    /// Returns the frames of Python code of a stack, outermost first, as frame numbers.
    pub(crate) fn python_frames(&self, stack: StackId) -> impl Iterator<Item = u32> {
        let frames = self.stacks.frame_numbers(stack).iter().rev().copied();
        frames.filter(|&frame| self.is_python_frame(frame))
    }

    /// Returns the kind of a frame.
    pub fn kind(&self, frame: u32) -> FrameKind {
        self.kinds[frame as usize]
    }

    fn frame(&self, number: u32) -> Frame<'a> {
        self.stacks.frame(number)
    }

    /// Returns the purpose of a caller's blocks.
    pub fn category(&self, caller: u32) -> Category {
        self.callers[caller as usize].category
    }

    /// Returns the frame that shows the category of a caller, as labels show it; `None` if it is unknown.
    pub(crate) fn category_frame(&self, caller: u32, files: &Files<'_>) -> Option<String> {
        let number = self.shown_by[caller as usize]?;
        let frame = self.frame(number);
        // Labels omit the file of a function that only forwards a call.
        match self.kind(number) == FrameKind::Runtime(Runtime::Wrapper) && frame.line > 0 {
            true => Some(format!("{}:{} {}", frame.library_file(), frame.line, frame.function)),
            false => Some(self.text(number, files)),
        }
    }

    /// Returns true if the recording has requests of a backward pass.
    pub fn has_backward_pass(&self) -> bool {
        let is_of_it = |caller: &Caller| {
            matches!(caller.category, Category::BackwardPass | Category::Gradients)
        };
        self.callers.iter().any(is_of_it)
    }

    /// Returns the innermost function of a caller whose name contains the text.
    pub fn function_with(&self, caller: u32, part: &str) -> Option<&'a str> {
        let mut functions = self.frames(caller).map(|number| self.frame(number).function);
        functions.find(|function| function.contains(part))
    }

    /// Returns a label for each caller. Adds frames to labels that are equal until they differ, if they
    /// can.
    pub fn labels(&self, callers: &[u32]) -> Vec<String> {
        let files = self.program_files();
        let mut shown: Vec<Shown> = callers.iter().map(|_| Shown::default()).collect();
        let label = |at: usize, shown: Shown| self.label(callers[at], shown, &files);
        let mut labels: Vec<String> =
            shown.iter().enumerate().map(|(at, &s)| label(at, s)).collect();
        for _ in 0..FRAMES_MOST {
            let mut same: HashMap<&str, Vec<usize>> = HashMap::new();
            labels.iter().enumerate().for_each(|(at, text)| same.entry(text).or_default().push(at));
            let same = same.into_values().filter(|rows| rows.len() > 1);
            let more: Vec<usize> =
                same.flat_map(|rows| self.longer(callers, &rows, &mut shown)).collect();
            if more.is_empty() {
                break;
            }
            more.into_iter().for_each(|at| labels[at] = label(at, shown[at]));
        }
        labels
    }

    /// Adds a frame to the label of each of these rows, whose labels are equal so far. Returns the rows that
    /// had a further frame.
    fn longer(&self, callers: &[u32], rows: &[usize], shown: &mut [Shown]) -> Vec<usize> {
        let caller = |row: usize| &self.callers[callers[row] as usize];
        let is_library = rows.iter().any(|&row| caller(row).library != caller(rows[0]).library);
        let has_more = |row: &usize| {
            let (Caller { chain, library, .. }, shown) = (caller(*row), &mut shown[*row]);
            if is_library && shown.library < library.len() {
                shown.library += 1;
                return true;
            }
            let has_more = shown.chain < chain.len();
            shown.chain += usize::from(has_more);
            has_more
        };
        rows.iter().copied().filter(has_more).collect()
    }

    fn label(&self, caller: u32, shown: Shown, files: &Files<'_>) -> String {
        let Caller { chain, library, bare, .. } = &self.callers[caller as usize];
        let text = |number: &u32| self.text(*number, files);
        let cut = |mut frames: Vec<String>| {
            if frames.len() > FRAMES_WHOLE {
                frames.splice(FRAMES_LEAST..frames.len() - 1, ["..".to_owned()]);
            }
            frames.join(" < ")
        };
        let frames: Vec<String> = chain.iter().take(shown.chain).map(text).collect();
        let mut label = match bare {
            _ if !frames.is_empty() => cut(frames),
            Bare::ReducedGradient => "gradient reduced to its parameter's shape".to_owned(),
            Bare::Engine => "(autograd's engine, no code of the program in the stack)".to_owned(),
            Bare::Other => "(no code of the program in the stack)".to_owned(),
        };
        let called: Vec<String> = library.iter().take(shown.library).map(text).collect();
        if !called.is_empty() {
            label += &format!(", in {}", cut(called));
        }
        match self.category(caller) {
            // The category activations is not shown, because most rows of a training program have it.
            Category::Unknown | Category::Activations => label,
            category => format!("{label} [{}]", category.name()),
        }
    }

    /// Formats a frame.
    fn text(&self, number: u32, files: &Files<'_>) -> String {
        match self.short_frame(number, files) {
            Frame { file: "", function, .. } => function.to_owned(),
            Frame { file, line, function } => format!("{file}:{line} {function}"),
        }
    }

    /// Returns a frame as labels show it. Omits folders that are not needed to identify the frame's file.
    /// Frames of compiled code have no file and no line.
    fn short_frame(&self, number: u32, files: &Files<'_>) -> Frame<'a> {
        let frame = self.frame(number);
        let file = match self.kind(number) {
            FrameKind::Program => program_file(&frame, files),
            FrameKind::Library => frame.library_file(),
            FrameKind::Compiled | FrameKind::Runtime(_) => {
                let function = frame.backward_node().unwrap_or(frame.short_function());
                return Frame { file: "", line: 0, function };
            }
        };
        Frame { file, ..frame }
    }

    /// Returns all frames as labels show them, by their numbers.
    pub(crate) fn short_frames(&self) -> Vec<Frame<'a>> {
        let files = self.program_files();
        // Many frames share a file, so the short path of each file is determined once.
        let mut short_files: HashMap<(&str, bool), &str> = HashMap::new();
        let short = |number| {
            let (frame, kind) = (self.frame(number), self.kind(number));
            if !matches!(kind, FrameKind::Program | FrameKind::Library) {
                return self.short_frame(number, &files);
            }
            let short = short_files.entry((frame.file, kind == FrameKind::Program));
            let file = *short.or_insert_with(|| self.short_frame(number, &files).file);
            Frame { file, ..frame }
        };
        (0..self.stacks.frame_count()).map(short).collect()
    }

    /// Returns the paths of the program's own files, grouped by file name.
    pub(crate) fn program_files(&self) -> Files<'a> {
        let mut files = Files::new();
        let numbers =
            (0..self.stacks.frame_count()).filter(|&n| self.kind(n) == FrameKind::Program);
        let mut known = HashSet::new();
        for frame in numbers.map(|number| self.frame(number)) {
            if known.insert(frame.file) {
                files.entry(frame.base_name()).or_default().push(frame.file);
            }
        }
        files
    }
}

/// The paths of the program's own files, by file name.
pub(crate) type Files<'a> = HashMap<&'a str, Vec<&'a str>>;

/// The numbers of frames in a label.
#[derive(Clone, Copy, Debug)]
struct Shown {
    chain: usize,
    library: usize,
}

impl Default for Shown {
    fn default() -> Self {
        Self { chain: FRAMES_LEAST, library: 1 }
    }
}

/// Returns the shortest end of the path that no other file of the program has. Returns the whole path if
/// too many files have the same name.
fn program_file<'a>(frame: &Frame<'a>, files: &Files<'_>) -> &'a str {
    let others = files.get(frame.base_name()).map_or(&[][..], Vec::as_slice);
    if others.len() > FILES_MOST {
        return frame.file;
    }
    let is_alone = |end: &&str| {
        let has_end =
            |file: &&&str| file.strip_suffix(end).is_some_and(|s| s.is_empty() || s.ends_with('/'));
        others.iter().filter(has_end).count() <= 1
    };
    let starts = frame.file.rmatch_indices('/').map(|(at, _)| &frame.file[at + 1..]);
    starts.into_iter().find(is_alone).unwrap_or(frame.file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc_recording::{Limits, reader};

    /// Returns the stacks of a recording with these frames, `file:line function`, innermost first.
    fn stacks(recorded: &[&[&str]]) -> Stacks {
        let frame = |text: &&str| {
            let (file, rest) = text.split_once(':').unwrap();
            let (line, function) = rest.split_once(' ').unwrap();
            format!(r#"{{"filename":"{file}","line":{line},"name":"{function}"}}"#)
        };
        let event = |(at, frames): (usize, &&[&str])| {
            let frames: Vec<String> = frames.iter().map(frame).collect();
            let (place, frames) = ((at + 1) << 20, frames.join(","));
            format!(
                r#"{{"action":"alloc","addr":{place},"size":512,"stream":0,"frames":[{frames}]}}"#
            )
        };
        let events: Vec<String> = recorded.iter().enumerate().map(event).collect();
        let json = format!(r#"{{"segments":[],"device_traces":[[{}]]}}"#, events.join(","));
        reader::read_bytes("made", json.as_bytes(), &Limits::default(), None).unwrap().stacks
    }

    /// Returns the labels of the callers. Consecutive stacks with the same caller give one label.
    fn labels(recorded: &[&[&str]]) -> Vec<String> {
        let stacks = stacks(recorded);
        let callers = Callers::of(&stacks, Compared::Code);
        let mut numbers: Vec<u32> = stacks.ids().map(|id| callers.of_stack(id)).collect();
        numbers.dedup();
        callers.labels(&numbers)
    }

    const UNWIND: &str = "??:0 torch::unwind::unwind()";
    const EVAL: &str = "??:0 _PyEval_EvalFrameDefault";
    const CALL: &str = "/v/lib/python3.12/site-packages/torch/nn/modules/module.py:1790 _call_impl";

    #[test]
    fn stacks_that_differ_in_machinery_have_one_caller() {
        let einsum = "/v/lib/python3.12/site-packages/einops/einops.py:939 einsum";
        let torch = "/v/lib/python3.12/site-packages/torch/functional.py:373 einsum";
        let bmm = "??:0 at::native::bmm(at::Tensor const&)";
        let (forward, main) = ("/me/model/model.py:39 forward", "/me/train.py:9 main");
        let labels = labels(&[
            &[UNWIND, bmm, torch, einsum, forward, EVAL, CALL, main],
            &[UNWIND, torch, einsum, EVAL, forward, CALL, CALL, main],
        ]);
        assert_eq!(
            labels,
            ["model.py:39 forward < train.py:9 main, in einops/einops.py:939 einsum"]
        );
    }

    #[test]
    fn models_of_packages_are_distinguished_by_the_packages_frames() {
        let (conv, relu) = (
            "/v/site-packages/torch/nn/modules/conv.py:554 forward",
            "/v/lib/python3.12/enum.py:1 x",
        );
        let block = |line| format!("/v/site-packages/vision/resnet.py:{line} forward");
        let (first, second) = (block(154), block(155));
        let stage = |line| format!("/v/site-packages/vision/resnet.py:{line} stage");
        let (one, two) = (stage(1), stage(2));
        let main = "train.py:25 main";
        let labels = labels(&[
            &[conv, &first, CALL, &one, main],
            &[relu, &first, &one, main],
            &[conv, &second, &one, main],
            &[conv, &first, &two, main],
        ]);
        assert_eq!(
            labels,
            [
                "train.py:25 main, in vision/resnet.py:154 forward < vision/resnet.py:1 stage",
                "train.py:25 main, in vision/resnet.py:155 forward",
                "train.py:25 main, in vision/resnet.py:154 forward < vision/resnet.py:2 stage",
            ]
        );
    }

    #[test]
    fn a_label_has_as_many_frames_as_distinguish_callers() {
        let main = "train.py:9 main";
        let deep = |line| {
            let last = format!("train.py:{line} main");
            ["a.py:1 f", "a.py:2 g", "a.py:3 h", "a.py:4 i", "a.py:5 j", last.as_str()]
                .map(str::to_owned)
        };
        let (first, second) = (deep(7), deep(8));
        let (first, second) =
            (first.each_ref().map(|f| f.as_str()), second.each_ref().map(|f| f.as_str()));
        let labels = labels(&[
            &["m.py:1 linear", "m.py:10 q", main],
            &["m.py:1 linear", "m.py:11 k", main],
            &first,
            &second,
        ]);
        assert_eq!(labels[..2], ["m.py:1 linear < m.py:10 q", "m.py:1 linear < m.py:11 k"]);
        assert_eq!(labels[2], "a.py:1 f < a.py:2 g < .. < train.py:7 main");
        assert_eq!(labels[3], "a.py:1 f < a.py:2 g < .. < train.py:8 main");
    }

    #[test]
    fn files_of_the_program_are_shown_without_the_folders_that_they_share() {
        let labels =
            labels(&[&["/me/one/model.py:1 f"], &["/me/two/model.py:1 f"], &["/me/x/loss.py:2 g"]]);
        assert_eq!(labels, ["one/model.py:1 f", "two/model.py:1 f", "loss.py:2 g"]);
    }

    #[test]
    fn without_code_of_the_program_the_library_the_node_or_the_operator_is_the_caller() {
        let node =
            "??:0 torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)";
        let grad = "??:0 torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)";
        let engine = "??:0 torch::autograd::Engine::thread_main(std::shared_ptr<X> const&)";
        let labels = labels(&[
            &[UNWIND, "/v/site-packages/trainer/loop.py:8 step", EVAL],
            &[UNWIND, "/v/site-packages/torch/nn/modules/linear.py:134 forward", EVAL],
            &[UNWIND, "??:0 at::native::mul(at::Tensor const&)", node, engine],
            &[UNWIND, grad, engine],
            &[UNWIND, "main.cpp:0 at::native::mul(at::Tensor const&)", "main.cpp:0 run()"],
            &[UNWIND, engine],
            &[UNWIND, engine, "??:0 __xmknodat"],
            &[UNWIND],
            &[UNWIND, "??:0 layer", "??:0 worker", "??:0 start_thread", "??:0 clone3"],
        ]);
        assert_eq!(
            labels,
            [
                "trainer/loop.py:8 step",
                "torch/nn/modules/linear.py:134 forward",
                "MulBackward0 [backward pass]",
                "AccumulateGrad [gradients]",
                "mul < run",
                "(autograd's engine, no code of the program in the stack) [backward pass]",
                "(no code of the program in the stack)",
                "layer < worker",
            ]
        );
    }

    #[test]
    fn a_gradient_reduced_by_the_engine_is_named_whatever_names_libc_gives_to_threads() {
        let reduce = "??:0 torch::autograd::InputMetadata::reduce_grad(at::Tensor&) const";
        let validate = "engine.cpp:0 void torch::autograd::validate_outputs_impl<X>(int)";
        let sum_to = "??:0 at::sum_to(at::Tensor, c10::ArrayRef<long>)";
        let sum = "??:0 at::native::sum(at::Tensor const&)";
        let engine = "??:0 torch::autograd::Engine::thread_main(std::shared_ptr<X> const&)";
        let (routine, clone) = ("thread.o:0 execute_native_thread_routine", "??:0 __nss_passwd");
        let labels = labels(&[
            &[UNWIND, sum, reduce, validate, engine, routine, "??:0 __sigsetjmp", clone],
            &[UNWIND, sum, sum_to, validate, engine, routine, "??:0 __sigsetjmp", clone],
            &[UNWIND, engine, "??:0 BaseThreadInitThunk", "??:0 RtlUserThreadStart"],
        ]);
        assert_eq!(
            labels,
            [
                "gradient reduced to its parameter's shape [gradients]",
                "(autograd's engine, no code of the program in the stack) [backward pass]",
            ]
        );
    }

    #[test]
    fn categories_are_named_where_the_frames_leave_no_doubt() {
        let torch = |rest: &str| format!("/v/lib/python3.12/site-packages/torch/{rest}");
        let (adam, module) =
            (torch("optim/adam.py:170 _init_group"), torch("nn/modules/module.py:1351 convert"));
        let labels = labels(&[&[&adam, "train.py:5 step"], &[&module, "train.py:2 main"]]);
        assert!(labels[0].ends_with("[optimizer state]"), "{labels:?}");
        assert!(labels[1].ends_with("[parameters and buffers]"), "{labels:?}");
    }

    #[test]
    fn with_all_frames_every_stack_is_a_caller() {
        let stacks = stacks(&[&[UNWIND, "m.py:1 f"], &[UNWIND, EVAL, "m.py:1 f"]]);
        let numbers = |compared| {
            let callers = Callers::of(&stacks, compared);
            stacks.ids().map(|id| callers.of_stack(id)).collect::<Vec<u32>>()
        };
        assert_eq!(numbers(Compared::Code), [0, 0]);
        assert_eq!(numbers(Compared::AllFrames), [0, 1]);
    }
}
