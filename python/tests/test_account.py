"""The owners of a device's used memory, with replacements of PyTorch and of the command line."""

import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

import stratalloc
from stratalloc import _account, _watch
from stratalloc._errors import LibraryError

MIB = 1 << 20
TOTAL = 80_000 * MIB
# Lists this program, the test and another process.
COMMAND = """#!{python}
import json, os, sys
assert sys.argv[1:] == ["info", "--json", "--device", "cuda:0"], sys.argv
sizes = {{os.getpid(): 500, os.getppid(): 3700, 77: 100}}
processes = [dict(process=process, bytes=size << 20) for process, size in sizes.items()]
print(json.dumps(dict(devices=[dict(processes=processes)])))
"""
CALLS = {
    "devices": [
        {
            "device": 0,
            "first_used_bytes": 610 * MIB,
            "rows": [
                {"library": "libc10_cuda.so", "kind": "allocations", "bytes": 2510 * MIB, "calls": 9},
                {"library": "libcublasLt.so.13", "kind": "kernels", "bytes": 2 * MIB, "calls": 1},
                {"library": "libcublas.so.13", "kind": "allocations", "bytes": 128 * MIB, "calls": 3},
                {"library": "libnccl.so.2", "kind": "allocations", "bytes": 388 * MIB, "calls": 9},
                {"library": "libtorch_cuda.so", "kind": "graphs", "bytes": 12 * MIB, "calls": 2},
                {"library": "other.so", "kind": "graphs", "bytes": 3 * MIB, "calls": 2},
                {"library": "other.so", "kind": "streams and events", "bytes": 0, "calls": 2},
            ],
        }
    ]
}


def segment(pool, reserved, live, device=0):
    sizes = {"total_size": reserved * MIB, "active_size": live * MIB}
    return {"device": device, "segment_pool_id": pool, **sizes}


def torch_using(used, segments):
    """A replacement of PyTorch. ``used`` is a list with the used bytes of the device."""
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda device: None,
        mem_get_info=lambda device: (TOTAL - used[0], TOTAL),
        memory_stats=lambda device: {"reserved_bytes.all.current": sum(one["total_size"] for one in segments)},
        memory_snapshot=lambda: segments,
    )
    torch = types.ModuleType("torch")
    torch.cuda, torch.device = cuda, type("device", (), {})
    torch._C = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda device: True)
    return torch


