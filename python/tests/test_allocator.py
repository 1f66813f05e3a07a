"""Allocators without PyTorch, on devices that every machine has."""

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import unittest

import stratalloc
from stratalloc import Allocator, Error, OutOfMemoryError

DEVICES = ("sim", "host")


class Use(unittest.TestCase):
    def test_blocks_come_and_go(self):
        for device in DEVICES:
            with self.subTest(device), Allocator("backend:native", device) as allocator:
                a, b = allocator.allocate(1 << 20), allocator.allocate(100, stream=7)
                self.assertNotEqual(a, b)
                allocator.record_stream(a, 7)
                stats = allocator.memory_stats()
                self.assertEqual(stats["allocation.all.current"], 2)
                self.assertEqual(len(stats), 127)
                self.assertIn("allocated_bytes", allocator.memory_summary())
                allocator.free(a)
                allocator.free(b)
                allocator.free(allocator.allocate(0))
                allocator.empty_cache()
                self.assertEqual(allocator.memory_stats()["reserved_bytes.all.current"], 0)

    def test_an_allocator_is_switched_while_blocks_live(self):
        for device in DEVICES:
            with self.subTest(device), Allocator("backend:native", device) as allocator:
                a = allocator.allocate(1 << 20)
                allocator.switch("backend:native,expandable_segments:True")
                b = allocator.allocate(1 << 20)
                with self.assertRaises(Error):
                    allocator.switch("backend:no_such")
                self.assertEqual(allocator.memory_stats()["allocation.all.current"], 2)
                allocator.free(a)
                with self.assertRaises(Error):
                    allocator.free(a)
                allocator.free(b)
                allocator.empty_cache()
                self.assertEqual(allocator.memory_stats()["reserved_bytes.all.current"], 0)

    def test_memory_of_the_host_is_real(self):
        with Allocator("", "host") as allocator:
            address = allocator.allocate(4096)
            ctypes.memset(address, 0x5A, 4096)
            self.assertEqual(ctypes.string_at(address, 4096), b"\x5a" * 4096)

    def test_a_tag_sleeps_and_wakes_with_its_bytes(self):
        for conf in ("", "expandable_segments:True"):
            with self.subTest(conf), Allocator(conf, "host") as allocator:
                tag = allocator.tag("weights", keep=True)
                with tag, tag:
                    address = allocator.allocate(4096)
                ctypes.memset(address, 0x5A, 4096)
                self.assertEqual(tag.state, "awake")
                self.assertEqual(tag.pause(streams=[7])["copied_bytes"], 4096)
                self.assertEqual((tag.state, tag.live_bytes, tag.backed_bytes), ("asleep", 4096, 4096))
                self.assertEqual(tag.read_backup(address + 5, 3), b"ZZZ")
                with tag, self.assertRaises(Error) as caught:
                    allocator.allocate(1)
                self.assertEqual(caught.exception.status, 11)
                self.assertEqual(tag.resume()["copied_bytes"], 4096)
                self.assertEqual(ctypes.string_at(address, 4096), b"Z" * 4096)
                self.assertEqual(tag.pause(backup=None)["dropped_blocks"], 1)
                allocator.free(address)
                tag.close()
                with self.assertRaises(ValueError):
                    allocator.tag("cache", backup="disk")

    def test_a_pool_keeps_its_memory_apart(self):
        with Allocator("", "sim") as allocator:
            with allocator.pool(no_split=True) as name:
                self.assertEqual(name[0], 0)
                inside = allocator.allocate(512)
            outside = allocator.allocate(512)
            self.assertGreater(abs(outside - inside), 512)
            with self.assertRaises(KeyError), allocator.pool(stream=3):
                raise KeyError
            allocator.free(inside)
            allocator.free(outside)

    def test_blocks_are_counted_and_free_ranges_compared(self):
        with Allocator("", "sim") as allocator:
            first, second = allocator.allocate(1000 << 10), allocator.allocate(500 << 10)
            self.assertEqual((allocator.block_count(), allocator.fragmentation()), (2, 0))
            allocator.free(first)
            self.assertAlmostEqual(allocator.fragmentation(), 1 - 1000 / 1548)
            allocator.free(second)
            self.assertEqual((allocator.block_count(), allocator.fragmentation()), (0, 0))
            self.assertIn("stratalloc_fragmentation{", stratalloc.metrics())
            with self.assertRaisesRegex(Error, "backend:cpu without layers"):
                allocator.record_free(second)
        self.assertGreaterEqual(stratalloc.device_count(), 0)

    def test_memory_of_a_block_that_was_forgotten_is_the_callers(self):
        with Allocator("backend:cpu", "host") as allocator:
            block = allocator.allocate(4096)
            allocator.record_free(block)
            self.assertEqual(allocator.block_count(), 0)
            libc = ctypes.CDLL(None)
            libc.free.argtypes = [ctypes.c_void_p]
            libc.free(block)

    def test_threads_share_an_allocator(self):
        with Allocator("", "sim") as allocator:
            def work():
                for size in range(1, 3000, 7):
                    allocator.free(allocator.allocate(size))

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(allocator.memory_stats()["allocation.all.current"], 0)


