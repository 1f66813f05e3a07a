"""Advice from the command line about the recording of this program."""

import json
import os
import subprocess
import sys
import tempfile

from . import _command, _platform, _torch
from ._errors import LibraryError


def advise(device=None, quick=True):
    """Returns settings with which this program needs less memory, from the history recorded so far. The
    result is the object that ``stratalloc advise --json`` writes, for the running version of PyTorch. Its
    key ``sentence`` is a summary in one sentence. If PyTorch's history has several devices and ``device`` is
    ``None``, it is the one that failed first, else the one with the most reserved bytes; the key ``devices``
    compares all of them. Recording must be on. If the history shows hardly any request,
    ``headline`` is ``"no history"`` and there are no settings and needs."""
    running = _platform.build_of(sys.modules.get("torch"))
    # The command line knows only versions 2.x.
    options = options_of(quick, running if running.startswith("2.") else None)
    with tempfile.TemporaryDirectory(prefix="stratalloc-") as folder:
        path = os.path.join(folder, "run.pickle")
        _torch.dump_snapshot(path, device)
        return _advice_of(_command.find(), path, options)


def options_of(quick, torch):
    """Returns the options of the command line."""
    return [*(["--quick"] if quick else []), *(["--torch", str(torch)] if torch else [])]


def json_of(command, *arguments):
    """Runs the command line and returns the JSON objects that it prints."""
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LibraryError(lines[0])
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def _advice_of(command, path, options):
    # The first device is the one to look at first.
    advice, *_ = json_of(command, "advise", "--json", *options, path)
    return advice
