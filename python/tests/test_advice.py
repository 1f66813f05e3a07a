"""Advice about recordings, from a replacement of the command line with fixed results."""

import concurrent.futures
import json
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import stratalloc
from stratalloc import _advice

# Two ranks with different best settings, and a file that is no recording.
COMMAND = """#!{python}
import json, sys
name = sys.argv[-1].rsplit("/", 1)[-1]
if name == "broken":
    sys.exit("error: broken: it is no recording")
needs = {{"one": {{"": 100, "a": 60, "b": 70}}, "two": {{"": 200, "a": 190, "b": 90}}}}[name]
if sys.argv[1] == "advise":
    assert sys.argv[2:-1] in (["--json", "--quick"], ["--json", "--quick", "--torch", "2.8"])
    best = min(needs, key=needs.get)
    recorded = {{"conf": "", "needs_bytes": needs[""] << 20}}
    best = {{"conf": best, "needs_bytes": needs[best] << 20}}
    print(json.dumps({{"sentence": name, "recorded": recorded, "choice": best}}))
else:
    confs = [sys.argv[at + 1] for at, word in enumerate(sys.argv) if word == "--conf"]
    for conf in confs:
        print(json.dumps({{"conf": conf, "needs_bytes": needs[conf] << 20}}))
"""


class Sweep(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        command = pathlib.Path(folder.name) / "stratalloc"
        command.write_text(COMMAND.format(python=sys.executable))
        command.chmod(0o755)
        patched = mock.patch.dict(os.environ, {"STRATALLOC_COMMAND": str(command)})
        patched.start()
        self.addCleanup(patched.stop)

    def test_one_setting_is_found_for_all(self):
        for executor in (None, concurrent.futures.ThreadPoolExecutor(2), concurrent.futures.ProcessPoolExecutor(1)):
            found = stratalloc.sweep(["/r/one", pathlib.Path("/r/two"), "/r/broken"], executor)
            self.assertEqual(found["worst"], "/r/two")
            self.assertEqual(found["advice"], {"conf": "b", "needs_bytes": 90 << 20})
            self.assertEqual([row.get("best_conf") for row in found["rows"]], ["a", "b", None])
            self.assertIn("it is no recording", found["rows"][2]["error"])
            self.assertIn("         200           90  /r/two  (most)\n", found["table"])
            self.assertIn("For all: b, in 90 MiB.", found["table"])
            self.assertEqual(stratalloc.sweep(["/r/one", "/r/two"], executor, torch="2.8")["advice"]["conf"], "b")
            if executor:
                executor.shutdown()

    def test_what_is_no_recording_is_refused(self):
        with self.assertRaisesRegex(stratalloc.LibraryError, "/r/broken: .*it is no recording"):
            stratalloc.sweep(["/r/broken"])
        with self.assertRaises(ValueError):
            stratalloc.sweep([])

    def test_a_program_gets_advice_about_itself(self):
        written = []

        def dump(path, device):
            written.append((path, device))

        running = mock.Mock(__version__="2.8.1+cu128")
        with mock.patch.object(_advice._torch, "dump_snapshot", dump), mock.patch.dict(sys.modules, torch=running):
            with mock.patch.object(_advice, "_json_of", lambda *words: [json.dumps(words)]):
                arguments = json.loads(stratalloc.advise(1, quick=False))
        self.assertEqual(arguments[1:5], ["advise", "--json", "--torch", "2.8.1+cu128"])
        self.assertEqual((written[0][0], written[0][1]), (arguments[-1], 1))


if __name__ == "__main__":
    unittest.main()
