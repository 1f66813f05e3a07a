"""Runs PyTorch's own allocator out of memory under ``stratalloc.watch``, on a machine without a GPU, and checks the
reports.

usage: watched.py SITE HEADERS STRATALLOC
The arguments are those of histories.py. Prints one line of a table; the exit code is 1 if a check fails.
"""

import contextlib
import inspect
import io
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import histories

MIB = 1 << 20
HERE = pathlib.Path(__file__).resolve()


def empty(size_mib):
    import torch

    return torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")


def activations():
    return empty(110)


def fragmented():
    """Fails under PyTorch's defaults on a device of 2 GiB. Under some settings it does not."""
    kept = [empty(30)]
    for _ in range(9):
        # A free segment, of which the next block takes a part.
        del [empty(200)][:]
        kept.append(activations())
    # 810 MiB are free in pieces of 90 MiB.
    return kept, empty(300)


def failure(work):
    import torch

    try:
        work()
    except torch.cuda.OutOfMemoryError as error:
        return error
    raise AssertionError("it did not run out of memory")


def value_of(note, key):
    return re.search(f"^  {key}: (.*)$", note, re.MULTILINE)[1]


def waiting_child(work):
    """Returns a forked process that waits for a text and calls ``work`` with it, and the function that sends the text
    and returns whether the call raised no exception. PyTorch is imported once that way, because that takes longest."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        os.close(writing)
        try:
            text = os.read(reading, 4096).decode()
            # Empty if the parent ended without a text.
            if text:
                work(text)
                code = 0
        finally:
            if sys.exc_info()[1] is not None:
                traceback.print_exc()
            os._exit(code)

    def send(text):
        os.write(writing, text.encode())
        return os.waitpid(process, 0)[1] == 0

    return send


def run_under(setting):
    histories.configure(setting)
    fragmented()


def check(folder):
    """Checks reports in a program that calls ``watch``."""
    import torch

    import stratalloc

    runs_under = waiting_child(run_under)
    os.environ["RANK"] = "3"
    # The driver that is replaced has no contexts.
    torch._C._cuda_hasPrimaryContext = lambda device: True
    watcher = stratalloc.watch(folder=folder, files=2, pause=0, signal="USR1", every=2)
    assert not torch.cuda.is_initialized()
    start = time.monotonic()
    error = failure(fragmented)
    seconds = time.monotonic() - start
    (first,) = error.__notes__
    line = inspect.getsourcelines(activations)[1] + 1
    held = next(row for row in first.splitlines() if row.startswith("  held: "))
    assert re.match(rf"  held: 990.0 MiB \(\d+ %\) in 9 blocks: .*watched.py:{line} activations", held), first
    snapshot, page = value_of(first, "snapshot"), value_of(first, "page")
    assert re.match(rf"oom-rank3-\d+-\d+-{os.getpid()}-1.pickle$", os.path.basename(snapshot)), snapshot
    assert "At the failed request of 300 MiB" in first, first
    with open(page) as file:
        assert "<html" in file.read(4096)
    with open(snapshot, "rb") as file:
        owners = [row["owner"] for row in json.loads(pickle.load(file)["account"])]
    assert owners[0] == "allocator" and owners[-1] == "unknown", owners
    del error
    # An exception that is no new failure has no report.
    assert not hasattr(torch.cuda.OutOfMemoryError("a copy"), "__notes__")
    # A report is about the last failure, wherever it is raised.
    found = []
    thread = threading.Thread(target=lambda: found.append(failure(lambda: empty(4000))))
    thread.start()
    thread.join()
    assert "At the failed request of 4,000 MiB" in found[0].__notes__[0], found[0].__notes__
    assert not glob(folder, "step*"), "no step yet"
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    for _ in range(3):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert len(glob(folder, "step2-rank3-*.pickle")) == 1
    watcher.step()
    assert len(glob(folder, "step4-rank3-*.pickle")) == 1
    # The oldest files are removed, with their pages.
    assert len(glob(folder, "*")) == 2, glob(folder, "*")
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        os.kill(os.getpid(), signal.SIGUSR1)
    # It is about the peak, not about the earlier failures.
    assert errors.getvalue().startswith("stratalloc: At the peak of live bytes"), errors.getvalue()
    assert len(glob(folder, "signal-*.pickle")) == len(glob(folder, "signal-*.html")) == 1
    assert len(glob(folder, "*.pickle")) == 2
    watcher.stop()
    assert not hasattr(failure(lambda: empty(4000)), "__notes__")
    assert not torch._C._cuda_isHistoryEnabled()
    with stratalloc.watch(folder=folder, pause=1000):
        (note,) = failure(lambda: empty(4000)).__notes__
        assert re.match("stratalloc: the last report was written .* s ago: .*pickle$", note), note
    # The program runs with the setting that the report names.
    name, _, setting = value_of(first, "set").partition("=")
    assert name == "PYTORCH_CUDA_ALLOC_CONF" and setting, first
    assert runs_under(setting), setting
    print(f"{torch.__version__.split('+')[0]:<10}{seconds:>10.1f} s  {setting}")


def glob(folder, pattern):
    return sorted(pathlib.Path(folder).glob(pattern))


def main(site, headers, command):
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        environment = histories.prepare(work, pathlib.Path(site), headers)
        start, packages, reports = (work / name for name in ("start", "packages", "reports"))
        start.mkdir()
        packages.mkdir()
        # Adds a folder of packages at the start of Python.
        (start / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(packages)!r})\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(start), site, str(HERE.parents[2])])
        environment.update(STRATALLOC_COMMAND=command, STAND_IN_MEMORY_MIB="2048")
        for name in [name for name in environment if name.startswith("STRATALLOC_WATCH")]:
            del environment[name]

        def run(*words, **more):
            words = [sys.executable, *map(str, words)]
            return subprocess.run(words, env={**environment, **more}, capture_output=True, text=True)

        done = run(HERE, "--check", reports)
        assert done.returncode == 0, done.stderr
        print(done.stdout, end="", flush=True)
        # Without a change to the program: nothing, unless the variable is set.
        done = run("-m", "stratalloc", "hook", "--install", "--folder", packages)
        assert done.returncode == 0, done.stderr
        watched = {"STRATALLOC_WATCH": "1", "STRATALLOC_WATCH_FOLDER": str(work / "own")}
        done = run(HERE, "--fragmented", **watched, STRATALLOC_WATCH_FILES="-1")
        assert "stratalloc: At the failed request of 300 MiB" in done.stderr, done.stderr
        assert "stratalloc: watch: STRATALLOC_WATCH_FILES: expected a whole number" in done.stderr, done.stderr
        assert done.returncode == 1 and len(glob(work / "own", "oom-*.html")) == 1, done.stderr
        done = run("-m", "stratalloc", "hook", "--remove", "--folder", packages)
        assert done.returncode == 0 and not glob(packages, "*"), done.stderr


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(sys.argv[2])
    elif sys.argv[1] == "--fragmented":
        fragmented()
    else:
        main(*sys.argv[1:])
