"""The options of ``watch``, from arguments and from the environment."""

import os
import re
import signal as signals

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def options(given, report):
    """Returns all options, parsed. Those that are ``None`` come from the environment. Calls ``report`` with
    an error in the environment."""
    found = {}
    for name, (parse, default) in _OPTIONS.items():
        variable = f"STRATALLOC_WATCH_{name.upper()}"
        found[name] = default if default is None else parse(default)
        text = os.environ.get(variable)
        try:
            if given[name] is not None:
                found[name] = parse(given[name])
            elif text:
                found[name] = parse(text)
        except ValueError as error:
            if given[name] is not None:
                raise ValueError(f"{name}: {error}") from None
            report(f"stratalloc: watch: {variable}: {error}; the default is used")
    return found


def _refused(expected, value):
    return ValueError(f"expected {expected}, got {ascii(value)[:80]}")


def _folder(value):
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or "\0" in path:
        raise _refused("a folder", value)
    return os.path.abspath(path)


def _number(least, most):
    def parse(value):
        if not re.fullmatch("[0-9]{1,12}", str(value)) or not least <= int(value) <= most:
            raise _refused(f"a whole number from {least} to {most}", value)
        return int(value)

    return parse


def _size(value):
    found = re.fullmatch("([0-9]{1,12}) ?([KMG]?)(i?B)?", str(value))
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 1 << 20 <= size <= 1 << 40:
        raise _refused("a size from 1MiB to 1024GiB", value)
    return size


def _signal(value):
    name = str(value).upper()
    for one in signals.Signals:
        if name in (one.name, one.name.removeprefix("SIG"), str(one.value)):
            return one
    raise _refused("a signal such as USR1", value)


_OPTIONS = {
    "folder": (_folder, "stratalloc-watch"),
    "files": (_number(1, 10_000), 3),
    "ring": (_size, "64MiB"),
    "seconds": (_number(1, 3600), 20),
    "pause": (_number(0, 1_000_000), 60),
    "every": (_number(0, 10**9), 0),
    "signal": (_signal, None),
}
