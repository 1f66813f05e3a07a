"""The object for PyTorch: how it is found, built and kept, and what happens if it is missing."""

import importlib.util
import contextlib
import io
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
from unittest import mock

from stratalloc import LibraryError, _extension
from test_torch import STAND_IN, run

HERE = pathlib.Path(__file__).parent
SOURCES = sorted(_extension._SOURCES.glob("*.cpp"))
# Writes its output file, and logs each call. If a folder `crowd` exists, waits until it has three files.
COMPILER = """#!{python}
import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if os.path.exists(os.path.join(here, "broken")):
    sys.exit("allocator.h:3: error: no such thing\\n" + open(os.path.join(here, "broken")).read())
crowd = os.path.join(here, "crowd")
while os.path.exists(crowd) and len(os.listdir(crowd)) < 3:
    time.sleep(0.01)
open(sys.argv[sys.argv.index("-o") + 1], "w").write("made")
"""


class Folder(unittest.TestCase):
    """Replacements of PyTorch, CUDA's headers and a compiler."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.touch("site/torch/__init__.py")
        self.touch("site/torch/include/c10/cuda/CUDACachingAllocator.h")
        self.cuda = self.touch("site/nvidia/cu13/include/cuda_runtime_api.h").parent
        self.touch("site/nvidia/cu13/include/crt/host_config.h")
        self.compiler = self.touch("bin/compiler", COMPILER.format(python=sys.executable))
        self.compiler.chmod(0o755)
        environment = {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "CXX": f"{self.compiler} --option",
            "PATH": "/usr/bin:/bin",
        }
        patched = mock.patch.dict(os.environ, environment)
        patched.start()
        self.addCleanup(patched.stop)
        toolkit = mock.patch.object(_extension, "_TOOLKIT", None)
        toolkit.start()
        self.addCleanup(toolkit.stop)
        for name in (_extension.VARIABLE, "CUDA_HOME", "CUDA_PATH"):
            os.environ.pop(name, None)

    def touch(self, name, text=""):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def torch(self, version="2.11.0"):
        return types.SimpleNamespace(
            __file__=str(self.folder / "site/torch/__init__.py"),
            __version__=version,
            version=types.SimpleNamespace(git_version=f"git of {version}"),
            _C=types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
        )

    def calls(self):
        calls = self.compiler.with_name("calls")
        return calls.read_text().splitlines() if calls.exists() else []

    def unavailable(self, words):
        with self.assertRaisesRegex(_extension.Unavailable, words):
            _extension.find(self.torch())


class Building(Folder):
    def test_it_is_built_once_for_each_pytorch(self):
        path = _extension.find(self.torch())
        self.assertEqual(pathlib.Path(path).read_text(), "made")
        self.assertTrue(path.startswith(str(self.folder / "cache" / "stratalloc" / "torch-2.11.0-")))
        calls = self.calls()
        self.assertEqual(len(calls), len(SOURCES) + 1)
        self.assertTrue(all("--option" in call for call in calls))
        self.assertIn(f"-I{self.cuda}", calls[0])
        self.assertIn("-lc10_cuda", calls[-1])
        self.assertEqual(_extension.find(self.torch()), path)
        self.assertEqual(len(self.calls()), len(calls))
        self.assertNotEqual(_extension.find(self.torch("2.11.1")), path)
        # No partial file is left.
        left = sorted(file.suffix for file in pathlib.Path(path).parent.iterdir())
        self.assertEqual(left, [".lock", ".lock", ".so", ".so"])

    def test_a_compilation_and_a_wait_for_one_are_announced(self):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            path = _extension.find(self.torch("2.15.0"))
            _extension.find(self.torch("2.15.0"))
        line = "stratalloc: compiling its class for PyTorch 2.15.0 (once, about 30 s)\n"
        self.assertEqual(errors.getvalue(), line)
        calls = []

        def lock(_, flags):
            calls.append(flags)
            if len(calls) == 1:
                raise BlockingIOError

        with contextlib.redirect_stderr(errors), mock.patch("fcntl.flock", lock):
            pathlib.Path(path).unlink()
            _extension.find(self.torch("2.15.0"))
        self.assertIn("waiting for another process that compiles its class", errors.getvalue())
        self.assertEqual(len(calls), 2)

    def test_an_object_in_the_package_is_used_for_the_commit_of_pytorch_that_it_was_built_from(self):
        release, cuda, other = self.torch(), self.torch("2.11.0+cu128"), self.torch("2.11.1")
        cuda.version = release.version
        own = self.touch("package/" + _extension.prebuilt_name("2.11.0", release.version.git_version, 1), "prebuilt")
        self.touch("site/torch/lib/libc10_cuda.so")
        with mock.patch.object(_extension, "_PREBUILT", own.parent):
            self.assertEqual([_extension.find(release), _extension.find(cuda)], [str(own)] * 2)
            self.assertEqual(self.calls(), [])
            built = [_extension.find(other)]
            # The same version from another commit, with the other ABI of C++, and without CUDA.
            release.version.git_version = "another commit"
            built.append(_extension.find(release))
            release.version.git_version = "git of 2.11.0"
            release._C._GLIBCXX_USE_CXX11_ABI = False
            built.append(_extension.find(release))
            release._C._GLIBCXX_USE_CXX11_ABI = True
            (self.folder / "site/torch/lib/libc10_cuda.so").unlink()
            built.append(_extension.find(release))
        self.assertEqual([pathlib.Path(path).read_text() for path in built], ["made"] * 4)
        self.assertEqual(len(set(built)), 4)

    def test_each_version_has_its_standard_of_cpp(self):
        for version, standard in (("2.10.0", "17"), ("2.13.0", "17"), ("2.14.1", "20"), ("2.15.0+cu132", "20")):
            before = len(self.calls())
            _extension.find(self.torch(version))
            self.assertTrue(all(f"-std=c++{standard}" in call for call in self.calls()[before:-1]), version)

    def test_an_unknown_version_is_tested_before_it_is_kept(self):
        tried = []
        with mock.patch.object(_extension, "_try", side_effect=lambda made, home: tried.append(made.read_text())):
            with self.assertWarnsRegex(RuntimeWarning, "PyTorch 2.99.0 is new to this package .*2.10 to 2.15"):
                path = _extension.find(self.torch("2.99.0"))
        self.assertEqual((tried, pathlib.Path(path).read_text()), (["made"], "made"))
        refused = _extension._Refused("a short test of it failed: AssertionError")
        with mock.patch.object(_extension, "_try", side_effect=refused):
            with self.assertRaisesRegex(_extension.Unavailable, "support for PyTorch 2.98.0 .*: a short test") as raised:
                _extension.find(self.torch("2.98.0"))
        self.assertNotIn("compiler", str(raised.exception))
        self.assertFalse(list(pathlib.Path(path).parent.glob("torch-2.98*.so")))

    def test_functions_that_the_class_lacks_are_named_for_an_unknown_version(self):
        self.touch("bin/broken", "note:     ‘virtual void* c10::Allocator::sendTo(double, int*)’")
        with self.assertRaisesRegex(_extension.Unavailable, "PyTorch 2.99.0 .*not known here: sendTo") as raised:
            _extension.find(self.torch("2.99.0"))
        self.assertNotIn("compiler", str(raised.exception))

    def test_an_object_that_fails_its_test_is_refused_with_the_last_line(self):
        made = self.touch("made.so", "nothing")
        home = self.folder / "site" / "torch"
        (home / "__init__.py").write_text("raise ImportError('no such library')")
        with self.assertRaisesRegex(_extension._Refused, "ImportError: no such library"):
            _extension._try(made, home)

    def test_headers_that_pytorch_does_not_bring_have_stand_ins(self):
        home = self.folder / "site" / "torch"
        with mock.patch.object(shutil, "which", return_value=None):
            if not os.path.isdir("/usr/local/cuda"):
                self.assertEqual(_extension._cuda_includes(home), [self.cuda])
                shutil.rmtree(self.cuda / "crt")
                self.assertEqual(_extension._cuda_includes(home), [self.cuda, _extension._SOURCES])
        self.assertTrue((_extension._SOURCES / "crt" / "host_config.h").is_file())

    def test_it_is_linked_to_the_cpp_library_that_is_loaded(self):
        line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 12    "
        maps = self.touch("maps", f"{line}/lib/libc.so.6\n{line}/a folder/libstdc++.so.6.0.33\n" * 2)
        self.assertEqual(_extension._cpp_runtime(maps), ["/a folder/libstdc++.so.6.0.33"])
        self.assertEqual(_extension._cpp_runtime(self.touch("maps", f"{line}\n")), [])
        with mock.patch.object(_extension, "_cpp_runtime", return_value=["/its/libstdc++.so"]):
            _extension.find(self.torch())
        self.assertIn("/its/libstdc++.so -L", self.calls()[-1])

    def test_processes_at_once_build_it_once(self):
        crowd = self.folder / "bin" / "crowd"
        crowd.mkdir()
        # No build ends before all three processes have started one.
        code = textwrap.dedent(f"""
            import os, pathlib, sys, types
            from stratalloc import _extension
            (pathlib.Path({str(crowd)!r}) / str(os.getpid())).touch()
            print(_extension.find(types.SimpleNamespace(
                __file__={self.torch().__file__!r}, __version__="2.11.0",
                version=types.SimpleNamespace(git_version="one"), _C=None)))
        """)
        both = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        paths = {process.communicate(timeout=60)[0].strip() for process in both}
        self.assertEqual(len(paths), 1)
        self.assertEqual(pathlib.Path(*paths).read_text(), "made")
        self.assertEqual(len(self.calls()), len(SOURCES) + 1)

    def test_a_failed_build_leaves_nothing_and_is_tried_again(self):
        broken = self.touch("bin/broken")
        self.unavailable("allocator.h:3: error: no such thing")
        broken.unlink()
        self.assertEqual(pathlib.Path(_extension.find(self.torch())).read_text(), "made")

    def test_what_is_missing_is_named(self):
        with mock.patch.dict(os.environ, {"CXX": "no-such-compiler"}):
            self.unavailable(r"a C\+\+ compiler \(no-such-compiler\)")
        if not os.path.isdir("/usr/local/cuda") and not shutil.which("nvcc"):
            (self.cuda / "cuda_runtime_api.h").unlink()
            self.unavailable("CUDA's headers")
        shutil.rmtree(self.folder / "site/torch/include")
        self.unavailable("PyTorch's headers in")
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "/dev/null"}):
            self.unavailable("a cache folder that can be written")
        with self.assertRaisesRegex(_extension.Unavailable, "a PyTorch with headers"):
            _extension.find(types.SimpleNamespace(__version__="0.0"))

    def test_one_that_is_named_is_taken_as_it_is(self):
        own = self.touch("own.so")
        with mock.patch.dict(os.environ, {_extension.VARIABLE: str(own)}):
            self.assertEqual(_extension.find(self.torch()), str(own))
        with mock.patch.dict(os.environ, {_extension.VARIABLE: str(own) + "x"}):
            with self.assertRaisesRegex(LibraryError, "there is no file"):
                _extension.find(self.torch())
        with mock.patch.dict(os.environ, {_extension.VARIABLE: "none"}):
            self.assertIsNone(_extension.find(self.torch()))
        self.assertEqual(self.calls(), [])


class Installing(unittest.TestCase):
    def good(self, code, **environment):
        done = run(STAND_IN + code, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_without_it_one_warning_names_what_is_missing(self):
        done = self.good(
            """
