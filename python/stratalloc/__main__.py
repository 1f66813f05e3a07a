"""``python -m stratalloc``: runs a program with the library, or the library's command line.

run [--conf CONF] [--library PATH] PROGRAM ARGUMENTS..     runs a program, or ``-m MODULE``, whose PyTorch
                                                           uses the library
hook --install | --remove                                  lets programs that have STRATALLOC_WATCH=1 watch
                                                           their memory, without a change to them
preload                                                    prints the path of the library that measures which
                                                           libraries use the device, for LD_PRELOAD
anything else                                              goes to the command line: report, advise, compare ..
"""

import argparse
import os
import runpy
import sys

from . import _account, _command, _startup
from ._errors import Error, LibraryError


def main(arguments):
    if arguments[:1] == ["run"]:
        return _run(arguments[1:])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    try:
        if arguments[0] == "hook":
            return _startup.hook(arguments[1:])
        if arguments[0] == "preload":
            return _preload(arguments[1:])
        return _command.run(arguments)
    except LibraryError as error:
        return _refused(error)


def _run(arguments):
    parser = argparse.ArgumentParser(prog="python -m stratalloc run", allow_abbrev=False)
    parser.add_argument("--conf", help="configuration string; without it the environment decides")
    parser.add_argument("--library", help="path of the shared library")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    from . import install

    try:
        install(options.library, options.conf)
    except (Error, LibraryError) as error:
        return _refused(error)
    # As Python itself does: sets the program's arguments, and its folder as the first on the path.
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(options.program):
            return _refused(f"there is no program {options.program}")
        sys.path[0] = os.path.dirname(os.path.abspath(options.program))
        runpy.run_path(options.program, run_name="__main__")
    return 0


def _preload(arguments):
    argparse.ArgumentParser(
        prog="python -m stratalloc preload",
        description="Prints the path of the library that measures which libraries use a device.",
        epilog="example: LD_PRELOAD=$(python -m stratalloc preload) python train.py",
        allow_abbrev=False,
    ).parse_args(arguments)
    print(_account.preloaded())
    return 0


def _refused(error):
    print(f"stratalloc: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
