"""Builds replacements of CUDA's libraries, so that PyTorch's wheel can be imported on a machine without
a GPU. Their functions do nothing, but for the runtime, which is ``cudart_stub.c`` or another file.
Tensors can be created and dropped; no kernel runs.

usage: stand_ins.py TORCH_FOLDER FOLDER [RUNTIME]    (needs nm, readelf and a C compiler)
"""

import collections
import pathlib
import re
import subprocess
import sys

OWNERS = {
    "cudnn": "libcudnn.so",
    "nccl": "libnccl.so",
    "cusparseLt": "libcusparseLt.so",
    "nvshmem": "libnvshmem_host.so",
    "cupti": "libcupti.so",
    "cuFile": "libcufile.so",
    "cu": "libcuda.so",
}


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(home, folder, runtime="cudart_stub.c"):
    home, folder = pathlib.Path(home), pathlib.Path(folder)
    files = [*home.glob("lib/*.so*"), *home.glob("_C*.so")]
    undefined, defined, needed = set(), set(), set()
    versions = collections.defaultdict(set)
    for file in files:
        for line in output_of("nm", "-D", str(file)).splitlines():
            *_, kind, name = line.split()
            (undefined if kind == "U" else defined).add(name)
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", str(file))))
        library = None
        for line in output_of("readelf", "-V", str(file)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            if (found := re.search(r"Name: (\S+)\s+Flags", line)) and library:
                versions[library].add(found[1])
    defined = {name.split("@")[0] for name in defined}
    known = ["libc.", "libz.", "libquadmath.", "libm.", "libdl.", "librt.", "libpthread.", "libgcc_s.", "libstdc++.", "ld-"]
    ours = {file.name for file in files}
    missing = {name for name in needed - ours if not name.startswith(tuple(known))}
    functions = collections.defaultdict(set)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if name in defined:
            continue
        owner = next((of for start, of in OWNERS.items() if name.startswith(start)), None)
        by_version = [of for of in missing if version and version.strip("@") in versions[of]]
        by_name = [of for of in missing if owner and of.startswith(owner)]
        for library in (by_version or by_name)[:1]:
            functions[library].add(name)
    # PyTorch looks up functions of the driver by name.
    names = set(re.findall(r"\bcu[A-Z]\w+", (home / "lib/libc10_cuda.so").read_bytes().decode("latin-1"), re.ASCII))
    for library in missing:
        if library.startswith("libcuda.so"):
            functions[library] |= names
    for library in sorted(missing):
        make(folder / library, functions[library], sorted(versions[library]), runtime)


def make(path, functions, versions, runtime):
    source, script, own = (path.with_name(name) for name in ("source.c", "versions", "runtime.o"))
    command = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
    if path.name.startswith("libcudart."):
        # Compiled separately, because CUDA's header may declare the other functions with arguments, and
        # rename some.
        text = pathlib.Path(__file__).with_name(runtime)
        subprocess.run(["cc", "-w", "-O1", "-fPIC", "-c", "-o", str(own), str(text)], check=True)
        functions = functions - {line.split()[-1] for line in output_of("nm", "--defined-only", str(own)).splitlines()}
        command.append(str(own))
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions)))
    if versions:
        nodes = [f"{name} {{ {'global: *;' if at == 0 else ''} }};" for at, name in enumerate(versions)]
        script.write_text("\n".join(nodes))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
