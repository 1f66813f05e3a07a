"""Analyses a snapshot with the command line, for the reports of ``watch``."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time

from . import _command, _files
from ._errors import LibraryError

# The number of lines of code that a report names.
_HOLDERS = 3


def analyse(path, device, version, seconds):
    """Writes the page beside a snapshot, and returns the lines of a report. ``device`` may be ``None``, which
    means the one that failed first, else the one with the most reserved bytes. Raises an exception if the lines
    are not there after the number of ``seconds``. A page that is not complete then is not written."""
    command, until = _command.find(), time.monotonic() + seconds
    # The search gets half of the time: the files must be read and written too.
    words = ["--quick", path, "--seconds", str(int(seconds / 2))]
    # The command line knows only versions 2.x.
    known = re.match(r"2\.[0-9]+", version)
    words += ["--torch", known[0] + ("+rocm" if "+rocm" in version else "")] if known else []
    words += [] if device is None else ["--recorded-device", str(device)]
    with contextlib.ExitStack() as ends:

        def start(command, *words, output):
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen([command, *words], **streams, text=True, errors="replace")
            ends.enter_context(process)
            ends.callback(process.kill)
            return process

        # In a folder that is removed with all that the program leaves if it is killed.
        target = page_of(path)
        folder = tempfile.TemporaryDirectory(dir=os.path.dirname(target) or ".", prefix=".stratalloc-")
        written = os.path.join(ends.enter_context(folder), os.path.basename(target))
        page = start(command, "report", "--output", written, *words, output=subprocess.DEVNULL)
        advise = start(command, "advise", "--json", *words, output=subprocess.PIPE)
        try:
            output, errors = advise.communicate(timeout=max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise LibraryError(f"it takes more than {seconds} s") from None
        if advise.returncode != 0:
            raise LibraryError((errors.strip().splitlines() or [f"exit code {advise.returncode}"])[0])
        # The program may fail, and then writes no page.
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            page.wait(max(until - time.monotonic(), 0))
            _files.move(written, target)
        return _lines_of(json.loads(output.splitlines()[0]))


def _lines_of(advice):
    """Returns the lines of a report from the object that ``advise --json`` writes."""
    lines = [advice["devices_sentence"]] if advice.get("devices_sentence") else []
    lines += [advice["causes"]["why"]] if advice["causes"] else []
    has_history = advice.get("headline") != "no history"
    holders = advice["holders"] or {"by_stack": [], "requested_bytes": 0}
    for row in holders["by_stack"][:_HOLDERS]:
        share = 100 * row["requested_bytes"] / (holders["requested_bytes"] or 1)
        blocks = f"{row['blocks']:,} block{'' if row['blocks'] == 1 else 's'}"
        size = f"{row['requested_bytes'] / 2**20:,.1f} MiB ({share:.0f} %)"
        lines.append(f"held: {size} in {blocks}: {row['asked_for_by']}")
    moment = (advice.get("moments") or [{}])[0]
    if moment.get("categories"):
        shares = (f"{row['category']} {100 * row['share']:.0f} %" for row in moment["categories"])
        lines.append("by category: " + ", ".join(shares))
    lines += [advice["code"]] if advice.get("code") else []
    growth = advice.get("growth") or {}
    # A decisive growth is part of the sentence.
    if growth.get("is_growing") and not growth["is_decisive"]:
        lines.append(growth["sentence"])
    if not has_history:
        return [advice["sentence"], *lines]
    return [*lines, advice["sentence"], *(f"set: {line}" for line in advice["set"][:1])]


def page_of(path):
    """Returns the path of the page beside a snapshot."""
    return path.removesuffix(".pickle") + ".html"
