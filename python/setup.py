"""Builds the library and the command line with cargo, and puts them into the wheel. `scripts/wheels.py` sets

- STRATALLOC_TORCH_OBJECTS: a folder with compiled objects of PyTorch's class, which are put into the wheel too;
- STRATALLOC_BUILT: a folder of cargo with the library and the command line, which are then not built.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent.parent


def programs():
    """Returns the paths of the libraries and of the command line. Builds them with cargo if no folder has them."""
    built = os.environ.get("STRATALLOC_BUILT")
    if built:
        folder = pathlib.Path(built)
        return [folder / "libstratalloc.so", folder / "libstratalloc_account.so"], folder / "stratalloc"
    packages = ["stratalloc-ffi", "stratalloc-cli"]
    if sys.platform.startswith("linux"):
        packages.append("stratalloc-account")
    # Function names are kept for the stacks of leak reports.
    features = "stratalloc-ffi/advise,stratalloc-ffi/stacks"
    options = ["--profile", "dist", "--config", 'profile.dist.strip="debuginfo"', "--features", features]
    command = ["cargo", "build", *options, "--message-format=json-render-diagnostics"]
    for package in packages:
        command += ["-p", package]
    try:
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except FileNotFoundError:
        sys.exit("stratalloc is built with Rust, and there is no cargo: see https://rustup.rs")
    libraries, program = [], None
    for artifact in map(json.loads, output.splitlines()):
        if artifact["reason"] != "compiler-artifact":
            continue
        if artifact["target"]["kind"] == ["cdylib"]:
            libraries += [path for path in artifact["filenames"] if path.endswith((".so", ".dylib", ".dll"))]
        program = artifact["executable"] or program
    return libraries, program


class Build(build_py):
    def run(self):
        if self.editable_mode:
            return super().run()
        if not (ROOT / "crates" / "ffi" / "Cargo.toml").is_file():
            sys.exit("the wheel is built in the repository of stratalloc: its Rust sources lie beside this folder")
        package = pathlib.Path(self.build_lib) / "stratalloc"
        # Files of an earlier build, such as objects for another version of PyTorch, must not get into the wheel.
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        libraries, program = programs()
        for path in (*libraries, *ROOT.glob("LICENSE-*")):
            shutil.copy2(path, package)
        (package / "bin").mkdir()
        shutil.copy2(program, package / "bin")
        objects = os.environ.get("STRATALLOC_TORCH_OBJECTS")
        if objects:
            shutil.copytree(objects, package / "prebuilt")


class Wheel(bdist_wheel):
    """A wheel for any Python on this system: the library is called through ctypes."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary)