ours = stratalloc.install()
assert state.current is ours is stratalloc.install()
""",
            STRATALLOC_TORCH_EXTENSION="",
        )
        self.assertEqual(done.stderr.count("RuntimeWarning"), 1)
        self.assertIn("missing: a PyTorch with headers, on Linux", done.stderr)

    def test_pinned_memory_needs_it(self):
        self.good("""
refused("only through the compiled object", lambda: stratalloc.install(pinned=True))
assert state.current is None
""")

    def test_what_is_no_object_is_refused_and_changes_nothing(self):
        self.good(
            """
refused("is not for this PyTorch", lambda: stratalloc.install(conf="max_split_size_mb:64"))
assert state.current is None and "ALLOC_CONF" not in os.environ
""",
            STRATALLOC_TORCH_EXTENSION=__file__,
        )

    def test_the_object_is_given_the_library_or_refuses_it(self):
        if not shutil.which("cc"):
            self.skipTest("no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source, extension = os.path.join(folder, "own.c"), os.path.join(folder, "own.so")
            with open(source, "w") as file:
                file.write("""
#include <stdio.h>
#include <stdlib.h>
const char *stratalloc_torch_built_for(void) {
    return getenv("OTHER") ? "2.11.0" : "0.0";
}
int stratalloc_torch_install(const char *path, char *error, size_t size) {
    if (!getenv("REFUSES")) return 0;
    snprintf(error, size, "%s is not wanted", path);
    return 1;
}
int stratalloc_torch_install_pinned(const char *conf, char *error, size_t size) {
    snprintf(error, size, "%s is not wanted", conf);
    return !!getenv("REFUSES_PINNED");
}
""")
            subprocess.run(["cc", "-shared", "-fPIC", "-o", extension, source], check=True)
            self.good(
                """
