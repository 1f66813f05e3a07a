"""Calls ``watch`` in every program of a Python, without a change to the program. A file in the folder of
Python's packages imports this module when a program starts, if ``STRATALLOC_WATCH`` is set and not 0."""

import argparse
import contextlib
import importlib.abc
import os
import pathlib
import subprocess
import sys
import sysconfig

from . import _files
from ._errors import LibraryError

VARIABLE = "STRATALLOC_WATCH"
_NAME = "stratalloc-watch.pth"
# Python runs this line at its start. Without the variable it does nothing else; without the package, too.
_LINE = (
    f"import os; os.environ.get('{VARIABLE}', '0') not in ('', '0')"
    " and __import__('importlib.util').util.find_spec('stratalloc')"
    " and __import__('stratalloc._startup')._startup.begin()\n"
)


def begin():
    """Calls ``watch`` as soon as the program has imported PyTorch."""
    value = os.environ.get(VARIABLE)
    if value != "1":
        print(f"stratalloc: {VARIABLE}: expected 0 or 1, got {ascii(value)[:80]}", file=sys.stderr)
    elif "torch" in sys.modules:
        _watch()
    else:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds PyTorch as the other finders do, and adds a call after it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                _watch()

            # A loader that has no attributes of its own stays as it is.
            with contextlib.suppress(AttributeError):
                spec.loader.exec_module = exec_module
        return spec


def _watch():
    try:
        from ._watch import watch

        watch()
    except Exception as error:
        print(f"stratalloc: memory is not watched: {error}", file=sys.stderr)


def hook(arguments):
    """Adds or removes the file that starts ``watch``: the command ``python -m stratalloc hook``."""
    parser = argparse.ArgumentParser(
        prog="python -m stratalloc hook",
        description=f"Lets programs of this Python watch their memory if {VARIABLE}=1 is set.",
        epilog=f"example: python -m stratalloc hook --install && {VARIABLE}=1 python train.py",
        allow_abbrev=False,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", action="store_true", help=f"write the file {_NAME}")
    action.add_argument("--remove", action="store_true", help="remove it")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=sysconfig.get_path("purelib"),
        help="folder of packages (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    path = options.folder / _NAME
    try:
        if options.remove:
            path.unlink()
            print(f"removed: {path}")
            return
        with _files.replacing(path) as file:
            file.write(_LINE.encode())
    except OSError as error:
        raise LibraryError(f"{path}: {error.strerror}") from error
    probe = "import sys; print('stratalloc._startup' in sys.modules)"
    environment = {**os.environ, VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    if done.stdout.strip() != "True":
        path.unlink()
        raise LibraryError(
            f"{path}: Python does not read this file at its start, or does not find the package then"
        )
    print(f"written: {path}; programs with {VARIABLE}=1 are watched")
