"""Reports added to out-of-memory errors, with a replacement of PyTorch and of the command line."""

import collections
import contextlib
import glob
import io
import itertools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

import stratalloc
from stratalloc import _startup, _watch, _watch_report

ROOT = pathlib.Path(__file__).parents[2]
# Prints a fixed advice about the recording, or writes a page. Does what the file `behave` contains before.
COMMAND = """#!{python}
import json, os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
behave = os.path.join(here, "behave")
if os.path.exists(behave): exec(open(behave).read())
path = sys.argv[sys.argv.index("--quick") + 1]
assert os.path.isfile(path)
if sys.argv[1] == "report":
    open(sys.argv[sys.argv.index("--output") + 1], "w").write("page")
else:
    rows = [dict(requested_bytes=n << 20, blocks=n, asked_for_by=f"train.py:{{n}} f\\n") for n in (6, 2, 1, 1)]
    advice = dict(sentence="Set a:b.", set=["CONF=a:b", "ALLOC_CONF=a:b"], causes=dict(why="All is reserved."))
    shares = [dict(category="activations", share=0.75), dict(category="unknown", share=0.25)]
    advice["moments"] = [dict(categories=shares)]
    print(json.dumps(dict(advice, holders=dict(requested_bytes=10 << 20, by_stack=rows))))
"""


def torch_with(failures):
    """A replacement of PyTorch. ``failures`` are the failed requests of each device."""

    class OutOfMemoryError(RuntimeError):
        pass

    torch = mock.MagicMock(__version__="2.8.1+cu128")
    torch.cuda = types.SimpleNamespace(
        OutOfMemoryError=OutOfMemoryError,
        device_count=lambda: len(failures),
        is_initialized=lambda: not torch.queued,
        _lazy_call=torch.queued.append,
        memory=types.SimpleNamespace(
            memory_stats_as_nested_dict=lambda device: {"num_ooms": failures[device]},
            _snapshot=lambda device: {"device_traces": [list(one) for one in torch.traces]},
            _record_memory_history=lambda *words, **options: torch.recorded.append((*words, options)),
        ),
    )
    torch._C._cuda_isHistoryEnabled = lambda: bool(torch.recorded)
    torch._C._cuda_hasPrimaryContext = lambda device: False
    torch.distributed.is_initialized = lambda: False
    return torch