ours = stratalloc.install(conf="max_split_size_mb:64")
assert os.environ["ALLOC_CONF"] == "max_split_size_mb:64" and state.current is None
assert ours is stratalloc.install() and ours.extension.endswith("own.so") and "own.so" in repr(ours)
seen = []
def record(*arguments, **words): seen.append((arguments, words))
memory._record_memory_history = record
memory._snapshot = lambda device: {"segments": [], "of": device}
stratalloc.record_memory_history("state", max_entries=9, skip_actions=("alloc",))
assert seen == [(("state", "all", "all"), {"max_entries": 9, "device": None, "clear_history": False,
                                            "skip_actions": ["alloc"]})], seen
assert stratalloc.snapshot(1)["of"] == 1
import json, pickle, tempfile
for read, name in ((json.load, "s.json"), (pickle.load, "s.pickle")):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        stratalloc.dump_snapshot(path)
        with open(path, "rb") as file: assert read(file) == {"segments": [], "of": None}
        assert os.listdir(folder) == [name]
""",
                STRATALLOC_TORCH_EXTENSION=extension,
            )
            self.good(
                """
ours = stratalloc.install()
assert ours.pinned == "pinned_num_register_threads:4,backend:pinned" and stratalloc.install() is ours
assert stratalloc.install(pinned="pinned_num_register_threads:4") is ours
refused("the first call", lambda: stratalloc.install(pinned=True))
""",
                STRATALLOC_TORCH_EXTENSION=extension,
                STRATALLOC_PINNED="pinned_num_register_threads:4",
            )
            for value in ("", "0"):
                self.good(
                    "assert stratalloc.install().pinned is None",
                    STRATALLOC_TORCH_EXTENSION=extension,
                    STRATALLOC_PINNED=value,
                    REFUSES_PINNED="1",
                )
            self.good(
                """
