"""Advice about the recordings of many ranks, on this machine or on the workers of an executor."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import tempfile
import warnings

from . import _command
from ._advice import json_of, options_of
from ._errors import LibraryError

# A worker reads so many files with one call of the command line.
_BATCH = 16


def sweep(paths, executor=None, quick=True, torch=None, output=None):
    """Returns one setting for many recordings, such as those of all ranks. Recordings with equal requests
    are analysed once. ``executor`` is any executor of ``concurrent.futures``, such as
    ``dask.distributed.Client.get_executor()`` or ``RayExecutor()``; the workers need this package, and the
    command line and the files at the same paths as this process. Without an executor, one process uses all
    processors of this machine. The result does not depend on the executor.

    ``torch`` is the version of PyTorch that must accept the setting, such as "2.8". The default is the
    version that a recording names, if it names one. ``output`` is the path of an HTML page to write.

    Returns a dictionary. ``rows`` has an entry for each recording: its result, or an ``error``. ``groups``
    has an entry for each group of recordings with equal requests, the largest first, with the first
    ``difference`` from the largest. ``worst`` names the recording that needs the most memory. ``advice`` is
    the setting with which all recordings run in the least memory, and the bytes needed with it: ``paste`` is
    the line for the environment, ``paste_for`` the allocator that reads it, and ``conf`` the value alone. ``table``
    is the result as text.
    """
    command, paths = _command.find(), [os.fspath(path) for path in paths]
    if not paths:
        raise ValueError("paths: expected one recording or more")
    options = options_of(quick, torch)
    final = [*options, *(["--output", os.fspath(output)] if output else [])]
    if executor is None:
        return _result(command, final, paths)
    with tempfile.TemporaryDirectory(prefix="stratalloc-") as folder:
        state = os.path.join(folder, "state")
        with open(state, "w", encoding="utf-8") as file:
            file.writelines(_on_workers(executor, command, options, paths))
        size = os.path.getsize(state)
        # The command line finds the workers' results in the state, and combines them.
        result = _result(command, ["--state", state, *final], paths)
        if os.path.getsize(state) != size:
            warnings.warn(
                "the workers found other files, or none, at some paths: these recordings were analysed here",
                RuntimeWarning,
                stacklevel=2,
            )
        return result


class RayExecutor(concurrent.futures.Executor):
    """Runs functions as tasks of Ray. ``options`` are those of ``ray.remote``, such as ``num_cpus=1``. Ray
    must be initialised, or be able to initialise itself."""

    def __init__(self, **options):
        self._options = options

    def submit(self, function, /, *args, **kwargs):
        import ray

        task = ray.remote(function)
        task = task.options(**self._options) if self._options else task
        return task.remote(*args, **kwargs).future()


def _on_workers(executor, command, options, paths):
    """Does all work on the workers. Yields the contents of state files with the results."""

    def done(part, *batches):
        futures = [
            executor.submit(_part, command, [*options, "--part", part, *more], batch)
            for batch, more in batches
        ]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    # Workers may have other working folders. The command line compares paths that keep "..", too.
    paths = [str(pathlib.Path(path).absolute()) for path in paths]
    batches = [(paths[at : at + _BATCH], []) for at in range(0, len(paths), _BATCH)]
    groups = {}
    for lines, state in done("files", *batches):
        yield state
        for line in lines:
            if "error" not in line:
                groups.setdefault(line["fingerprint"], []).append(line["recording"])
    if not groups:
        return
    # Of several largest groups, the first, as in the command line.
    largest = max(groups.values(), key=len)[0]
    firsts = [members[0] for members in groups.values()]
    against = {first: [] if first == largest else ["--against", largest] for first in firsts}
    best = {}
    for lines, state in done("groups", *(([first], against[first]) for first in firsts)):
        yield state
        best.update((line["recording"], line["best_conf"]) for line in lines if "error" not in line)
    confs = sorted(set(best.values()))
    # The need under a group's own best setting is known.
    others = {first: [conf for conf in confs if conf != own] for first, own in best.items()}
    tried = {
        first: [word for conf in confs for word in ("--conf", conf)]
        for first, confs in others.items()
        if confs
    }
    for _, state in done("needs", *(([first], words) for first, words in tried.items())):
        yield state


def _part(command, options, paths):
    """Does a part of the work, on a worker. Returns the lines that it prints and its state file."""
    with tempfile.TemporaryDirectory(prefix="stratalloc-") as folder:
        state = os.path.join(folder, "state")
        lines = json_of(command, "sweep", "--jobs", "1", "--state", state, *options, "--", *paths)
        with open(state, encoding="utf-8") as file:
            return lines, file.read()


def _result(command, options, paths):
    arguments = [command, "sweep", "--json", *options, "--", *paths]
    done = subprocess.run(arguments, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    try:
        result = json.loads(lines[-1])
        result["rows"]
    except (IndexError, KeyError, ValueError):
        errors = done.stderr.strip().splitlines() or [f"the command line ended with code {done.returncode}"]
        raise LibraryError(errors[-1]) from None
    # The exit code is 2 if a recording has no result; the others have one.
    if all("error" in row for row in result["rows"]):
        raise LibraryError(result["rows"][0]["error"])
    if result["advice"]:
        # The string that was replayed may have keys of this library, at which PyTorch stops.
        result["advice"]["conf"] = result["advice"]["paste"].partition("=")[2]
    return result
