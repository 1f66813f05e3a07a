"""The compiled object that puts the library under PyTorch: one that is named, or one that is built once for
each PyTorch and kept in the user's cache folder."""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile

from ._errors import LibraryError

VARIABLE = "STRATALLOC_TORCH_EXTENSION"
PLUGGABLE = "none"
_SOURCES = pathlib.Path(__file__).with_name("csrc")
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-w"]


class Unavailable(Exception):
    """There is no object, and none can be built here. The text names what is missing."""


def find(torch):
    """The path of the object for this PyTorch; ``None`` if the user wants none."""
    said = os.environ.get(VARIABLE)
    if said == PLUGGABLE:
        return None
    if said:
        if not os.path.isfile(said):
            raise LibraryError(f"{VARIABLE}: there is no file {said}")
        return os.path.abspath(said)
    return _built(torch)


def _built(torch):
    home = getattr(torch, "__file__", None)
    if not home or not sys.platform.startswith("linux"):
        raise Unavailable("a PyTorch with headers, on Linux")
    home = pathlib.Path(home).parent
    abi = int(bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))
    digest = hashlib.sha256(repr((abi, platform.machine(), _FLAGS)).encode())
    digest.update(str(getattr(torch.version, "git_version", "")).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _cache()
    path = folder / f"torch-{torch.__version__}-{digest.hexdigest()[:20]}.so"
    if path.is_file():
        return str(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            # Another process may have built it while this one waited.
            if not path.is_file():
                _build(path, home, abi)
    except OSError as error:
        raise Unavailable(f"a cache folder that can be written: {error}") from error
    return str(path)


def _cache():
    home = os.environ.get("XDG_CACHE_HOME")
    base = pathlib.Path(home) if home else pathlib.Path.home() / ".cache"
    return base / "stratalloc"


@contextlib.contextmanager
def _locked(path):
    """Keeps other processes out; one that dies lets go."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path, home, abi):
    compiler = _compiler()
    if not (home / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise Unavailable(f"PyTorch's headers in {home / 'include'}")
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{home / 'include'}"]
    flags += [f"-I{folder}" for folder in _cuda_includes(home)]
    # In the same folder, so that it can take its place at once.
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
        os.replace(made, path)


def _compiler():
    said = shlex.split(os.environ.get("CXX", ""))
    names = [said] if said else [["c++"], ["g++"], ["clang++"]]
    for name in names:
        if shutil.which(name[0]):
            return name
    raise Unavailable(f"a C++ compiler ({' or '.join(name[0] for name in names)})")


def _cpp_runtime(maps="/proc/self/maps"):
    """The C++ library that this process has loaded. A compiler that puts one of its own into the object would leave two
    in the process, which do not format numbers in one another's streams."""
    with open(maps) as lines:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in lines if "/libstdc++.so" in line}
    return sorted(paths)[:1]


def _cuda_includes(home):
    """Folders with CUDA's headers: a toolkit's, or those of NVIDIA's packages beside PyTorch."""
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    toolkits += [nvcc and pathlib.Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = [pathlib.Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    packages = home.parent / "nvidia"
    folders += sorted(packages.glob("cu*/include"), reverse=True)
    folders.append(packages / "cuda_runtime" / "include")
    runtime = [folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()]
    if not runtime:
        raise Unavailable("CUDA's headers (a toolkit, or the packages nvidia-cuda-runtime and nvidia-cuda-crt)")
    # Since CUDA 13 some are in a package of their own.
    whole = [folder for folder in runtime if (folder / "crt" / "host_config.h").is_file()]
    if not whole:
        raise Unavailable(f"crt/host_config.h beside {runtime[0]} (the package nvidia-cuda-crt)")
    return whole[:1]


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise Unavailable(f"a compiler that builds it: {command[0]} says {said[0].strip()}")
