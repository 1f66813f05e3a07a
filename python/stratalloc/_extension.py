"""The compiled shared object that makes PyTorch use the library. The user can name one. If not, the package may
contain one for this PyTorch (`scripts/wheels.py` builds such packages). Otherwise one is built for each version
of PyTorch and kept in the user's cache folder. If this package was not tested with that version, the object is
tested in a separate process before it is kept."""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings

from . import _files
from ._errors import LibraryError
from ._library import load

VARIABLE = "STRATALLOC_TORCH_EXTENSION"
PLUGGABLE = "none"
_SOURCES = pathlib.Path(__file__).with_name("csrc")
_PREBUILT = pathlib.Path(__file__).with_name("prebuilt")
_TOOLKIT = "/usr/local/cuda"
_FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-w"]
# The first and the last version of PyTorch with which the class was tested.
_FIRST, _LAST = (2, 10), (2, 15)
# The version of PyTorch from which on its headers need C++20.
_CPP20_SINCE = (2, 14)
# Tests an object in a separate process, with calls of PyTorch's functions. Works without a device too.
_TRIAL = """
import sys
import stratalloc, torch
stratalloc.install(sys.argv[1])
memory = torch.cuda.memory
memory._record_memory_history()
if torch.cuda.is_available():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = [torch.empty(count, device="cuda") for count in (1, 1 << 20)]
    assert torch.cuda.memory_allocated() >= 4 << 20
    assert len(memory._snapshot()["device_traces"][0]) >= 2
    del held, pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0
"""
_TRIAL_S_MAX = 120


class Unavailable(Exception):
    """There is no object, and none can be built here. The message names the missing part."""


class _Refused(Unavailable):
    """The object does not fit this version of PyTorch. The message is the reason."""

    def __init__(self, reason, compiler=None):
        super().__init__(reason if compiler is None else f"a compiler that builds it: {compiler} reports {reason}")
        self.reason = reason


def find(torch):
    """Returns the path of the object for this PyTorch. ``None`` if the user has disabled it."""
    chosen = os.environ.get(VARIABLE)
    if chosen == PLUGGABLE:
        return None
    if chosen:
        if not os.path.isfile(chosen):
            raise LibraryError(f"{VARIABLE}: there is no file {chosen}")
        return os.path.abspath(chosen)
    if _is_known(torch):
        return _prebuilt(torch) or _built(torch)
    try:
        path = _built(torch)
    except _Refused as refused:
        raise Unavailable(f"support for PyTorch {torch.__version__} ({_known()}): {refused.reason}") from refused
    warnings.warn(
        f"PyTorch {torch.__version__} is new to this package ({_known()}); its allocator class compiled, and a "
        f"short test of it passed",
        RuntimeWarning,
        stacklevel=4,
    )
    return path


def _version(version):
    """Returns a version as two numbers. A version without numbers counts as the last known one, so its
    object is not tested."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else _LAST


def _is_known(torch):
    return _FIRST <= _version(str(torch.__version__)) <= _LAST


def standard(version):
    """Returns the compiler's option for the standard of C++ that the headers of a version of PyTorch need."""
    return "-std=c++20" if _version(version) >= _CPP20_SINCE else "-std=c++17"


def prebuilt_name(version, commit, abi):
    """Returns the file name of an object in the package. It is compiled from the headers of one commit of PyTorch,
    which are the same in its builds for several versions of CUDA (`2.11.0+cu128`, `2.11.0+cu130`)."""
    return f"torch-{version.partition('+')[0]}-{commit[:12]}-abi{abi}.so"


def _prebuilt(torch):
    """Returns the path of the object in the package for this PyTorch, or ``None``."""
    home = getattr(torch, "__file__", None)
    commit = getattr(getattr(torch, "version", None), "git_version", None)
    if not home or not commit:
        return None
    path = _PREBUILT / prebuilt_name(str(torch.__version__), commit, _abi(torch))
    # A PyTorch without CUDA may be built from the same commit.
    library = pathlib.Path(home).with_name("lib") / "libc10_cuda.so"
    return str(path) if path.is_file() and library.is_file() else None


def _abi(torch):
    return int(bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))


def _known():
    first, last = (".".join(map(str, version)) for version in (_FIRST, _LAST))
    return f"it was tried with {first} to {last}"


