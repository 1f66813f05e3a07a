"""Sweeps of many ranks: every executor returns what the command line returns."""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
import unittest.mock
import warnings

import stratalloc
from stratalloc import _command

MIB = 1 << 20


def recording(rank, odd):
    """Returns the recording of a rank, with addresses and a stream of its own."""
    entries, segments = [], []
    for at in range(12):
        size, address = (at + 2 + (8 if at == 7 and odd else 0)) * MIB, (rank + 1 << 40) + (at << 32)
        place = {"addr": address, "size": size, "stream": (rank + 1) * 4096 if at % 4 == 3 else 0}
        actions = ["segment_alloc", "alloc", *(["free_requested", "free_completed"] if at % 3 == 2 else [])]
        entries += [{"action": action, "time_us": rank * 1000 + at, **place} for action in actions]
        block = {"address": address, "size": size, "state": "active_allocated" if at % 3 < 2 else "inactive"}
        segments.append({"device": 0, "address": address, "total_size": size, "blocks": [block]})
        segments[-1]["stream"] = place["stream"]
    return {"segments": segments, "device_traces": [entries]}


def is_missing(package):
    return importlib.util.find_spec(package) is None


class Sweep(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.paths = [cls.folder / f"rank{rank}.json" for rank in range(40)]
        for rank, path in enumerate(cls.paths):
            path.write_text(json.dumps(recording(rank, rank == 29)))
        cls.broken = cls.folder / "broken.json"
        cls.broken.write_text("no recording")
        cls.paths.insert(3, cls.broken)
        cls.alone = stratalloc.sweep(cls.paths)

    def check(self, executor):
        self.assertEqual(stratalloc.sweep(self.paths, executor), self.alone)

    def test_the_odd_rank_is_found_and_one_setting_for_all(self):
        found, odd = self.alone, str(self.folder / "rank29.json")
        self.assertEqual([len(group["recordings"]) for group in found["groups"]], [39, 1])
        self.assertEqual((found["worst"], found["groups"][1]["recordings"]), (odd, [odd]))
        request = found["groups"][1]["difference"]["requests"][1]
        self.assertEqual((request["request"], request["bytes"]), (8, 17 * MIB))
        self.assertEqual([row["recording"] for row in found["rows"]], [str(path) for path in self.paths])
        self.assertIn("broken.json: ", found["rows"][3]["error"])
        most = max(row["best_needs_bytes"] for row in found["rows"] if "error" not in row)
        self.assertGreaterEqual(found["advice"]["needs_bytes"], most)
        self.assertIn("For 40 of 41 recordings (1 has no result): ", found["table"])

    def test_the_advice_can_be_pasted(self):
        advice = self.alone["advice"]
        self.assertNotIn("compat", advice["conf"])
        self.assertEqual(advice["paste"].partition("=")[2], advice["conf"])
        self.assertRegex(advice["paste_for"], "^(PyTorch 2|stratalloc)")

    def test_the_command_line_returns_the_same(self):
        words = [_command.find(), "sweep", "--quick", *map(str, self.paths)]
        table = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual(table.stdout.rstrip("\n"), self.alone["table"])
        lines = subprocess.run([*words, "--json"], capture_output=True, text=True)
        found = json.loads(lines.stdout.splitlines()[-1])
        found["advice"]["conf"] = self.alone["advice"]["conf"]
        self.assertEqual(found, self.alone)
        # One file is no recording.
        self.assertEqual((table.returncode, lines.returncode), (2, 2))

    def test_threads_and_processes_return_the_same(self):
        for executors in (concurrent.futures.ThreadPoolExecutor, concurrent.futures.ProcessPoolExecutor):
            with executors(2) as executor:
                self.check(executor)

    def test_all_the_work_is_done_on_the_workers(self):
        left = []

        def result(command, options, paths):
            with open(options[1], encoding="utf-8") as state:
                before = state.read()
            done = subprocess.run([command, "sweep", *options, *paths], capture_output=True, text=True)
            with open(options[1], encoding="utf-8") as state:
                left.append(len(state.read()) - len(before))
            return done.returncode

        with unittest.mock.patch("stratalloc._sweep._result", result):
            with concurrent.futures.ThreadPoolExecutor(2) as executor:
                self.assertEqual(stratalloc.sweep(self.paths, executor), 2)
        self.assertEqual(left, [0])

    def test_relative_paths_and_other_options_reach_the_workers(self):
        page, here = self.folder / "page.html", os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.folder)
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            given = ["rank0.json", f"../{self.folder.name}/./rank29.json"]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = stratalloc.sweep(given, executor, torch="2.8", output=page)
        self.assertEqual(found, stratalloc.sweep(given, torch="2.8"))
        self.assertIn("rank29.json", page.read_text())

    def test_files_that_the_workers_do_not_have_are_analysed_here(self):
        class Elsewhere(concurrent.futures.ThreadPoolExecutor):
            def submit(self, function, command, options, paths):
                return super().submit(function, command, options, [f"/nowhere{path}" for path in paths])

        with Elsewhere(2) as executor, self.assertWarnsRegex(RuntimeWarning, "analysed here"):
            self.assertEqual(stratalloc.sweep(self.paths, executor), self.alone)

    def test_a_worker_that_fails_cancels_the_others(self):
        class Failing(concurrent.futures.Executor):
            futures = []

            def submit(self, *_):
                self.futures.append(concurrent.futures.Future())
                if len(self.futures) == 2:
                    self.futures[0].set_exception(OSError("no command"))
                return self.futures[-1]

        with self.assertRaisesRegex(OSError, "no command"):
            stratalloc.sweep(self.paths, Failing())
        self.assertTrue(all(future.cancelled() for future in Failing.futures[1:]))

    def test_a_command_line_that_ends_early_is_an_error(self):
        command = self.folder / "broken-command"
        with unittest.mock.patch.dict(os.environ, STRATALLOC_COMMAND=str(command)):
            for text in ("kill -9 $$", "echo '{}'; echo not possible >&2; exit 3", "echo '{'; exit 1"):
                command.write_text(f"#!/bin/sh\n{text}\n")
                command.chmod(0o755)
                with self.assertRaises(stratalloc.LibraryError) as raised:
                    stratalloc.sweep(self.paths)
                self.assertIn("not possible" if "possible" in text else "ended with code", str(raised.exception))

    @unittest.skipIf(is_missing("distributed"), "distributed (Dask) is not installed")
    def test_two_workers_of_dask_return_the_same(self):
        import distributed

        options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
        with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
            self.check(client.get_executor())

    @unittest.skipIf(is_missing("ray"), "ray is not installed")
    def test_two_workers_of_ray_return_the_same(self):
        import ray

        # Without this, Ray writes a token to the home folder.
        with unittest.mock.patch.dict(os.environ, RAY_AUTH_MODE="disabled"):
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        self.addCleanup(ray.shutdown)
        self.check(stratalloc.RayExecutor())
        self.check(stratalloc.RayExecutor(num_cpus=2))

    def test_what_is_no_recording_is_refused(self):
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            for executor in (None, executor):
                with self.assertRaisesRegex(stratalloc.LibraryError, "broken.json: "):
                    stratalloc.sweep([self.broken], executor)
        with self.assertRaises(ValueError):
            stratalloc.sweep([])


if __name__ == "__main__":
    unittest.main()
