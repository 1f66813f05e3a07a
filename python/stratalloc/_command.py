"""Finds and runs the command line, a separate program."""

import os
import pathlib
import subprocess
import sys

from . import _library
from ._errors import LibraryError

VARIABLE = "STRATALLOC_COMMAND"
# Commands of this package; all others are the program's.
PACKAGE_COMMANDS = ("run", "hook", "preload")
_NAME = "stratalloc.exe" if sys.platform == "win32" else "stratalloc"


def find():
    """Returns the path of the program. Searches ``STRATALLOC_COMMAND``, the package, the folder of the
    library, and ``PATH``, in this order."""
    path = os.environ.get(VARIABLE)
    if path:
        if not os.path.isfile(path):
            raise LibraryError(f"{VARIABLE}: there is no program {path}")
        return os.path.abspath(path)
    folders = [pathlib.Path(__file__).parent / "bin"]
    library = os.environ.get(_library.VARIABLE)
    if library:
        folders.append(pathlib.Path(library).resolve().parent)
    for folder in folders:
        if os.access(folder / _NAME, os.X_OK) and (folder / _NAME).is_file():
            return str(folder / _NAME)
    for folder in os.get_exec_path():
        path = os.path.join(folder, _NAME)
        if os.path.isfile(path) and os.access(path, os.X_OK) and not _is_script(path):
            return path
    raise LibraryError(
        f"the command line is not found: build it with 'cargo build --release' and name it with {VARIABLE}"
    )


def _is_script(path):
    """Returns true for the script that pip installs. It calls ``main`` of this module."""
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def main():
    """The script ``stratalloc`` that pip installs: runs the command line in its place, or a command of the
    package."""
    if sys.argv[1:2] and sys.argv[1] in PACKAGE_COMMANDS:
        from . import __main__ as package

        return package.main(sys.argv[1:])
    try:
        path = find()
    except LibraryError as error:
        print(f"stratalloc: {error}", file=sys.stderr)
        return 2
    if os.name == "posix":
        os.execv(path, [path, *sys.argv[1:]])
    return run(sys.argv[1:])


def run(arguments):
    """Runs the command line with the program's own streams, and returns its exit code."""
    return subprocess.run([find(), *arguments], check=False).returncode