def _built(torch):
    home = getattr(torch, "__file__", None)
    if not home or not sys.platform.startswith("linux"):
        raise Unavailable("a PyTorch with headers, on Linux")
    home = pathlib.Path(home).parent
    flags = [standard(str(torch.__version__)), f"-D_GLIBCXX_USE_CXX11_ABI={_abi(torch)}"]
    digest = hashlib.sha256(repr((platform.machine(), flags, _FLAGS)).encode())
    digest.update(str(getattr(torch.version, "git_version", "")).encode())
    for source in sorted(file for file in _SOURCES.rglob("*") if file.is_file()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _cache()
    path = folder / f"torch-{torch.__version__}-{digest.hexdigest()[:20]}.so"
    if path.is_file():
        return str(path)
    try:
        # Objects in it are loaded into the process.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.with_suffix(".lock")):
            # Another process may have built the object while this one waited for the lock.
            if not path.is_file():
                _build(path, home, str(torch.__version__), flags, is_new=not _is_known(torch))
    except OSError as error:
        raise Unavailable(f"a cache folder that can be written: {error}") from error
    return str(path)


def _cache():
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = pathlib.Path(home) if home else pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise Unavailable(f"a folder for the object: {error}; set XDG_CACHE_HOME") from error
    return base / "stratalloc"


@contextlib.contextmanager
def _locked(path):
    """Holds a lock against other processes. The system releases it if the process dies."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _print("waiting for another process that compiles its class for PyTorch")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _print(text):
    # The stream may be closed.
    with contextlib.suppress(Exception):
        print(f"stratalloc: {text}", file=sys.stderr, flush=True)


def _build(path, home, version, flags, is_new):
    """Builds the object at ``path``. If ``is_new``, tests it before it is moved there."""
    compiler = _compiler()
    if not (home / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise Unavailable(f"PyTorch's headers in {home / 'include'}")
    flags = [*flags, *_FLAGS, f"-I{home / 'include'}"]
    flags += [f"-I{folder}" for folder in _cuda_includes(home)]
    test = f", and testing it for at most {_TRIAL_S_MAX} s" if is_new else ""
    _print(f"compiling its class for PyTorch {version} (once, about 30 s){test}")
    # In the same folder, because only then the finished object can be renamed.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as work:
        work = pathlib.Path(work)

        def compiled(source):
            target = work / (source.stem + ".o")
            _run([*compiler, *flags, "-c", str(source), "-o", str(target)])
            return str(target)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, sorted(_SOURCES.glob("*.cpp"))))
        made = work / "made.so"
        libraries = [*_cpp_runtime(), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ldl"]
        _run([*compiler, "-shared", "-o", str(made), *objects, *libraries])
        if is_new:
            _try(made, home)
        _files.move(made, path)


def _try(made, home):
    packages = [str(pathlib.Path(__file__).parents[1]), str(home.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, VARIABLE: str(made), "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    command = [sys.executable, "-W", "ignore", "-c", _TRIAL, load().path]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TRIAL_S_MAX)
    except subprocess.TimeoutExpired:
        raise _Refused(f"a short test of it did not end in {_TRIAL_S_MAX} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise _Refused(f"a short test of it failed: {last}")


def _compiler():
    command = shlex.split(os.environ.get("CXX", ""))
    names = [command] if command else [["c++"], ["g++"], ["clang++"]]
    for name in names:
        if shutil.which(name[0]):
            return name
    raise Unavailable(f"a C++ compiler ({' or '.join(name[0] for name in names)})")


def _cpp_runtime(maps="/proc/self/maps"):
    """Returns the libstdc++ that this process has loaded, in a list. If the object were linked against
    the compiler's own, the process would have two. Formatting numbers with one in a stream of the other
    fails."""
    with open(maps) as lines:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in lines if "/libstdc++.so" in line}
    return sorted(paths)[:1]


def _cuda_includes(home):
    """Returns the folders with CUDA's headers: of a toolkit, or of NVIDIA's packages beside PyTorch."""
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    toolkits += [nvcc and pathlib.Path(nvcc).resolve().parents[1], _TOOLKIT]
    folders = [pathlib.Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    packages = home.parent / "nvidia"
    folders += sorted(packages.glob("cu*/include"), reverse=True)
    folders.append(packages / "cuda_runtime" / "include")
    runtime = [folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()]
    if not runtime:
        raise Unavailable("CUDA's headers (a toolkit, or the package nvidia-cuda-runtime)")
    # Some of CUDA's headers are in a package of NVIDIA that PyTorch does not install. `csrc` has
    # replacements for them.
    whole = [folder for folder in runtime if (folder / "crt" / "host_config.h").is_file()]
    return whole[:1] or [runtime[0], _SOURCES]


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise _Refused(_pure(done.stderr) or errors[0].strip(), command[0])


def _pure(errors):
    """Returns a message with the functions that this package's class lacks, from a compiler's errors."""
    names = re.findall(r"note:\s+\S?virtual .*?(\w+)\(|unimplemented pure virtual method '(\w+)'", errors)
    names = [one or other for one, other in names]
    return names and "PyTorch's class has functions that are not known here: " + ", ".join(dict.fromkeys(names))
