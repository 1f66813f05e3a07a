//! Separates the frames of a stack that belong to the program from those of PyTorch's and Python's
//! runtime.
//!
//! PyTorch records the stack of a request from its own unwinder outwards. The unwinder, the allocator, the
//! dispatcher, autograd's engine, Python's interpreter and generated wrappers occur in nearly every stack.
//! So they do not help to tell requests apart.
//!
//! [`COMPILED`] and [`PYTHON`] list the patterns of such frames. Frames of a library without a line table
//! have no file name, so most patterns match the function's name. PyTorch's own tools leave out some of the
//! same frames (`frameFilter` in torch/utils/viz/MemoryViz.js, `shouldOmitFrame` in
//! torch/csrc/autograd/python_anomaly_mode.cpp). Rows marked with (T) come from those two lists.

use super::stacks::Frame;

/// The kind of code that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// Python code of the program itself.
    Program,
    /// Python code of an installed package or of Python's standard library.
    Library,
    /// Compiled code outside the runtime: an operator, a node of the backward pass, an extension.
    Compiled,
    /// Code that occurs in the stack of nearly every request.
    Runtime(Runtime),
}

/// The parts of PyTorch, Python and the system that occur in the stack of nearly every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Runtime {
    /// The code that records the stack.
    Unwinder,
    /// The allocator, and the functions that create or resize a tensor's storage.
    Allocator,
    /// The dispatcher, the generated functions around it, and the code that prepares an operator's output.
    Dispatcher,
    /// Autograd's engine, and its functions around operators and nodes of the backward pass.
    Autograd,
    /// Python's interpreter.
    Interpreter,
    /// Generated functions between Python and C++, and Python functions that only forward a call.
    Wrapper,
    /// The start of a process or a thread, and functions without a name.
    System,
}