class Refusals(unittest.TestCase):
    def test_out_of_memory_has_its_own_exception(self):
        with Allocator("", "sim") as allocator:
            with self.assertRaisesRegex(OutOfMemoryError, "^out of memory on device 0"):
                allocator.allocate(1 << 50)
            self.assertIn("out of memory", stratalloc.last_error())
            allocator.set_memory_fraction(0)
            with self.assertRaises(OutOfMemoryError):
                allocator.allocate(1)

    def test_configurations_are_checked(self):
        with self.assertRaisesRegex(Error, "did you mean max_split_size_mb"):
            Allocator("max_split_size:1")
        with Allocator("") as allocator, self.assertRaises(Error) as caught:
            allocator.set_conf("garbage_collection_threshold:7")
        self.assertEqual(caught.exception.status, 3)
        with self.assertRaisesRegex(Error, "is no device"):
            Allocator("", "gpu")

    def test_a_closed_allocator_refuses(self):
        allocator = Allocator("")
        address = allocator.allocate(1)
        allocator.close()
        allocator.close()
        for call in (
            lambda: allocator.allocate(1),
            lambda: allocator.free(address),
            allocator.memory_stats,
            allocator.memory_summary,
            allocator.empty_cache,
        ):
            with self.assertRaisesRegex(Error, "unknown handle"):
                call()

    def test_numbers_are_never_cut(self):
        with Allocator("") as allocator:
            for bad in (-1, 2**64, 2**64 + 1):
                with self.assertRaises(ValueError):
                    allocator.allocate(bad)
                with self.assertRaises(ValueError):
                    allocator.free(bad)
                with self.assertRaises(ValueError):
                    allocator.allocate(1, stream=bad)
            for bad in (1.5, "1", None, True):
                with self.assertRaises(TypeError):
                    allocator.allocate(bad)
            with self.assertRaises(ValueError):
                allocator.set_conf("a\0b")
            with self.assertRaises(TypeError):
                allocator.set_conf(b"")
            with self.assertRaisesRegex(Error, "unknown address"):
                allocator.free(12345)


@unittest.skipUnless(hasattr(os, "fork"), "no fork")
class Forks(unittest.TestCase):
    def test_the_child_of_a_fork_is_refused_by_name_and_may_leave_blocks_of_code(self):
        program = """
import os
from stratalloc import Allocator, Error
with Allocator("backend:native", "host") as allocator:
    with allocator.pool():
        child = os.fork()
        if child == 0:
            for call in (lambda: allocator.allocate(10), allocator.memory_stats, allocator.empty_cache):
                try:
                    call()
                except Error as error:
                    assert "belongs to the process that forked this one" in str(error), error
                else:
                    raise AssertionError
    if child == 0:
        allocator.close()
if child == 0:
    with Allocator("backend:native", "host") as own:
        own.free(own.allocate(10))
        try:
            own.free(123)
        except Error as error:
            assert "forked" not in str(error), error
else:
    assert os.waitpid(child, 0)[1] == 0
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class Libraries(unittest.TestCase):
    def attempt(self, code, **environment):
        environment = {**os.environ, **environment}
        command = [sys.executable, "-c", f"import stratalloc\n{code}"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def test_a_missing_library_is_reported(self):
        done = self.attempt("stratalloc.Allocator()", STRATALLOC_LIBRARY="/no/such.so")
        self.assertIn("LibraryError: STRATALLOC_LIBRARY: there is no library", done.stderr)
        done = self.attempt("stratalloc.Allocator(library='/no/such.so')")
        self.assertIn("LibraryError: there is no library /no/such.so", done.stderr)

    def test_something_else_is_no_library(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(b"no library")
            file.flush()
            done = self.attempt("stratalloc.Allocator()", STRATALLOC_LIBRARY=file.name)
        self.assertIn("LibraryError", done.stderr)
        self.assertIn("cannot be loaded", done.stderr)

    def test_another_version_is_refused(self):
        code = "from stratalloc import _library\n_library.__version__ = '9.9.9'\nstratalloc.Allocator()"
        done = self.attempt(code)
        self.assertRegex(done.stderr, "LibraryError: .* is version .*, and this package is 9.9.9")

    def test_without_a_configuration_the_environment_decides(self):
        done = self.attempt("stratalloc.Allocator()", ALLOC_CONF="nonsense:1")
        self.assertIn("ALLOC_CONF: nonsense", done.stderr)


if __name__ == "__main__":
    unittest.main()
