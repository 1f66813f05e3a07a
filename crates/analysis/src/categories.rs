//! The purpose of a block, derived from the stack that requested the block.
//!
//! [`RULES`] lists functions that show the category of a request. A stack without any of these functions is
//! [`Category::Unknown`]. Sizes, ages and names of the program's own functions are not used.

use stratalloc_recording::Frame;

/// The purpose of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters and buffers of modules.
    Parameters,
    /// Gradients of parameters, and the gradient with which a backward pass begins.
    Gradients,
    /// Tensors that an optimizer keeps between its steps.
    OptimizerState,
    /// Other requests of an optimizer's step.
    OptimizerStep,
    /// Requests of a module's forward pass.
    Activations,
    /// Copies of tensors in the type that autocast chooses for an operator.
    AutocastCopies,
    /// Requests of a node of the backward pass.
    BackwardPass,
    /// Scratch memory of cuBLAS, cuBLASLt and cuDNN.
    Workspace,
    /// Requests of CuPy.
    CuPy,
    /// Requests of RMM, and of libraries that allocate through it.
    Rmm,
    /// Requests of Numba.
    Numba,
    /// Requests of ONNX Runtime.
    OnnxRuntime,
    /// Requests of TensorRT.
    TensorRt,
    /// The stack has none of the listed functions, or no stack was recorded.
    #[default]
    Unknown,
}

use Category::{
    Activations, AutocastCopies, BackwardPass, CuPy, Gradients, Numba, OnnxRuntime, OptimizerState,
    OptimizerStep, Parameters, Rmm, TensorRt, Workspace,
};

