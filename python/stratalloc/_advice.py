"""Advice from the command line about recordings: of this program, or of many ranks at once."""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile

from . import _command, _torch
from ._errors import LibraryError


def advise(device=None, quick=True):
    """Returns settings with which this program needs less memory, from the history recorded so far. The
    result is the object that ``stratalloc advise --json`` writes, for the running version of PyTorch. Its
    key ``sentence`` is a summary in one sentence. Recording must be on."""
    running = str(getattr(sys.modules.get("torch"), "__version__", ""))
    # The command line knows only versions 2.x.
    options = _options(quick, running if running.startswith("2.") else None)
    with tempfile.TemporaryDirectory(prefix="stratalloc-") as folder:
        path = os.path.join(folder, "run.pickle")
        _torch.dump_snapshot(path, device)
        return _advice_of(_command.find(), path, options)


def sweep(paths, executor=None, quick=True, torch=None):
    """Returns one setting for many recordings, such as those of all ranks. The command line analyses each
    recording, on ``executor``, which is any executor of ``concurrent.futures``. The default executor uses
    threads of this process. Workers on other machines need the command and the files at the same paths.
    ``torch`` is the version of PyTorch that must accept the setting, such as "2.8". The default is the
    version that a recording names, if it names one.

    Returns a dictionary. ``rows`` has an entry for each recording: its result, or an ``error``. ``worst``
    names the recording that needs the most memory. ``advice`` is the setting with which all recordings
    run in the least memory, and the bytes needed with it. ``table`` is the result as text.
    """
    command, paths = _command.find(), [os.fspath(path) for path in paths]
    if not paths:
        raise ValueError("paths: expected one recording or more")
    if executor is None:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as own:
            return _sweep(command, paths, own, _options(quick, torch))
    return _sweep(command, paths, executor, _options(quick, torch))


def _options(quick, torch):
    return [*(["--quick"] if quick else []), *(["--torch", str(torch)] if torch else [])]


def _sweep(command, paths, executor, options):
    rows = _all(executor, paths, _tried_advice_of, command, options)
    good = [row for row in rows if "error" not in row]
    if not good:
        raise LibraryError(f"{rows[0]['recording']}: {rows[0]['error']}")
    # The best setting for one recording may be bad for another, so each best setting is tried on all
    # recordings.
    candidates = sorted({row["best_conf"] for row in good})
    needs = _all(
        executor, [row["recording"] for row in good], _needs_of, command, candidates
    )
    worst = max(good, key=lambda row: row["needs_bytes"] or 0)
    fits = []
    for at, conf in enumerate(candidates):
        of_all = [of[at] for of in needs]
        if None not in of_all:
            fits.append((max(of_all), sum(of_all), conf))
    result = {"rows": rows, "worst": worst["recording"], "advice": None}
    if fits:
        most, _, conf = min(fits)
        result["advice"] = {"conf": conf, "needs_bytes": most}
    result["table"] = _table(result)
    return result


def _all(executor, paths, function, *arguments):
    """Returns the function's result for each path, in order."""
    futures = [executor.submit(function, arguments[0], path, *arguments[1:]) for path in paths]
    return [future.result() for future in futures]


def _json_of(command, *arguments):
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LibraryError(lines[0])
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def _advice_of(command, path, options):
    (advice,) = _json_of(command, "advise", "--json", *options, path)
    return advice


def _tried_advice_of(command, path, options):
    try:
        advice = _advice_of(command, path, options)
    except LibraryError as error:
        return {"recording": path, "error": str(error)}
    # If no setting is worth its cost, the recorded setting is kept.
    best = advice["choice"] or advice["recorded"]
    return {
        "recording": path,
        "needs_bytes": advice["recorded"]["needs_bytes"],
        "best_conf": best["conf"],
        "best_needs_bytes": best["needs_bytes"],
        "sentence": advice["sentence"],
    }


def _needs_of(command, path, confs):
    options = [word for conf in confs for word in ("--conf", conf)]
    return [row["needs_bytes"] for row in _json_of(command, "compare", "--json", *options, path)]


def _table(result):
    lines = [f"{'needs MiB':>12} {'at best MiB':>12}  recording"]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"{'':12} {'':12}  {row['recording']}: {row['error']}")
            continue
        mark = "  (most)" if row["recording"] == result["worst"] else ""
        cells = [_mib(row[key]) for key in ("needs_bytes", "best_needs_bytes")]
        lines.append(f"{cells[0]:>12} {cells[1]:>12}  {row['recording']}{mark}")
    advice = result["advice"]
    if advice is None:
        lines.append("No setting that is chosen for one recording suits all.")
    else:
        lines.append(f"For all: {advice['conf'] or 'the defaults'}, in {_mib(advice['needs_bytes'])} MiB.")
    return "\n".join(lines)


def _mib(size_bytes):
    return "?" if size_bytes is None else f"{size_bytes / 2**20:,.0f}"
