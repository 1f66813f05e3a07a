"""Runs ``calls.py`` under several configurations at once. PyTorch is imported once, because that takes
longer than all calls. Each call runs in a forked process, which exits as a Python program does.

usage: forked.py CONFIGURATION..    (the environment as for calls.py)
"""

import gc
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import types
import warnings
from unittest import mock

# Imported before the forks. The first snapshot with stacks would import the second module.
import torch  # noqa: F401
import torch._inductor.codecache  # noqa: F401

CALLS = pathlib.Path(__file__).with_name("calls.py")
# Only a call that hangs takes this long.
SECONDS = 300


def forked(work):
    """Forks a process that runs ``work``, which may raise, and exits. Returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    return child


def run(command, **_):
    """Replaces ``subprocess.run`` for the command line of one call."""
    arguments = command[command.index(str(CALLS)) :]
    with tempfile.TemporaryFile("w+", errors="replace") as file:

        def work():
            os.dup2(file.fileno(), 2)
            signal.alarm(SECONDS)
            warnings.simplefilter("ignore")
            sys.argv = arguments
            # The real function again: the code of a call starts processes.
            with mock.patch("subprocess.run", started):
                runpy.run_path(str(CALLS), run_name="__main__")

        _, status = os.waitpid(forked(work), 0)
        file.seek(0)
        code = os.waitstatus_to_exitcode(status)
        ended = f"\nended by signal {-code}" if code < 0 else ""
        return types.SimpleNamespace(returncode=code, stderr=file.read() + ended)


def main(configurations):
    calls = runpy.run_path(str(CALLS))["main"]

    def all_calls(conf):
        with mock.patch("subprocess.run", run):
            sys.exit(calls(conf))

    # At its exit, each process would collect garbage among all of PyTorch's objects.
    gc.freeze()
    children = [forked(lambda conf=conf: all_calls(conf)) for conf in configurations]
    return max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children])


if __name__ == "__main__":
    import subprocess

    started = subprocess.run
    sys.exit(main(sys.argv[1:]))