class Folder(unittest.TestCase):
    """The replacements, in a folder of their own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.command = self.folder / "stratalloc"
        self.command.write_text(COMMAND.format(python=sys.executable))
        self.command.chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STRATALLOC_WATCH")}
        environment = {**environment, "STRATALLOC_COMMAND": str(self.command), "RANK": "7"}
        self.failures, self.errors = [0, 0], io.StringIO()
        self.torch = torch_with(self.failures)
        self.torch.queued, self.torch.recorded = [], []
        self.torch.cuda._lazy_call = lambda call: self.torch.queued.append(call)
        self.torch.traces = [[], [{"action": "alloc"}, {"action": "oom", "n": 1}, {"action": "oom", "n": 2}]]
        for patched in (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.dict(sys.modules, torch=self.torch),
            mock.patch.multiple(_watch, _active=None, _recorded=None, _last=None, _files=collections.deque()),
            mock.patch.object(_watch, "_numbers", itertools.count(1)),
            contextlib.redirect_stderr(self.errors),
        ):
            patched.__enter__()
            self.addCleanup(patched.__exit__, None, None, None)

    def watch(self, **options):
        watcher = stratalloc.watch(**{"folder": self.folder / "own", "pause": 0, **options})
        self.addCleanup(watcher.stop)
        return watcher

    def use_cuda(self):
        while self.torch.queued:
            self.torch.queued.pop()()

    def failure(self, device=1):
        """Returns a new exception and its notes, after a request failed."""
        self.failures[device] += 1
        error = self.torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return error, "\n".join(getattr(error, "__notes__", []))

    def files(self, pattern="*"):
        return sorted(os.path.basename(path) for path in glob.glob(str(self.folder / "own" / pattern)))

    def behave(self, code):
        (self.folder / "behave").write_text(code)


class Reports(Folder):
    def test_an_error_names_the_code_the_setting_and_the_files(self):
        self.watch()
        self.use_cuda()
        error, note = self.failure()
        snapshot, page = self.files("*.pickle"), self.files("*.html")
        self.assertRegex(snapshot[0], rf"^oom-rank7-\d+-\d+-{os.getpid()}-1.pickle$")
        own = self.folder / "own"
        self.assertEqual(
            note.splitlines(),
            [
                "stratalloc: All is reserved.",
                "  held: 6.0 MiB (60 %) in 6 blocks: train.py:6 f ",
                "  held: 2.0 MiB (20 %) in 2 blocks: train.py:2 f ",
                "  held: 1.0 MiB (10 %) in 1 block: train.py:1 f ",
                "  by category: activations 75 %, unknown 25 %",
                "  Set a:b.",
                "  set: CONF=a:b",
                f"  snapshot: {own / snapshot[0]}",
                f"  page: {own / page[0]}",
            ],
        )
        self.assertEqual(error.args, ("CUDA out of memory.",))
        words = f"--quick {own / snapshot[0]} --seconds 10 --torch 2.8 --recorded-device 1"
        calls = sorted((self.folder / "calls").read_text().splitlines())
        self.assertEqual(calls[0], f"advise --json {words}")
        # The page is written in a folder of its own, and moved when it is complete.
        self.assertRegex(calls[1], rf"^report --output {own}/\.stratalloc-\w+/{page[0]} {words}$")
        self.assertEqual(sorted(os.listdir(own)), sorted([*snapshot, *page]))
        # A report is about the first failure of a recording, so earlier ones are left out.
        written = pickle.loads((own / snapshot[0]).read_bytes())
        self.assertEqual(written["device_traces"][1], [{"action": "alloc"}, {"action": "oom", "n": 2}])
        self.assertEqual(self.errors.getvalue(), "")

    def test_on_rocm_the_report_is_for_that_platform(self):
        self.torch.version = types.SimpleNamespace(hip="6.4.43482", cuda=None)
        self.torch.__version__ = "2.8.0a0+gitabcdef"
        with mock.patch.object(_watch._account, "serve") as serve:
            watcher = self.watch()
        self.assertIsNone(watcher.snapshot())
        self.assertIn("no snapshot is written: HIP is not in use yet", self.errors.getvalue())
        self.use_cuda()
        _, note = self.failure()
        self.assertIn("  held: 6.0 MiB (60 %) in 6 blocks: train.py:6 f ", note)
        calls = sorted((self.folder / "calls").read_text().splitlines())
        self.assertIn("--torch 2.8+rocm --recorded-device 1", calls[0])
        serve.assert_not_called()
        written = pickle.loads((self.folder / "own" / self.files("*.pickle")[0]).read_bytes())
        self.assertNotIn("account", written)

    def test_before_notes_the_message_has_the_report(self):
        self.watch()
        self.use_cuda()

        class OutOfMemoryError(RuntimeError):
            add_note = property()

        self.torch.cuda.OutOfMemoryError = OutOfMemoryError
        self.watch()
        self.use_cuda()
        error, _ = self.failure()
        (message,) = error.args
        self.assertTrue(message.startswith("CUDA out of memory.\nstratalloc: All is reserved.\n"), message)

    def test_a_copy_of_an_error_and_an_early_second_one_get_no_report(self):
        self.watch(pause=1000)
        self.use_cuda()
        self.failure()
        copy = self.torch.cuda.OutOfMemoryError("from another process")
        self.assertFalse(hasattr(copy, "__notes__"))
        path = self.folder / "own" / self.files("*.pickle")[0]
        self.assertRegex(self.failure()[1], rf"^stratalloc: the last report was written \d s ago: {path}$")
        _watch._last = path, _watch._last[1] - 1000
        self.assertIn("All is reserved", self.failure()[1])

    def test_a_failure_while_another_is_analysed_does_not_wait(self):
        self.watch()
        self.use_cuda()
        first, second = self.folder / "first", self.folder / "second"
        wait = f"open({str(first)!r}, 'w').close()\nwhile not os.path.exists({str(second)!r}): time.sleep(0.01)"
        self.behave(wait)
        notes = []
        thread = threading.Thread(target=lambda: notes.append(self.failure()[1]))
        thread.start()
        while thread.is_alive() and not first.exists():
            thread.join(0.01)
        self.assertEqual(self.failure()[1], "stratalloc: a report about another failure is being written")
        second.touch()
        thread.join()
        self.assertIn("All is reserved", notes[0])
        self.assertFalse(hasattr(self.torch.cuda.OutOfMemoryError("a copy"), "__notes__"))

    def test_only_the_newest_files_stay(self):
        kept = self.folder / "own" / "oom-of-another-run.pickle"
        kept.parent.mkdir()
        kept.touch()
        for _ in range(4):
            with self.watch(files=2):
                self.use_cuda()
                self.failure()
        numbers = [name.rsplit("-", 1)[1] for name in self.files()]
        self.assertEqual(sorted(numbers), ["3.html", "3.pickle", "4.html", "4.pickle", "run.pickle"])

    def test_no_failure_of_the_report_reaches_the_program(self):
        self.watch()
        self.use_cuda()
        os.environ["STRATALLOC_COMMAND"] = str(self.folder / "nowhere")
        note = self.failure()[1]
        self.assertIn("not analysed: STRATALLOC_COMMAND: there is no program", note)
        self.assertRegex(note, r"snapshot: (.*pickle)\n  page: python -m stratalloc report \1 writes it$")
        os.environ["STRATALLOC_COMMAND"] = str(self.command)
        for code, expected in (
            ("sys.exit('error: it is no recording')", "not analysed: error: it is no recording"),
            ("print('[]'); sys.exit()", "not analysed: 'list' object"),
            ("sys.exit()", "not analysed: list index out of range"),
        ):
            self.behave(code)
            self.assertIn(expected, self.failure()[1])
        with mock.patch.object(self.torch.cuda.memory, "_snapshot", side_effect=MemoryError):
            self.assertEqual(
                self.failure()[1], "stratalloc: no report, because the snapshot cannot be written: MemoryError"
            )
        with mock.patch.object(self.torch.cuda, "device_count", side_effect=ValueError("odd")):
            self.assertEqual(self.failure()[1], "")
        self.assertIn("stratalloc: watch: no report is added: odd\n", self.errors.getvalue())

    def test_the_analysis_has_a_time_limit(self):
        watcher = self.watch(seconds=1)
        watcher._options["seconds"] = 0.1
        self.use_cuda()
        self.behave("time.sleep(1000)")
        note = self.failure()[1]
        self.assertIn("not analysed: it takes more than 0.1 s", note)
        # Only the page takes too long. Its program is killed, and its incomplete file is removed.
        begun = str(self.folder / "begun")
        self.behave(
            "if sys.argv[1] == 'report':\n"
            "    open(sys.argv[sys.argv.index('--output') + 1] + '.part', 'w').close()\n"
            f"    open({begun!r}, 'w').close(); time.sleep(1000)\n"
            f"while not os.path.exists({begun!r}): time.sleep(0.01)\n"
        )
        with mock.patch.object(_watch_report, "time", mock.Mock(monotonic=mock.Mock(side_effect=[0, -1000, 1]))):
            note = self.failure()[1]
        self.assertIn("All is reserved", note)
        self.assertIn("python -m stratalloc report", note)
        self.assertEqual([name for name in os.listdir(self.folder / "own") if name.startswith(".")], [])


class Recording(Folder):
    def test_it_begins_with_the_first_use_of_cuda(self):
        watcher = self.watch(ring="1MiB")
        self.assertEqual(self.torch.recorded, [])
        self.assertIsNone(watcher.snapshot())
        self.assertIn("no snapshot is written: CUDA is not in use yet", self.errors.getvalue())
        self.use_cuda()
        entries = (1 << 20) // _watch._BYTES_PER_ENTRY
        options = {"context": "alloc", "stacks": "python", "max_entries": entries}
        self.assertEqual(self.torch.recorded, [(options,)])
        # The same ring: the history so far is kept.
        self.watch(ring="1MiB")
        self.use_cuda()
        self.assertEqual(len(self.torch.recorded), 1)
        self.watch(ring="2MiB")
        self.use_cuda()
        self.assertEqual(self.torch.recorded[1][0]["max_entries"], 2 * (1 << 20) // _watch._BYTES_PER_ENTRY)
        _watch._active.stop()
        self.assertEqual(self.torch.recorded[2:], [(None, {})])
        self.assertEqual(self.failure()[1], "")

    def test_a_recording_of_the_program_stays_as_it_is(self):
        self.torch.recorded.append("its own")
        with self.watch():
            self.use_cuda()
            self.assertIn("All is reserved", self.failure()[1])
        self.assertEqual(self.torch.recorded, ["its own"])

    def test_a_pytorch_that_lacks_something_is_reported_and_the_program_goes_on(self):
        del self.torch.cuda._lazy_call
        self.watch()
        self.assertIn("stratalloc: watch: memory is not recorded: ", self.errors.getvalue())
        self.torch.cuda._lazy_call = lambda call: call()
        self.torch.cuda.memory._record_memory_history = None
        self.watch(every=1)
        lines = self.errors.getvalue()
        self.assertEqual(lines.count("stratalloc: watch: memory is not recorded: "), 2, lines)
        self.assertIn("stratalloc: watch: steps are not counted: ", lines)

    def test_without_pytorch_it_is_refused(self):
        with mock.patch.dict(sys.modules, torch=None), self.assertRaisesRegex(stratalloc.LibraryError, "PyTorch"):
            stratalloc.watch()

    def test_steps_are_counted(self):
        optimizer = mock.Mock()
        register = optimizer.register_optimizer_step_post_hook
        patched = mock.patch.dict(sys.modules, {"torch.optim.optimizer": optimizer})
        patched.start()
        self.addCleanup(patched.stop)
        watcher = self.watch(every=2)
        self.use_cuda()
        (hook,) = register.call_args.args
        for _ in range(5):
            hook(None, (), {})
        self.assertEqual([name.split("-")[0] for name in self.files()], ["step2", "step4"])
        watcher.step()
        register.return_value.remove.assert_called_once()
        self.assertEqual(len(self.files("step6-*")), 1)
        self.assertEqual(self.files("*.html"), [])

    def test_a_signal_writes_a_report(self):
        seen = []
        former = signal.signal(signal.SIGUSR2, lambda *words: seen.append(words))
        self.addCleanup(signal.signal, signal.SIGUSR2, former)
        self.watch(signal="sigusr2")
        self.use_cuda()
        os.kill(os.getpid(), signal.SIGUSR2)
        self.assertIn("stratalloc: All is reserved.", self.errors.getvalue())
        self.assertEqual((len(self.files("signal-*")), len(seen)), (2, 1))
        written = pickle.loads((self.folder / "own" / self.files("signal-*.pickle")[0]).read_bytes())
        self.assertEqual(written["device_traces"], [[], [{"action": "alloc"}]])
        _watch._active.stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        self.assertEqual((len(self.files("signal-*")), len(seen)), (2, 2))


class Options(Folder):
    def test_variables_have_the_options_that_the_program_does_not_set(self):
        os.environ.update(STRATALLOC_WATCH_FOLDER="somewhere", STRATALLOC_WATCH_RING="3 GiB", STRATALLOC_WATCH_FILES="9")
        options = self.watch(folder=None, files=4, seconds=7)._options
        self.assertEqual((options["folder"], options["ring"]), (os.path.abspath("somewhere"), 3 << 30))
        self.assertEqual((options["files"], options["seconds"], options["signal"]), (4, 7, None))
        self.assertEqual(self.errors.getvalue(), "")

    def test_an_invalid_variable_is_reported_and_the_default_used(self):
        bad = {
            "FILES": "-1", "RING": "9" * 5000, "SECONDS": "1e3", "PAUSE": "\u0663", "EVERY": "1\n", "SIGNAL": "SIGNONE"
        }
        os.environ.update({f"STRATALLOC_WATCH_{name}": value for name, value in bad.items()})
        options = self.watch(pause=None)._options
        defaults = {"files": 3, "ring": 64 << 20, "seconds": 20, "pause": 60, "every": 0, "signal": None}
        self.assertEqual({name: options[name] for name in defaults}, defaults)
        lines = self.errors.getvalue().splitlines()
        self.assertEqual(len(lines), len(bad), lines)
        for name, line in zip(["FILES", "RING", "SECONDS", "PAUSE", "EVERY", "SIGNAL"], lines):
            self.assertRegex(line, f"^stratalloc: watch: STRATALLOC_WATCH_{name}: expected .{{,160}}; the default is used$")

    def test_a_signal_that_cannot_be_caught_is_reported(self):
        self.watch(signal="KILL")
        self.assertIn("stratalloc: watch: the signal is not handled: ", self.errors.getvalue())

    def test_an_invalid_argument_is_refused(self):
        bad = {"folder": "a\0b", "files": 0, "ring": "1KiB", "seconds": 1.5, "pause": -1, "every": "x", "signal": "NONE"}
        for name, value in bad.items():
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"^{name}: expected .*, got "):
                stratalloc.watch(**{name: value})
        self.assertIsNone(_watch._active)

    def test_a_rank_that_is_no_number_is_in_no_name(self):
        self.watch()
        self.use_cuda()
        os.environ["RANK"] = "../../x"
        self.failure()
        self.torch.distributed.is_initialized = lambda: True
        self.torch.distributed.get_rank = lambda: 12
        self.failure()
        names = self.files("*.pickle")
        self.assertRegex(names[0], r"^oom-\d{8}-")
        self.assertRegex(names[1], r"^oom-rank12-\d{8}-")


class StartUp(unittest.TestCase):
    """Processes that start with the file of ``python -m stratalloc hook``."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.packages = self.folder / "packages"
        self.packages.mkdir()
        self.torch = self.packages / "torch.py"
        self.torch.write_text("import types; cuda = types.SimpleNamespace(_lazy_call=lambda call: print('watched'))\n")
        with open(self.torch, "a") as file:
            file.write("class E(RuntimeError): pass\ncuda.OutOfMemoryError = E\n")
        # Makes Python read the folder at its start.
        (self.folder / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(self.packages)!r})\n")

    def run_python(self, *words, value=None, path=()):
        environment = {name: text for name, text in os.environ.items() if not name.startswith("STRATALLOC_WATCH")}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(self.packages), str(ROOT / "python"), *path])
        if value is not None:
            environment["STRATALLOC_WATCH"] = value
        return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)

    def hook(self, action, folder=None):
        return self.run_python("-m", "stratalloc", "hook", action, "--folder", str(folder or self.packages))

    def install(self):
        (self.packages / _startup._NAME).write_text(_startup._LINE)

    def test_programs_are_watched_if_the_variable_is_set(self):
        done = self.hook("--install")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        (path,) = self.packages.glob("*.pth")
        self.assertIn(str(path), done.stdout)
        find = "import importlib.util as u; u.find_spec('torch'); print('found'); import torch; import torch"
        for value, output, errors in (
            (None, "found\n", ""),
            ("0", "found\n", ""),
            ("1", "found\nwatched\n", ""),
            ("yes\n", "found\n", "stratalloc: STRATALLOC_WATCH: expected 0 or 1, got 'yes\\n'\n"),
        ):
            done = self.run_python("-c", find, value=value)
            self.assertEqual((done.stdout, done.stderr, done.returncode), (output, errors, 0))
        done = self.run_python("-c", "import sys; print('stratalloc' in sys.modules)")
        self.assertEqual(done.stdout, "False\n")
        done = self.hook("--remove")
        self.assertEqual((done.returncode, list(self.packages.glob("*.pth"))), (0, []))
        done = self.hook("--remove")
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, "^stratalloc: .*pth: No such file or directory\n$")

    def test_a_program_without_pytorch_or_with_one_that_fails_is_left_alone(self):
        self.install()
        done = self.run_python("-c", "print('good')", value="1")
        self.assertEqual((done.stdout, done.stderr), ("good\n", ""))
        self.torch.write_text("raise ImportError('no libcuda')")
        code = "try: import torch\nexcept ImportError as e: print(e)\n"
        code += "import sys; sys.path.clear()\nimport torch"
        done = self.run_python("-c", code, value="1")
        self.assertEqual(done.stdout, "no libcuda\n")
        self.assertIn("ModuleNotFoundError: No module named 'torch'", done.stderr)

    def test_a_pytorch_that_lacks_something_is_reported(self):
        self.install()
        self.torch.write_text("")
        done = self.run_python("-c", "import torch; print('good')", value="1")
        self.assertEqual(done.stdout, "good\n")
        self.assertRegex(done.stderr, "^(stratalloc: watch: .*: .*cuda.*\n){2}$")

    def test_a_removed_package_is_no_error(self):
        self.install()
        code = "import sys; sys.path = [p for p in sys.path if not p.endswith('/python')]\n"
        first = self.folder / "sitecustomize.py"
        first.write_text(code + first.read_text())
        done = self.run_python("-c", "print('good')", value="1")
        self.assertEqual((done.stdout, done.stderr), ("good\n", ""))

    def test_a_folder_that_python_does_not_read_is_refused(self):
        other = self.folder / "other"
        other.mkdir()
        done = self.hook("--install", other)
        self.assertEqual((done.returncode, os.listdir(other)), (2, []))
        self.assertIn("Python does not read this file at its start", done.stderr)
        done = self.hook("--install", self.folder / "nowhere")
        self.assertRegex(done.stderr, "^stratalloc: .*nowhere.*: No such file or directory\n$")
        self.assertIn("example: python -m stratalloc hook --install", self.run_python("-m", "stratalloc", "hook", "-h").stdout)


if __name__ == "__main__":
    unittest.main()
