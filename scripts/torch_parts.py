"""Reduces a wheel of PyTorch to the GPU code of one architecture and cuts it into parts, so that it can be copied to a GPU
machine that has no network and another version of PyTorch:

    pip download --no-deps torch==2.15.0
    python torch_parts.py torch-2.15.0-*.whl PARTS [--sm 90] [--part-mb 40]

PARTS gets the files part.00, part.01, .. of one tar.xz archive (2.15.0: 539 MB become 166 MiB). On the GPU machine,
`torch_from_parts.sh` unpacks them and sets the environment.

The GPU code lies in the section .nv_fatbin of PyTorch's libraries. The code of other architectures, and PTX, are
overwritten with zeros, which compress to nothing. Their headers stay, so no offset changes.
"""

import argparse
import pathlib
import shutil
import struct
import subprocess
import tempfile
import zipfile

FATBIN_SECTIONS = {b".nv_fatbin", b"__nv_relfatbin"}
FATBIN_MAGIC = 0xBA55ED50
# The kind of an entry that is machine code. The other kind is PTX.
MACHINE_CODE = 2
# Neither a program nor a compiler needs them.
UNUSED = ["torch/share", "torch/test"]


def sections(library):
    """Yields the offset and the size of each section of an ELF file that has GPU code."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        if bytes(library[start : library.index(0, start)]) in FATBIN_SECTIONS:
            yield offset, size


def entries(library, start, end):
    """Yields the kind, the architecture, the offset and the size of each piece of GPU code in a section."""
    at = start
    while at + 16 <= end:
        magic, _, header_bytes, size = struct.unpack_from("<IHHQ", library, at)
        if magic != FATBIN_MAGIC:
            # Containers are aligned to 8 bytes, with zeros between them.
            at += 8
            continue
        entry, stop = at + header_bytes, at + header_bytes + size
        while entry + 64 <= stop:
            (kind,) = struct.unpack_from("<H", library, entry)
            entry_header, code_bytes = struct.unpack_from("<IQ", library, entry + 4)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            if entry_header == 0 or code_bytes > stop - entry:
                break
            yield kind, architecture, entry + entry_header, code_bytes
            entry += entry_header + code_bytes
        at = (stop + 7) & ~7


def reduce(path, architecture):
    """Overwrites the code of other architectures in a library. Returns the bytes that are kept and cut."""
    library = bytearray(path.read_bytes())
    kept = cut = 0
    for offset, size in sections(library):
        for kind, other, start, code_bytes in entries(library, offset, offset + size):
            if kind == MACHINE_CODE and other == architecture:
                kept += code_bytes
            else:
                library[start : start + code_bytes] = bytes(code_bytes)
                cut += code_bytes
    if cut:
        path.write_bytes(library)
    return kept, cut


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("parts", type=pathlib.Path, help="folder for the parts")
    parser.add_argument("--sm", type=int, default=90, help="architecture to keep, such as 90 for H100 and H200")
    parser.add_argument("--part-mb", type=int, default=40, help="size of a part in MiB")
    arguments = parser.parse_args()
    arguments.parts.mkdir(parents=True, exist_ok=True)
    for old in arguments.parts.glob("part.*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=arguments.parts) as work:
        site = pathlib.Path(work) / "site"
        zipfile.ZipFile(arguments.wheel).extractall(site)
        for library in sorted(site.glob("torch/lib/*.so")):
            kept, cut = reduce(library, arguments.sm)
            if kept or cut:
                print(f"{library.name}: {kept >> 20} MiB of GPU code kept, {cut >> 20} MiB cut")
        for folder in UNUSED:
            shutil.rmtree(site / folder, ignore_errors=True)
        for program in site.glob("torch/bin/protoc*"):
            program.unlink()
        packed = pathlib.Path(work) / "torch.tar.xz"
        subprocess.run(["tar", "-c", "-I", "xz -T0 -3", "-f", packed, "-C", site, "."], check=True)
        size = f"{arguments.part_mb}M"
        subprocess.run(["split", "-b", size, "-d", packed, arguments.parts / "part."], check=True)
    parts = sorted(arguments.parts.glob("part.*"))
    print(f"{sum(part.stat().st_size for part in parts) >> 20} MiB in {len(parts)} parts")


if __name__ == "__main__":
    main()