try: stratalloc.install(pinned="no_such:1")
except stratalloc.Error as error: assert "no_such" in str(error), error
else: raise AssertionError
refused("backend:pinned is not wanted", lambda: stratalloc.install(pinned=True))
""",
                STRATALLOC_TORCH_EXTENSION=extension,
                REFUSES_PINNED="1",
            )
            self.good(
                """
refused("is not wanted", lambda: stratalloc.install(conf="max_split_size_mb:64"))
assert "ALLOC_CONF" not in os.environ
""",
                STRATALLOC_TORCH_EXTENSION=extension,
                REFUSES="1",
            )
            self.good(
                """
refused("it is for 2.11.0, not 0.0", stratalloc.install)
""",
                STRATALLOC_TORCH_EXTENSION=extension,
                OTHER="1",
            )


class CommandLine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        stand_in, _ = STAND_IN.split("import os, stratalloc\n")
        (self.folder / "torch.py").write_text(stand_in)

    def run_module(self, *arguments, **environment):
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "STRATALLOC_DEVICE": "sim",
            "STRATALLOC_TORCH_EXTENSION": "none",
            "PYTHONPATH": path,
            **environment,
        }
        environment.pop("ALLOC_CONF", None)
        command = [sys.executable, "-m", "stratalloc", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def test_a_program_runs_under_the_library(self):
        program = self.folder / "programs" / "own.py"
        program.parent.mkdir()
        (program.parent / "beside.py").write_text("word = 'beside'")
        program.write_text(textwrap.dedent("""
            import os, sys, beside, torch, stratalloc
            assert __name__ == "__main__" and torch.cuda is sys.modules["torch"].cuda
            assert stratalloc.install() is not None
            print(sys.argv[1:], beside.word, os.environ["ALLOC_CONF"], os.path.basename(sys.argv[0]))
            sys.exit(5)
        """))
        done = self.run_module("run", "--conf", "max_split_size_mb:64", str(program), "--conf", "x")
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertEqual(done.stdout, "['--conf', 'x'] beside max_split_size_mb:64 own.py\n")
        (self.folder / "own_module.py").write_text("import sys; print(sys.argv[1:])")
        done = self.run_module("run", "-m", "own_module", "-x")
        self.assertEqual((done.returncode, done.stdout), (0, "['-x']\n"), done.stderr)

    def test_what_cannot_run_is_reported(self):
        done = self.run_module("run", "nowhere.py")
        self.assertEqual((done.returncode, done.stderr), (2, "stratalloc: there is no program nowhere.py\n"))
        done = self.run_module("run", "--conf", "no_such:1", "nowhere.py")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no_such", done.stderr)

    def test_other_words_are_the_command_lines(self):
        if os.name == "nt":
            self.skipTest("no scripts")
        command = self.folder / "stratalloc"
        command.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
        command.chmod(0o755)
        done = self.run_module("report", "a b", "--json", STRATALLOC_COMMAND=str(command))
        self.assertEqual((done.returncode, done.stdout), (3, "report a b --json\n"))
        done = self.run_module("report", STRATALLOC_COMMAND="/nowhere")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("there is no program /nowhere", done.stderr)
        self.assertIn("python -m stratalloc", self.run_module().stdout)

    def test_the_script_that_pip_installs_runs_the_program_and_never_itself(self):
        if os.name == "nt":
            self.skipTest("no scripts")
        script = self.folder / "stratalloc"
        main = "import sys; from stratalloc import _command; sys.exit(_command.main())"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{main}' \"$@\"\n")
        script.chmod(0o755)
        environment = {**os.environ, "PATH": str(self.folder), "STRATALLOC_COMMAND": ""}
        environment.pop("STRATALLOC_LIBRARY", None)
        command = [script, "explain", "a b"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertIn("the command line is not found", done.stderr)
        later = self.folder / "later"
        later.mkdir()
        shutil.copy(shutil.which("echo"), later / "stratalloc")
        environment["PATH"] += os.pathsep + str(later)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "explain a b\n"), done.stderr)
        # Commands of the package are not passed on.
        done = subprocess.run([script, "run", "--help"], env=environment, capture_output=True, text=True)
        self.assertIn("usage: python -m stratalloc run", done.stdout)


class Class(unittest.TestCase):
    """Every function of PyTorch's class, with PyTorch's own libraries and host memory. scripts/class_tests.sh
    sets the variables."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    def skip(self, missing):
        print(f"skipped: {missing}", file=sys.stderr)
        self.skipTest(missing)

    def torch(self):
        """Returns the folder of PyTorch. It may be an unpacked wheel that cannot be imported."""
        home = os.environ.get("STRATALLOC_TORCH_FOLDER")
        spec = None if home else importlib.util.find_spec("torch")
        if spec is not None:
            home = spec.submodule_search_locations[0]
        if not home or not os.path.isfile(os.path.join(home, "lib", "libc10_cuda.so")):
            self.skip("no PyTorch with CUDA")
        return pathlib.Path(home)

    def extension(self, home):
        """Returns the object for this PyTorch, built once for both tests, as ``install`` builds it."""
        names = runpy.run_path(str(home / "version.py"))
        version = types.SimpleNamespace(git_version=names["git_version"])
        torch = types.SimpleNamespace(
            __file__=str(home / "__init__.py"), __version__=names["__version__"], version=version, _C=None
        )
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder)}):
            try:
                return _extension.find(torch)
            except _extension.Unavailable as missing:
                if str(missing).startswith("CUDA's headers"):
                    self.skip(f"no {missing}")
                raise

    def test_every_function_works(self):
        home = self.torch()
        extension = self.extension(home)
        (cuda,) = _extension._cuda_includes(home)
        script = HERE / "pytorch" / "run.sh"
        command = ["sh", str(script), home, cuda, os.environ["STRATALLOC_LIBRARY"], extension]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("every function worked", done.stdout)

    def test_pytorch_itself_runs_over_it(self):
        # An interpreter with the dependencies of PyTorch's wheel, except CUDA's libraries.
        python = os.environ.get("STRATALLOC_TORCH_PYTHON")
        if not python or not os.environ.get("STRATALLOC_TORCH_FOLDER"):
            self.skip("STRATALLOC_TORCH_PYTHON and _FOLDER are not set")
        home = self.torch()
        extension = self.extension(home)
        stand_ins = self.folder / "stand_ins"
        stand_ins.mkdir()
        subprocess.run([sys.executable, HERE / "pytorch" / "stand_ins.py", home, stand_ins], check=True)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(stand_ins),
            "PYTHONPATH": os.pathsep.join([str(home.parent), str(HERE.parent)]),
            "STRATALLOC_DEVICE": "host",
            _extension.VARIABLE: extension,
        }
        configurations = ["", "expandable_segments:True", "backend:cudaMallocAsync"]
        command = [python, HERE / "pytorch" / "forked.py", *configurations]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        print(done.stdout, file=sys.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)
        for conf in configurations:
            self.assertIn(f"calls worked under {conf or 'the defaults'}", done.stdout)


if __name__ == "__main__":
    unittest.main()
