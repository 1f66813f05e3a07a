//! The purpose of a block, derived from the stack that requested the block, and from the block's life.
//!
//! [`RULES`] lists functions that show the category of a request. A stack without any of these functions is
//! [`Category::Unknown`]. The life of a block then refines the category ([`Category::with`]): a gradient
//! lives on after the backward pass that requested it. Sizes, ages and names of the program's own functions
//! are not used.

use super::passes::Fate;
use stratalloc_recording::Frame;

/// The purpose of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters and buffers of modules.
    Parameters,
    /// Tensors read from a file, whatever they are for.
    LoadedFile,
    /// Gradients of parameters, and the gradient with which a backward pass begins.
    Gradients,
    /// Tensors that an optimizer keeps between its steps.
    OptimizerState,
    /// Other requests of an optimizer's step.
    OptimizerStep,
    /// Requests of a module's forward pass.
    Activations,
    /// Those that autograd freed in the backward pass.
    ActivationsKept,
    /// Requests of a pass that were freed in it.
    Temporary,
    /// Requests of a module's forward pass that a backward pass repeats.
    Recomputed,
    /// Copies of tensors in the type that autocast chooses for an operator.
    AutocastCopies,
    /// Requests of a node of the backward pass.
    BackwardPass,
    /// Buckets of gradients, gathered parameters and other buffers of collectives.
    Communication,
    /// Keys and values of attention, kept between the tokens of a sequence.
    KvCache,
    /// Scratch memory of cuBLAS, cuBLASLt, cuDNN and MIOpen.
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
    Activations, ActivationsKept, AutocastCopies, BackwardPass, Communication, CuPy, Gradients,
    KvCache, LoadedFile, Numba, OnnxRuntime, OptimizerState, OptimizerStep, Parameters, Recomputed,
    Rmm, Temporary, TensorRt, Workspace,
};

