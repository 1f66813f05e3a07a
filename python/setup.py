"""Builds the library and the command line with cargo, and puts them into the wheel."""

import json
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent.parent


def cargo(*words):
    """Runs `cargo build` and returns the files that it made, by target."""
    # Function names are kept for the stacks of leak reports.
    options = ["--profile", "dist", "--config", 'profile.dist.strip="debuginfo"']
    command = ["cargo", "build", *options, "--message-format=json-render-diagnostics", *words]
    try:
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except FileNotFoundError:
        sys.exit("stratalloc is built with Rust, and there is no cargo: see https://rustup.rs")
    made = {}
    for line in output.splitlines():
        artifact = json.loads(line)
        if artifact["reason"] == "compiler-artifact":
            made.setdefault(artifact["target"]["name"], []).extend(artifact["filenames"])
    return made


class Build(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        if not (ROOT / "crates" / "ffi" / "Cargo.toml").is_file():
            sys.exit("the wheel is built in the repository of stratalloc: its Rust sources lie beside this folder")
        package = pathlib.Path(self.build_lib) / "stratalloc"
        libraries = cargo("-p", "stratalloc-ffi", "--features", "stacks")["stratalloc"]
        shared = [path for path in libraries if path.endswith((".so", ".dylib", ".dll"))]
        shutil.copy2(shared[-1], package / pathlib.Path(shared[-1]).name)
        if sys.platform.startswith("linux"):
            for path in cargo("-p", "stratalloc-account")["stratalloc_account"]:
                shutil.copy2(path, package / pathlib.Path(path).name)
        (package / "bin").mkdir(exist_ok=True)
        program = cargo("-p", "stratalloc-tools", "--bin", "stratalloc")["stratalloc"][-1]
        shutil.copy2(program, package / "bin" / pathlib.Path(program).name)


class Wheel(bdist_wheel):
    """A wheel for any Python on this system: the library is called through ctypes."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary)