/// A pattern that recognises a frame of compiled code.
#[derive(Clone, Copy, Debug)]
enum Mark {
    /// The function's name starts with this text.
    Begins(&'static str),
    /// The function's name starts with this text and has no parameter list and no namespace, as in C.
    Plain(&'static str),
    /// The function's name, without parameters, contains this text.
    Has(&'static str),
    /// The function's name equals this text.
    Is(&'static str),
    /// The file's path contains this text.
    InFile(&'static str),
    /// The last component of the file's path starts with this text.
    FileBegins(&'static str),
}

use Mark::{Begins, FileBegins, Has, InFile, Is, Plain};
use Runtime::{Allocator, Autograd, Dispatcher, Interpreter, System, Unwinder, Wrapper};

/// Patterns of the runtime's compiled code. The first matching row decides.
const COMPILED: &[(Runtime, Mark)] = &[
    (Unwinder, Has("unwind::unwind")),            // (T)
    (Unwinder, Has("CapturedTraceback::gather")), // (T)
    (Unwinder, Has("gather_with_cpp")),           // (T)
    (Allocator, Has("CachingAllocator")),
    (Allocator, InFile("CachingAllocator")),
    (Allocator, Has("AllocatorMasqueradingAs")), // ROCm
    (Allocator, Begins("at::detail::empty_")),
    (Allocator, Has("at::detail::_empty_")),
    (Allocator, Begins("at::native::empty")),
    (Allocator, Begins("at::native::new_empty")),
    (Allocator, Begins("at::native::resize_")),
    (Allocator, Begins("at::empty")),
    (Dispatcher, Begins("at::_ops::")),
    (Dispatcher, Begins("at::redispatch::")),
    (Dispatcher, Begins("at::meta::")),
    (Dispatcher, Begins("at::autocast::")),
    (Dispatcher, Begins("at::TensorIterator")),
    (Dispatcher, Has("at::(anonymous namespace)::")),
    (Dispatcher, Has("c10::impl::")),
    (Dispatcher, Has("c10::Dispatcher::")),
    (Dispatcher, Has("c10::KernelFunction::")),
    (Dispatcher, Has("c10::BoxedKernel::")),
    (Dispatcher, InFile("core/boxing")), // (T)
    (Dispatcher, InFile("/Register")),   // (T)
    (Dispatcher, FileBegins("Register")),
    (Dispatcher, InFile("/Redispatch")), // (T)
    (Autograd, Has("torch::autograd::Engine::")),
    (Autograd, Has("PythonEngine::")),
    (Autograd, Has("torch::autograd::Node::operator()")),
    (Autograd, Has("torch::autograd::VariableType::")),
    (Autograd, Has("torch::ADInplaceOrView::")),
    (Autograd, Has("torch::autograd::generated::details::")),
    (Autograd, Has("torch::autograd::validate_outputs")),
    (Autograd, Has("torch::autograd::InputMetadata::")),
    (Autograd, Has("torch::autograd::SavedVariable::")),
    (Autograd, Has("torch::autograd::utils::")),
    (Autograd, Has("torch::autograd::AccumulateGrad::accumulateGrad")),
    (Autograd, Has("AccumulateGrad_apply_impl")),
    (Autograd, Has("_apply_functional")),
    (Autograd, Has("at::_sum_to")),
    (Autograd, Has("at::sum_to")),
    (Autograd, Begins("THPEngine_run_backward")),
    (Wrapper, Has("THPVariable_")),
    (Wrapper, Has("TypeError_to_NotImplemented_")),
    (Wrapper, Has("ConcretePyInterpreterVTable::")),
    (Wrapper, Begins("pybind11::")),
    (Wrapper, FileBegins("python_")),
    (Wrapper, FileBegins("VariableType")),
    (Interpreter, Plain("Py")), // (T) in part: PyEval_, PyObject_, PyFunction_
    (Interpreter, Plain("_Py")), // (T) in part
    (Interpreter, Begins("method_vectorcall")),
    (Interpreter, Begins("cfunction_")),
    (Interpreter, Begins("slot_tp_")),
    (Interpreter, Begins("slot_nb_")),
    (Interpreter, Begins("pymain_")),
    (Interpreter, Is("type_call")),
    (Interpreter, Is("run_mod")),
    (Interpreter, Is("run_eval_code_obj")),
    (Interpreter, InFile("pythonrun.c")),            // (T)
    (Interpreter, InFile("Modules/main.c")),         // (T)
    (Interpreter, InFile("Objects/call.c")),         // (T)
    (Interpreter, InFile("Objects/methodobject.c")), // (T)
    (Interpreter, InFile("Objects/typeobject.c")),
    (Interpreter, InFile("Objects/classobject.c")),
    (Interpreter, InFile("Objects/descrobject.c")),
    (Interpreter, InFile("Objects/funcobject.c")),
    (Interpreter, InFile("Objects/object.c")),
    (Interpreter, InFile("pycore_")), // (T) in part: pycore_ceval.h
    (Interpreter, InFile("ceval.c")), // (T)
    (Interpreter, InFile("cpython/abstract.h")), // (T)
    (System, Is("_start")),           // (T)
    (System, Begins("__libc_start")), // (T)
    (System, Is("__libc_init_first")),
    (System, Is("__clone")),
    (System, Is("clone")),
    (System, Is("clone3")),
    (System, Begins("start_thread")),
    (System, Begins("pthread_")),
    (System, Begins("__nptl_")),
    (System, Is("_pthread_start")),
    (System, Is("execute_native_thread_routine")),
    (System, Is("pythread_wrapper")),
    (System, Is("thread_run")),
    (System, Is("BaseThreadInitThunk")),
    (System, Is("RtlUserThreadStart")),
    (System, Begins("__scrt_common_main")),
    (System, Is("invoke_main")),
    // With exported symbols only, the start function of a libstdc++ thread resolves to this name.
    (System, Begins("std::error_code::default_error_condition")),
    (System, Is("")),
    (System, Is("??")),
];

/// Python functions that only forward a call: the end of the file's path, and the function.
const PYTHON: &[(Runtime, &str, &str)] = &[
    (Wrapper, "torch/nn/modules/module.py", "_call_impl"),
    (Wrapper, "torch/nn/modules/module.py", "_wrapped_call_impl"),
    (Wrapper, "torch/utils/_contextlib.py", "decorate_context"),
    (Wrapper, "torch/amp/autocast_mode.py", "decorate_autocast"),
    (Wrapper, "torch/optim/optimizer.py", "wrapper"),
    (Wrapper, "torch/optim/optimizer.py", "_use_grad"),
];

/// The beginnings of names that stand in place of a file for code from a prompt or a notebook.
const TYPED: &[&str] = &[
    "<ipython-input",
    "<python-input",
    "<timed ",
    "<magic-timeit",
    "<command-",
    "<console>",
    "<doctest ",
    "<stdin>",
    "<string>",
];

impl Mark {
    fn is_on(self, frame: &Frame<'_>) -> bool {
        match self {
            Begins(text) => frame.function.starts_with(text),
            Plain(text) => frame.function.starts_with(text) && !frame.function.contains(['(', ':']),
            Has(text) => frame.name().contains(text),
            Is(text) => frame.function == text,
            InFile(text) => frame.file.contains(text),
            FileBegins(text) => frame.base_name().starts_with(text),
        }
    }
}

impl<'a> Frame<'a> {
    /// Returns the kind of the frame. Python code belongs to the program, unless it is in a library's
    /// folder or only forwards a call. Every other frame is compiled code or part of the runtime.
    #[must_use]
    pub fn kind(&self) -> FrameKind {
        let is_source = [".py", ".pyw", ".ipynb"].iter().any(|end| self.file.ends_with(end));
        let is_typed = TYPED.iter().any(|begin| self.file.starts_with(begin));
        // Under Windows, the command of a package is a program with a Python file in it.
        if self.file.ends_with(".exe/__main__.py") {
            return FrameKind::Runtime(Wrapper);
        }
        if is_source || is_typed {
            let is_rule = |(_, file, function): &&(_, &str, &str)| {
                self.function == *function && self.ends_with(file)
            };
            return match PYTHON.iter().find(is_rule) {
                Some((part, ..)) => FrameKind::Runtime(*part),
                None if self.is_of_library() => FrameKind::Library,
                None => FrameKind::Program,
            };
        }
        if self.file.starts_with("<frozen ") {
            return FrameKind::Runtime(Interpreter);
        }
        match COMPILED.iter().find(|(_, mark)| mark.is_on(self)) {
            Some((part, _)) => FrameKind::Runtime(*part),
            None => FrameKind::Compiled,
        }
    }

    /// Returns the function's name up to its parameters. Other parentheses, such as those of lambdas and
    /// template arguments, may cut it earlier.
    fn name(&self) -> &'a str {
        let mut from = 0;
        while let Some(at) = self.function[from..].find('(').map(|at| from + at) {
            let (before, rest) = self.function.split_at(at);
            let is_name = rest.starts_with("(anonymous namespace)") || before.ends_with("operator");
            if !is_name {
                return before;
            }
            from = at + 1;
        }
        self.function
    }

    /// Returns the name of the backward-pass node that the frame runs, if any, such as `MulBackward0`.
    pub fn backward_node(&self) -> Option<&'a str> {
        let node = self.name().strip_suffix("::apply")?.rsplit("::").next()?;
        (node.contains("Backward") || node == "AccumulateGrad").then_some(node)
    }

    /// Returns the function's name without parameters, template arguments and namespaces.
    pub fn short_function(&self) -> &'a str {
        let name = self.name();
        let name = name.split('<').next().filter(|name| !name.is_empty()).unwrap_or(name);
        name.rsplit("::").next().unwrap_or(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One frame (file, function) for each row of [`COMPILED`], as PyTorch records it, in the same order.
    const RECORDED: &[(&str, &str)] = &[
        ("??", "torch::unwind::unwind()"),
        ("??", "torch::CapturedTraceback::gather(bool, bool, bool)"),
        ("memory_snapshot.cpp", "torch::cuda::(anonymous namespace)::gather_with_cpp()"),
        ("", "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate"),
        ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", "malloc"),
        ("", "c10::hip::HIPAllocatorMasqueradingAsCUDA::allocate(unsigned long)"),
        ("??", "at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)"),
        ("", "at::TensorBase at::detail::_empty_generic<long>(c10::ArrayRef<long>)"),
        ("??", "at::native::empty_strided_cuda"),
        ("??", "at::native::new_empty_symint"),
        ("??", "at::native::resize_bytes_cuda(c10::StorageImpl*, unsigned long)"),
        ("", "at::empty_strided"),
        ("??", "at::_ops::exp::call(at::Tensor const&)"),
        ("??", "at::redispatch::mul(c10::DispatchKeySet, at::Tensor const&)"),
        ("??", "at::meta::structured_max_dim::meta(at::Tensor const&, long, bool)"),
        ("??", "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)"),
        ("??", "at::TensorIteratorBase::allocate_or_resize_outputs()"),
        ("RegisterCUDA_0.cpp", "at::(anonymous namespace)::wrapper_CUDA_exp(at::Tensor const&)"),
        (
            "",
            "c10::impl::wrap_kernel_functor_unboxed_<at::Tensor (long)>::call(c10::OperatorKernel*)",
        ),
        ("??", "at::Tensor c10::Dispatcher::call<at::Tensor>"),
        (
            "KernelFunction_impl.h",
            "c10::KernelFunction::callBoxed(c10::OperatorHandle const&) const",
        ),
        ("??", "c10::BoxedKernel::callBoxed"),
        ("/pytorch/aten/src/ATen/core/boxing/KernelFunction_impl.h", "call"),
        ("/pytorch/build/aten/src/ATen/RegisterCUDA.cpp", "wrapper_mul"),
        ("RegisterCPU_2.cpp", "wrapper_mul"),
        ("/pytorch/build/aten/src/ATen/RedispatchFunctions.h", "mul"),
        ("??", "torch::autograd::Engine::thread_main"),
        ("", "torch::autograd::python::PythonEngine::thread_init"),
        ("", "torch::autograd::Node::operator()"),
        ("VariableType_0.cpp", "torch::autograd::VariableType::(anonymous namespace)::neg"),
        ("ADInplaceOrViewType_0.cpp", "torch::ADInplaceOrView::mul_out(at::Tensor&)"),
        ("", "torch::autograd::generated::details::_to_copy_backward"),
        ("engine.cpp", "void torch::autograd::validate_outputs_impl<torch::autograd::Edge>"),
        ("??", "torch::autograd::InputMetadata::reduce_grad(at::Tensor&) const"),
        ("??", "torch::autograd::SavedVariable::unpack"),
        ("", "torch::autograd::utils::clone_obey_contract"),
        ("", "void torch::autograd::AccumulateGrad::accumulateGrad<std::function<void "),
        (
            "accumulate_grad.cpp",
            "torch::autograd::(anonymous namespace)::AccumulateGrad_apply_impl",
        ),
        ("Functions.cpp", "torch::autograd::generated::NegViewBackward0_apply_functional"),
        ("", "at::Tensor at::_sum_to<c10::SymInt>"),
        ("", "at::sum_to(at::Tensor, c10::ArrayRef<long>)"),
        ("engine.cpp", "THPEngine_run_backward(_object*, _object*, _object*)"),
        ("python_variable.cpp", "THPVariable_dealloc(_object*)"),
        ("??", "_object* torch::autograd::TypeError_to_NotImplemented_<&mul>"),
        (
            "PyInterpreter.cpp",
            "torch::detail::(anonymous namespace)::ConcretePyInterpreterVTable::decref",
        ),
        ("pybind11.h", "pybind11::cpp_function::dispatcher(_object*, _object*, _object*)"),
        ("python_nn_functions.cpp", "THPLinear(_object*)"),
        ("VariableType_4.cpp", "mul(c10::DispatchKeySet)"),
        ("??", "Py_RunMain"),
        ("??", "_PyTuple_Resize"),
        ("??", "method_vectorcall_VARARGS_KEYWORDS"),
        ("??", "cfunction_call"),
        ("??", "slot_tp_call"),
        ("??", "slot_nb_multiply"),
        ("??", "pymain_run_python"),
        ("??", "type_call"),
        ("??", "run_mod"),
        ("??", "run_eval_code_obj"),
        ("Python/pythonrun.c", "simple_run"),
        ("Modules/main.c", "run_file"),
        ("/usr/src/python/Objects/call.c", "vectorcall"),
        ("Objects/methodobject.c", "call"),
        ("Objects/typeobject.c", "call"),
        ("Objects/classobject.c", "method"),
        ("Objects/descrobject.c", "get"),
        ("Objects/funcobject.c", "get"),
        ("Objects/object.c", "get"),
        ("Include/internal/pycore_call.h", "vectorcall_tstate"),
        ("Python/ceval.c", "eval"),
        ("Include/cpython/abstract.h", "vectorcall"),
        ("??", "_start"),
        ("??", "__libc_start_main"),
        ("??", "__libc_init_first"),
        ("??", "__clone"),
        ("??", "clone"),
        ("??", "clone3"),
        ("??", "start_thread"),
        ("??", "pthread_condattr_setpshared"),
        ("??", "__nptl_death_event"),
        ("??", "_pthread_start"),
        ("??", "execute_native_thread_routine"),
        ("??", "pythread_wrapper"),
        ("??", "thread_run"),
        ("??", "BaseThreadInitThunk"),
        ("??", "RtlUserThreadStart"),
        ("??", "__scrt_common_main_seh"),
        ("??", "invoke_main"),
        ("??", "std::error_code::default_error_condition() const"),
        ("??", ""),
        ("??", "??"),
    ];

    #[test]
    fn each_row_of_the_table_recognises_its_frame_and_no_row_is_without_one() {
        assert_eq!(RECORDED.len(), COMPILED.len());
        for (at, (file, function)) in RECORDED.iter().enumerate() {
            let frame = Frame { file, line: 0, function };
            let found = COMPILED.iter().position(|(_, mark)| mark.is_on(&frame));
            assert_eq!(found, Some(at), "{frame:?}");
            assert_eq!(frame.kind(), FrameKind::Runtime(COMPILED[at].0));
        }
        for (part, file, function) in PYTHON {
            let file = format!("/usr/lib/python3.12/site-packages/{file}");
            let frame = Frame { file: &file, line: 7, function };
            assert_eq!(frame.kind(), FrameKind::Runtime(*part));
            assert_eq!(Frame { function: "step", ..frame }.kind(), FrameKind::Library);
        }
    }

    #[test]
    fn operators_and_nodes_of_the_backward_pass_are_kept() {
        let kind = |function| Frame { file: "??", line: 0, function }.kind();
        for function in [
            "at::native::einsum(std::basic_string_view<char>, c10::ArrayRef<at::Tensor>)",
            "at::native::(anonymous namespace)::sort_kernel(c10::intrusive_ptr<c10::impl::X>)",
            "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)",
            "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)",
            "mine::attention(at::Tensor const&)",
            "PyramidPool::forward(at::Tensor const&)",
        ] {
            assert_eq!(kind(function), FrameKind::Compiled, "{function}");
        }
    }

    #[test]
    fn the_programs_own_code_is_recognised_by_its_folder() {
        let of = |file| Frame { file, line: 1, function: "f" }.kind();
        for own in [
            "train.py",
            "/home/me/lib/model.py",
            "<stdin>",
            "<python-input-0>",
            "a.ipynb",
            "<ipython-input-3>",
        ] {
            assert_eq!(of(own), FrameKind::Program, "{own}");
        }
        for library in [
            "python3.12/site-packages/torch/optim/sgd.py",
            "/usr/lib/python3/dist-packages/einops/einops.py",
            "/usr/lib/python3.12/threading.py",
            "/home/me/pytorch/torch/nn/modules/linear.py",
            "/tmp/torchinductor_me/ab/cab.py",
        ] {
            assert_eq!(of(library), FrameKind::Library, "{library}");
        }
        assert_eq!(of("module.cpp"), FrameKind::Compiled);
        assert_eq!(of("<frozen runpy>"), FrameKind::Runtime(Interpreter));
        // A function of the program may have the same name as a function in `COMPILED`.
        let own = Frame { file: "train.py", line: 3, function: "_start" };
        assert_eq!(own.kind(), FrameKind::Program);
    }

    #[test]
    fn functions_are_shown_without_parameters_and_namespaces() {
        let frame = |function| Frame { file: "??", line: 0, function };
        let node =
            frame("torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)");
        assert_eq!(node.backward_node(), Some("MulBackward0"));
        assert_eq!(frame("at::native::mul(at::Tensor const&)").backward_node(), None);
        for (function, short) in [
            ("at::native::einsum(std::basic_string_view<char>)", "einsum"),
            ("at::native::(anonymous namespace)::sort(at::Tensor&)", "sort"),
            ("void at::native::gpu_reduce<float, std::pair<a::b, c>>(int)", "gpu_reduce"),
            ("main", "main"),
        ] {
            assert_eq!(frame(function).short_function(), short);
        }
    }
}