class Accounts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.command = self.folder / "stratalloc"
        self.command.write_text(COMMAND.format(python=sys.executable))
        self.command.chmod(0o755)
        self.segments = [
            segment((0, 0), 2000, 1500),
            segment((0, 0), 10, 0),
            segment((0, 3), 300, 200),
            segment((7, 0), 200, 200),
            segment((0, 0), 999, 999, device=1),
        ]
        self.used = [3800 * MIB]
        _account._measured.clear()
        _account._contexts.clear()
        for patch in (
            mock.patch.dict(sys.modules, torch=torch_using(self.used, self.segments)),
            mock.patch.dict(os.environ, STRATALLOC_COMMAND=str(self.command)),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def rows(self, account=None):
        account = stratalloc.account() if account is None else account
        self.assertEqual(sum(row["bytes"] for row in account["rows"]), account["used_bytes"])
        return [(row["owner"], row["kind"], row["bytes"] // MIB) for row in account["rows"]]

    def measured_calls(self):
        """Replaces the library that measures the calls of the driver."""
        found = CALLS["devices"][0]
        calls = found["first_used_bytes"], [(row["library"], row["kind"], row["bytes"]) for row in found["rows"]]
        return mock.patch.object(_account, "_calls", lambda device: calls)

    def test_the_allocator_the_context_and_other_processes_have_rows(self):
        expected = [
            ("allocator", "live tensors", 1500),
            ("allocator", "idle cache", 510),
            ("allocator", "live in 2 private pools", 400),
            ("allocator", "idle in 2 private pools", 100),
            ("context", "of a process that does nothing", 500),
            ("this process", "other libraries and kernels", 3700 - 3010),
            ("process 77", "all of it", 100),
            ("unknown", "", 0),
        ]
        account = stratalloc.account()
        self.assertEqual(self.rows(account), expected)
        self.assertEqual((account["process"], account["device"], account["total_bytes"]), (os.getpid(), 0, TOTAL))
        self.assertIn("device 0: 3,800.0 of 80,000.0 MiB used", account["table"])
        self.assertEqual(len(account["table"].splitlines()), len(expected) + 3)

    def test_libraries_have_rows_if_calls_are_measured(self):
        self.used[0] = (610 + 2510 + 2 + 128 + 388 + 15 + 5) * MIB
        with self.measured_calls():
            rows = self.rows()
        expected = [
            ("NCCL", "allocations", 388),
            ("cuBLAS", "allocations", 128),
            ("CUDA graphs", "graphs", 15),
            ("cuBLAS", "kernels", 2),
            ("process 77", "all of it", 100),
            ("driver", "used before the first measured call", 10),
            ("unknown", "", 5),
        ]
        self.assertEqual(rows[5:], expected)
        # A process that used memory before has ended.
        self.used[0] -= 22 * MIB
        with self.measured_calls():
            self.assertEqual(self.rows()[-2:], [("process 77", "all of it", 100), ("unknown", "", -7)])

    def test_the_library_may_have_any_name(self):
        calls = 610 * MIB, [("other-name.so", "allocations", 2510 * MIB)]
        loaded = types.SimpleNamespace(path="/lib/other-name.so")
        with mock.patch.object(_account, "_calls", lambda device: calls):
            with mock.patch("stratalloc._library._loaded", loaded):
                self.assertFalse([row for row in self.rows() if row[0] in ("PyTorch", "other-name.so")])
            self.assertIn(("other-name.so", "allocations", 2510), self.rows())

    def test_a_pool_may_get_its_memory_from_another_library(self):
        self.segments.append(segment((9, 0), 300, 300))
        with self.measured_calls():
            rows = stratalloc.account()["rows"]
        self.assertFalse([row for row in rows if row["owner"] == "PyTorch"])

    def test_growth_outside_the_allocator_gets_the_name_of_a_block(self):
        with stratalloc.measure("NCCL"):
            self.used[0] += 300 * MIB
            with stratalloc.measure("empty"):
                self.segments[0]["total_size"] += 50 * MIB
                self.used[0] += 50 * MIB
            with stratalloc.measure("inner"):
                self.used[0] += 70 * MIB
            self.used[0] += 100 * MIB
        rows = dict((owner, size) for owner, _, size in self.rows())
        self.assertEqual((rows["NCCL"], rows["inner"]), (400, 70))
        self.assertNotIn("empty", rows)
        with self.measured_calls():
            self.assertNotIn("measure()", [row["found_by"] for row in stratalloc.account()["rows"]])

    def test_without_the_command_line_the_rest_is_unknown(self):
        for broken in ("exit(1)", "print('no JSON')", "print('{\"devices\": [{}]}')"):
            self.command.write_text(f"#!{sys.executable}\n{broken}\n")
            last = ("unknown", "context, libraries, other processes", 3800 - 2510)
            self.assertEqual(self.rows()[4:], [last])
        with self.measured_calls():
            last = self.rows()[-2:]
        kind = "used before the first measured call"
        self.assertEqual(last[0], ("context, driver and other processes", kind, 610))

    def test_the_drivers_pools_have_sums_only(self):
        torch = sys.modules["torch"]
        torch.cuda.memory_snapshot = mock.Mock(side_effect=RuntimeError("no segments"))
        stats = {"reserved_bytes.all.current": 70 * MIB, "active_bytes.all.current": 30 * MIB}
        torch.cuda.memory_stats = lambda device: stats
        expected = [("allocator", "live tensors", 30), ("allocator", "idle cache", 40)]
        self.assertEqual(self.rows()[:2], expected)
        # CUDAPluggableAllocator has no statistics; the library has its own.
        torch.cuda.memory_stats = mock.Mock(side_effect=RuntimeError("no statistics"))
        with mock.patch("stratalloc._torch.memory_stats", lambda device: stats):
            self.assertEqual(self.rows()[:2], expected)

    def test_the_history_is_not_converted_for_an_account(self):
        calls = []
        snapshot = lambda include_traces=True: calls.append(include_traces) or self.segments  # noqa: E731
        sys.modules["torch"].cuda.memory_snapshot = snapshot
        self.rows()
        self.assertEqual(calls, [False])

    def test_a_tag_that_sleeps_has_the_bytes_that_it_maps(self):
        tag = {"pool": (7, 0), "state": "asleep", "mapped_bytes": 0, "live_bytes": 200 * MIB}
        tags = {"weights": {**tag, "backed_bytes": 200 * MIB}}
        with mock.patch.object(_account, "_tags", lambda device: tags):
            self.used[0] -= 200 * MIB
            rows = self.rows()
        self.assertIn(("allocator", "tag weights, asleep, 200.0 MiB in its backup", 0), rows)
        self.assertIn(("allocator", "live in private pool", 200), rows)

    def test_a_program_without_cuda_is_refused(self):
        sys.modules["torch"].cuda.is_initialized = lambda: False
        with self.assertRaisesRegex(LibraryError, "does not use CUDA yet"):
            stratalloc.account()
        self.assertEqual(_account._accounts(), {"accounts": []})

    def test_a_device_that_does_not_exist_is_refused(self):
        for wrong in (1, -1, "0", 1.5):
            with self.assertRaises((ValueError, TypeError)):
                stratalloc.account(wrong)

    @unittest.skipUnless(sys.platform.startswith("linux"), "the socket's name needs Linux")
    def test_other_programs_of_the_user_can_read_it(self):
        _account.serve()
        _account.serve()
        threads = [thread.name for thread in threading.enumerate()]
        self.assertEqual(threads.count("stratalloc-account"), 1)
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as reader:
                reader.settimeout(60)
                reader.connect(_account.socket_name())
                text = b"".join(iter(lambda: reader.recv(4096), b""))
            (account,) = json.loads(text)["accounts"]
            self.assertEqual(self.rows(account)[0], ("allocator", "live tensors", 1500))

    @unittest.skipUnless(sys.platform.startswith("linux"), "the socket's name needs Linux")
    def test_readers_are_accepted_while_an_account_is_made(self):
        made, may_end = threading.Semaphore(0), threading.Event()

        def accounts():
            made.release()
            may_end.wait()
            return {"accounts": []}

        def reader():
            one = socket.socket(socket.AF_UNIX)
            self.addCleanup(one.close)
            one.settimeout(60)
            one.connect(_account.socket_name())
            return one

        text = lambda one: json.loads(b"".join(iter(lambda: one.recv(4096), b"")))  # noqa: E731
        _account.serve()
        with mock.patch.object(_account, "_accounts", accounts):
            first = reader()
            made.acquire()
            waiting = [reader() for _ in range(_account._READERS)]
            refused = [text(reader()) for _ in range(3 * _account._READERS)]
            may_end.set()
            self.assertEqual([text(one) for one in [first, *waiting]], [{"accounts": []}] * (len(waiting) + 1))
        self.assertEqual(refused, [{"error": "too many programs read its account"}] * len(refused))
        # The next account is for all that waited.
        self.assertTrue(made.acquire(blocking=False) and not made.acquire(blocking=False))

    @unittest.skipUnless(sys.platform.startswith("linux"), "the socket's name needs Linux")
    def test_other_users_are_not_served(self):
        _account.serve()
        with mock.patch.object(_account.os, "getuid", lambda: 4711), mock.patch.object(_account, "_ROOT", 4712):
            with socket.socket(socket.AF_UNIX) as reader:
                reader.settimeout(60)
                reader.connect(_account.socket_name())
                self.assertEqual(reader.recv(4096), b"")

    def test_a_snapshot_of_watch_has_the_owners(self):
        watcher = _watch.Watcher(sys.modules["torch"], {"folder": str(self.folder), "files": 3})
        stratalloc.account()
        taken = {"segments": self.segments, "device_traces": []}
        with mock.patch("stratalloc._torch._snapshot", lambda device: taken):
            path = watcher.snapshot()
        rows = json.loads(pickle.loads(pathlib.Path(path).read_bytes())["account"])
        self.assertEqual(sum(row["bytes"] for row in rows), self.used[0])
        # The bytes of a context are known from the first call.
        owners = [(row["device"], row["owner"]) for row in rows]
        self.assertIn((0, "context"), owners)
        self.assertEqual(owners[-1], (0, "unknown"))

    def test_the_path_for_the_linker_is_printed(self):
        library = self.folder / "libstratalloc_account.so"
        environment = {**os.environ, "STRATALLOC_LIBRARY": str(self.folder / "libstratalloc.so")}
        command = [sys.executable, "-m", "stratalloc", "preload"]
        run = lambda: subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: E731
        missing = run()
        self.assertEqual((missing.returncode, missing.stdout), (2, ""))
        self.assertIn("cargo build", missing.stderr)
        library.write_text("")
        self.assertEqual(run().stdout.strip(), str(library))


if __name__ == "__main__":
    unittest.main()