/// A pattern that recognises the frame of a listed function.
#[derive(Clone, Copy, Debug)]
enum RuleMark {
    /// A Python function of this name, in a file whose path contains the second text.
    Python(&'static str, &'static str),
    /// Any Python function in this file.
    InFile(&'static str),
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

use RuleMark::{AnyNode, Compiled, InFile, Node, Python, Scope, Within};

/// The listed functions. If a stack matches several rows, the first row counts. For example, a workspace
/// that is requested in a forward pass is a workspace. A forward pass that activation checkpointing repeats
/// within the backward pass has nodes of that pass in its stack: see [`Category::of_rules`].
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
    (Workspace, Within("at::native::(anonymous namespace)::Workspace::Workspace")),
    (Workspace, Within("at::native::Workspace::Workspace")),
    (Communication, Within("c10d::")),
    (Communication, InFile("torch/distributed/distributed_c10d.py")),
    (Communication, InFile("torch/distributed/_functional_collectives.py")),
    (Communication, Python("torch/nn/parallel/distributed.py", "_ddp_init_helper")),
    (Communication, Python("torch/distributed/fsdp/", "_alloc_padded_unsharded_flat_param")),
    (Communication, Python("torch/distributed/", "foreach_all_gather")),
    (Communication, Python("torch/distributed/", "init_all_gather_outputs")),
    (Communication, Python("torch/distributed/", "alloc_all_gather_outputs")),
    (AutocastCopies, Within("at::autocast::cached_cast")),
    (AutocastCopies, Python("torch/amp/autocast_mode.py", "_cast")),
    (AutocastCopies, Python("torch/cuda/amp/autocast_mode.py", "_cast")),
    (KvCache, InFile("transformers/cache_utils.py")),
    (KvCache, Python("vllm/", "_allocate_kv_cache_tensors")),
    (KvCache, Python("vllm/", "_allocate_kv_cache")),
    (KvCache, InFile("sglang/srt/mem_cache/memory_pool.py")),
    (OptimizerState, Python("torch/optim/", "_init_group")),
    (OptimizerState, Python("bitsandbytes/optim/", "get_state_buffer")),
    (OptimizerState, Python("bitsandbytes/optim/", "init_state")),
    (Parameters, Python("torch/nn/modules/module.py", "_apply")),
    (Parameters, Python("torch/nn/modules/module.py", "convert")),
    (Parameters, Python("torch/nn/modules/", "__init__")),
    (Parameters, InFile("torch/nn/parameter.py")),
    (Parameters, Python("torch/distributed/fsdp/", "flatten_tensors")),
    (Parameters, Python("torch/distributed/fsdp/", "shard")),
    (Parameters, Python("torch/distributed/", "_init_sharded_param")),
    (Parameters, Python("transformers/modeling_utils.py", "from_pretrained")),
    (Parameters, Python("diffusers/models/modeling_utils.py", "from_pretrained")),
    (Parameters, Python("accelerate/utils/modeling.py", "set_module_tensor_to_device")),
    (Parameters, Python("safetensors/torch.py", "load_model")),
    (LoadedFile, Python("safetensors/torch.py", "load_file")),
    (LoadedFile, Python("torch/serialization.py", "load")),
    (Gradients, Node("AccumulateGrad")),
    (Gradients, Python("torch/autograd/__init__.py", "_make_grads")),
    (Gradients, Within("torch::autograd::validate_outputs")),
    (BackwardPass, AnyNode),
    (BackwardPass, Within("torch::autograd::Engine::")),
    (BackwardPass, Python("torch/autograd/graph.py", "_engine_run_backward")),
    (Activations, Python("torch/nn/modules/module.py", "_call_impl")),
    // An optimizer's step may run a whole forward pass (a closure), so that is recognised before.
    (OptimizerStep, Python("torch/optim/optimizer.py", "wrapper")),
];

impl Category {
    /// Every category, in the order in which tables show them.
    pub const ALL: [Self; 20] = [
        Parameters,
        LoadedFile,
        Gradients,
        OptimizerState,
        OptimizerStep,
        ActivationsKept,
        Activations,
        Recomputed,
        AutocastCopies,
        BackwardPass,
        Temporary,
        Communication,
        KvCache,
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
    /// frame, innermost first.
    pub(super) fn of_rules(rules: impl Iterator<Item = Option<u8>> + Clone) -> Self {
        let of = |place: u8| RULES[usize::from(place)].0;
        let first = rules.clone().flatten().min().map_or(Self::Unknown, of);
        // A repeated forward pass may contain the whole backward pass of a part: then the node is further in.
        let is_pass = |category: &Self| matches!(category, Activations | BackwardPass);
        match first {
            BackwardPass if rules.flatten().map(of).find(is_pass) == Some(Activations) => {
                Recomputed
            }
            first => first,
        }
    }

    /// Returns the category of a block, from that of its request and from its life.
    pub(super) fn with(self, fate: Fate) -> Self {
        match (self, fate) {
            (Activations | Self::Unknown, Fate::FreedByBackward) => ActivationsKept,
            (Activations, Fate::FreedBeforeBackward) => Temporary,
            // The engine sums a gradient to the shape of its tensor, and the kernel may need scratch memory.
            (Gradients | BackwardPass | OptimizerStep, Fate::FreedInPass) => Temporary,
            (BackwardPass, Fate::OutlivesPass) => Gradients,
            (OptimizerStep, Fate::OutlivesPass) => OptimizerState,
            _ => self,
        }
    }

    /// Returns the name, as tables and JSON show it.
    pub fn name(self) -> &'static str {
        match self {
            Parameters => "parameters and buffers",
            LoadedFile => "loaded from a file",
            Gradients => "gradients",
            OptimizerState => "optimizer state",
            OptimizerStep => "optimizer step",
            Activations => "activations",
            ActivationsKept => "activations kept for the backward pass",
            Recomputed => "activations recomputed in the backward pass",
            Temporary => "temporary",
            AutocastCopies => "copies of autocast",
            BackwardPass => "backward pass",
            Communication => "communication buffers",
            KvCache => "KV cache",
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
            InFile(file) => frame.is_in(file),
            Compiled(name) => !frame.file.ends_with(".py") && frame.short_function() == name,
            Within(text) => frame.function.contains(text),
            Node(name) => frame.backward_node() == Some(name),
            AnyNode => frame.backward_node().is_some(),
            Scope(name) => frame.file == "scope" && frame.function == name,
        }
    }
}

/// Returns true if the frame is of autograd's engine, which runs a backward pass.
pub(super) fn is_of_engine(frame: &Frame<'_>) -> bool {
    RULES.iter().any(|(category, mark)| *category == BackwardPass && mark.is_on(frame))
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
        ("??", "at::native::(anonymous namespace)::Workspace::Workspace(unsigned long)"),
        ("??", "at::native::Workspace::Workspace(unsigned long)"),
        ("??", "c10d::Reducer::initialize_buckets(std::vector<X>&&)"),
        ("/v/site-packages/torch/distributed/distributed_c10d.py", "_object_to_tensor"),
        ("/v/site-packages/torch/distributed/_functional_collectives.py", "all_gather_tensor"),
        ("/v/site-packages/torch/nn/parallel/distributed.py", "_ddp_init_helper"),
        (
            "/v/site-packages/torch/distributed/fsdp/_flat_param.py",
            "_alloc_padded_unsharded_flat_param",
        ),
        ("/v/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather"),
        ("/v/torch/distributed/_composable/fsdp/_fsdp_param.py", "init_all_gather_outputs"),
        ("/v/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "alloc_all_gather_outputs"),
        ("??", "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)"),
        ("/v/site-packages/torch/amp/autocast_mode.py", "_cast"),
        ("C:/v/Lib/site-packages/torch/cuda/amp/autocast_mode.py", "_cast"),
        ("/v/site-packages/transformers/cache_utils.py", "update"),
        ("/v/site-packages/vllm/v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors"),
        ("/v/site-packages/vllm/worker/cache_engine.py", "_allocate_kv_cache"),
        ("/v/site-packages/sglang/srt/mem_cache/memory_pool.py", "_create_buffers"),
        ("/v/site-packages/torch/optim/adam.py", "_init_group"),
        ("/v/site-packages/bitsandbytes/optim/optimizer.py", "get_state_buffer"),
        ("/v/site-packages/bitsandbytes/optim/optimizer.py", "init_state"),
        ("/v/site-packages/torch/nn/modules/module.py", "_apply"),
        ("/v/site-packages/torch/nn/modules/module.py", "convert"),
        ("/v/site-packages/torch/nn/modules/linear.py", "__init__"),
        ("/v/site-packages/torch/nn/parameter.py", "__deepcopy__"),
        ("/v/site-packages/torch/distributed/fsdp/_flat_param.py", "flatten_tensors"),
        ("/v/site-packages/torch/distributed/fsdp/_flat_param.py", "shard"),
        ("/v/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "_init_sharded_param"),
        ("/v/site-packages/transformers/modeling_utils.py", "from_pretrained"),
        ("/v/site-packages/diffusers/models/modeling_utils.py", "from_pretrained"),
        ("/v/site-packages/accelerate/utils/modeling.py", "set_module_tensor_to_device"),
        ("/v/site-packages/safetensors/torch.py", "load_model"),
        ("/v/site-packages/safetensors/torch.py", "load_file"),
        ("/v/site-packages/torch/serialization.py", "load"),
        ("??", "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"),
        ("/v/site-packages/torch/autograd/__init__.py", "_make_grads"),
        ("", "void torch::autograd::validate_outputs_impl<torch::autograd::Edge>(int)"),
        ("??", "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"),
        ("??", "torch::autograd::Engine::thread_main(std::shared_ptr<X> const&)"),
        ("/v/site-packages/torch/autograd/graph.py", "_engine_run_backward"),
        ("/v/site-packages/torch/nn/modules/module.py", "_call_impl"),
        ("/v/site-packages/torch/optim/optimizer.py", "wrapper"),
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
    fn a_forward_pass_within_the_backward_pass_is_recomputed() {
        let rule = |(file, function)| Category::rule_of(&Frame { file, line: 1, function });
        let module = rule(("/v/torch/nn/modules/module.py", "_call_impl"));
        let node = rule(("??", "torch::autograd::generated::MulBackward0::apply(int)"));
        let engine = rule(("??", "torch::autograd::Engine::thread_main(int)"));
        assert_eq!(Category::of_rules([None, module, node, engine].into_iter()), Recomputed);
        assert_eq!(Category::of_rules([node, module, engine].into_iter()), BackwardPass);
        assert_eq!(Category::of_rules([module, None].into_iter()), Activations);
    }

    #[test]
    fn a_block_that_is_freed_in_its_pass_is_temporary_also_if_it_serves_a_gradient() {
        for category in [Gradients, BackwardPass, OptimizerStep] {
            assert_eq!(category.with(Fate::FreedInPass), Temporary);
        }
        assert_eq!(Gradients.with(Fate::OutlivesPass), Gradients);
        assert_eq!(Recomputed.with(Fate::FreedInPass), Recomputed);
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