/// A pattern that recognises the frame of a listed function.
#[derive(Clone, Copy, Debug)]
enum RuleMark {
    /// A Python function of this name, in a file whose path contains the second text.
    Python(&'static str, &'static str),
    /// A compiled function of this name, compared without namespaces, parameters and template arguments.
    Compiled(&'static str),
    /// The node of the backward pass with this name.
    Node(&'static str),
    /// Any node of the backward pass.
    AnyNode,
    /// A compiled function whose name contains this text.
    Within(&'static str),
    /// A scope of this name (`Context::scope`).
    Scope(&'static str),
}

use RuleMark::{AnyNode, Compiled, Node, Python, Scope, Within};

/// The listed functions. If a stack matches several rows, the first row counts. For example, a workspace
/// that is requested in a forward pass is a workspace. A forward pass that activation checkpointing
/// recomputes within the backward pass counts as backward pass.
///
/// The name of another library is a scope where this library gathers the stacks. Where PyTorch gathers
/// them, they have the function of this library that the other one called.
const RULES: &[(Category, RuleMark)] = &[
    (CuPy, Scope("CuPy")),
    (CuPy, Compiled("stratalloc_cupy_malloc")),
    (Rmm, Scope("RMM")),
    (Rmm, Python("stratalloc/rmm.py", "allocate")),
    (Numba, Scope("Numba")),
    (Numba, Python("stratalloc/numba.py", "memalloc")),
    (OnnxRuntime, Scope("ONNX Runtime")),
    (OnnxRuntime, Compiled("stratalloc_onnxruntime_alloc")),
    (TensorRt, Scope("TensorRT")),
    (TensorRt, Python("stratalloc/tensorrt.py", "allocate_async")),
    (Workspace, Compiled("getNewWorkspace")),
    (Workspace, Compiled("getCurrentCUDABlasHandle")),
    (Workspace, Compiled("getCUDABlasLtWorkspace")),
    (Workspace, Compiled("CublasLtWorkspace")),
    (Workspace, Compiled("run_conv_plan")),
    (AutocastCopies, Within("at::autocast::cached_cast")),
    (AutocastCopies, Python("torch/amp/autocast_mode.py", "_cast")),
    (AutocastCopies, Python("torch/cuda/amp/autocast_mode.py", "_cast")),
    (OptimizerState, Python("torch/optim/", "_init_group")),
    (OptimizerStep, Python("torch/optim/optimizer.py", "wrapper")),
    (Parameters, Python("torch/nn/modules/module.py", "convert")),
    (Parameters, Python("torch/nn/modules/", "__init__")),
    (Gradients, Node("AccumulateGrad")),
    (Gradients, Python("torch/autograd/__init__.py", "_make_grads")),
    (Gradients, Within("torch::autograd::validate_outputs")),
    (BackwardPass, AnyNode),
    (BackwardPass, Within("torch::autograd::Engine::")),
    (Activations, Python("torch/nn/modules/module.py", "_call_impl")),
];

impl Category {
    /// Every category, in the order in which tables show them.
    pub const ALL: [Self; 14] = [
        Parameters,
        Gradients,
        OptimizerState,
        OptimizerStep,
        Activations,
        AutocastCopies,
        BackwardPass,
        Workspace,
        CuPy,
        Rmm,
        Numba,
        OnnxRuntime,
        TensorRt,
        Self::Unknown,
    ];

    /// Returns the index of the first row of [`RULES`] that matches the frame.
    pub(super) fn rule_of(frame: &Frame<'_>) -> Option<u8> {
        let place = RULES.iter().position(|(_, mark)| mark.is_on(frame))?;
        u8::try_from(place).ok()
    }

    /// Returns the category of a stack. `rules` has the result of [`rule_of`](Self::rule_of) for each
    /// frame.
    pub(super) fn of_rules(rules: impl Iterator<Item = Option<u8>>) -> Self {
        let first = rules.flatten().min();
        first.map_or(Self::Unknown, |place| RULES[usize::from(place)].0)
    }

    /// Returns the name, as tables and JSON show it.
    pub fn name(self) -> &'static str {
        match self {
            Parameters => "parameters and buffers",
            Gradients => "gradients",
            OptimizerState => "optimizer state",
            OptimizerStep => "optimizer step",
            Activations => "activations",
            AutocastCopies => "copies of autocast",
            BackwardPass => "backward pass",
            Workspace => "workspace",
            CuPy => "CuPy",
            Rmm => "RMM",
            Numba => "Numba",
            OnnxRuntime => "ONNX Runtime",
            TensorRt => "TensorRT",
            Self::Unknown => "unknown",
        }
    }
}

impl RuleMark {
    fn is_on(self, frame: &Frame<'_>) -> bool {
        match self {
            Python(file, function) => frame.function == function && frame.is_in(file),
            Compiled(name) => !frame.file.ends_with(".py") && frame.short_function() == name,
            Within(text) => frame.function.contains(text),
            Node(name) => frame.backward_node() == Some(name),
            AnyNode => frame.backward_node().is_some(),
            Scope(name) => frame.file == "scope" && frame.function == name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One frame (file, function) for each row of [`RULES`], as snapshots record it, in the same order.
    const RECORDED: &[(&str, &str)] = &[
        ("scope", "CuPy"),
        ("??", "stratalloc_cupy_malloc"),
        ("scope", "RMM"),
        ("/v/site-packages/stratalloc/rmm.py", "allocate"),
        ("scope", "Numba"),
        ("/v/site-packages/stratalloc/numba.py", "memalloc"),
        ("scope", "ONNX Runtime"),
        ("??", "stratalloc_onnxruntime_alloc"),
        ("scope", "TensorRT"),
        ("/v/site-packages/stratalloc/tensorrt.py", "allocate_async"),
        ("CublasHandlePool.cpp", "at::cuda::(anonymous namespace)::getNewWorkspace()"),
        ("??", "at::cuda::getCurrentCUDABlasHandle()"),
        ("??", "at::cuda::getCUDABlasLtWorkspace()"),
        (
            "CUDABlas.cpp",
            "at::cuda::blas::(anonymous namespace)::CublasLtWorkspace::CublasLtWorkspace()",
        ),
        (
            "Conv_v8.cpp",
            "at::native::(anonymous namespace)::run_conv_plan(cudnnContext*, at::Tensor const&)",
        ),
        ("??", "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)"),
        ("/v/site-packages/torch/amp/autocast_mode.py", "_cast"),
        ("C:/v/Lib/site-packages/torch/cuda/amp/autocast_mode.py", "_cast"),
        ("/v/site-packages/torch/optim/adam.py", "_init_group"),
        ("/v/site-packages/torch/optim/optimizer.py", "wrapper"),
        ("/v/site-packages/torch/nn/modules/module.py", "convert"),
        ("/v/site-packages/torch/nn/modules/linear.py", "__init__"),
        ("??", "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"),
        ("/v/site-packages/torch/autograd/__init__.py", "_make_grads"),
        ("", "void torch::autograd::validate_outputs_impl<torch::autograd::Edge>(int)"),
        ("??", "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"),
        ("??", "torch::autograd::Engine::thread_main(std::shared_ptr<X> const&)"),
        ("/v/site-packages/torch/nn/modules/module.py", "_call_impl"),
    ];

    #[test]
    fn each_function_of_the_table_is_recognised_and_names_its_category() {
        assert_eq!(RECORDED.len(), RULES.len());
        for (at, (file, function)) in RECORDED.iter().enumerate() {
            let rule = Category::rule_of(&Frame { file, line: 1, function });
            assert_eq!(rule.map(usize::from), Some(at), "{file} {function}");
            assert_eq!(Category::of_rules([None, rule].into_iter()), RULES[at].0);
        }
    }

    #[test]
    fn the_programs_own_functions_have_no_category_by_their_names() {
        for (file, function) in [
            ("/me/model.py", "_init_group"),
            ("/me/model.py", "__init__"),
            ("/me/train.py", "getNewWorkspace"),
            ("??", "at::native::mul(at::Tensor const&)"),
        ] {
            assert_eq!(Category::rule_of(&Frame { file, line: 1, function }), None, "{function}");
        }
        assert_eq!(Category::of_rules([None].into_iter()), Category::Unknown);
    }

    #[test]
    fn a_workspace_in_a_forward_pass_is_a_workspace() {
        let of =
            |(file, function): (&str, &str)| Category::rule_of(&Frame { file, line: 1, function });
        let rules = [of(("/v/torch/nn/modules/module.py", "_call_impl")), of(RECORDED[11])];
        assert_eq!(Category::of_rules(rules.into_iter()), Workspace);
    }
}
