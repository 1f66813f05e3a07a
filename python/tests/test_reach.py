"""Every feature of an allocator besides allocating and freeing."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import unittest

import stratalloc
from stratalloc import Allocator, Error, OutOfMemoryError, _hooks

MIB = 1 << 20


class Figures(unittest.TestCase):
    def test_questions_are_answered(self):
        for device in ("sim", "host"):
            with self.subTest(device), Allocator("backend:native", device) as allocator:
                block = allocator.allocate(MIB, stream=7)
                self.assertEqual(allocator.name, "native")
                self.assertEqual(
                    allocator.usage(),
                    {"allocated": MIB, "allocated_peak": MIB, "reserved": 2 * MIB, "reserved_peak": 2 * MIB},
                )
                self.assertEqual(allocator.base_allocation(block + 1), (block, 2 * MIB))
                (segment,) = allocator.layout()
                self.assertEqual((segment["address"], segment["stream"]), (block, 7))
                self.assertEqual(segment["segment_pool_id"], [0, 0])
                states = [(each["size"], each["state"]) for each in segment["blocks"]]
                self.assertEqual(states, [(MIB, "active_allocated"), (MIB, "inactive")])
                allocator.free(block)
                allocator.reset_peaks()
                self.assertEqual(allocator.usage()["allocated_peak"], 0)
                self.assertEqual(allocator.memory_stats()["misses"], 1)
                allocator.reset_accumulated()
                stats = allocator.memory_stats()
                self.assertEqual(stats["allocation.all.allocated"], 0)
                free, total = allocator.memory_info()
                self.assertLess(free, total)
                info = allocator.cache_info()
                self.assertEqual((info["largest_cached_bytes"], info["free_blocks"]), (2 * MIB, 1))
                self.assertEqual((info["device_free_bytes"], info["device_total_bytes"]), (free, total))
                self.assertEqual(allocator.memory_fraction, 1)
                allocator.set_memory_fraction(0.5)
                self.assertAlmostEqual(allocator.memory_fraction, 0.5)

    def test_without_a_cache_each_request_is_the_drivers(self):
        with Allocator("", "sim") as allocator:
            self.assertTrue(allocator.caching)
            before = allocator.memory_info()
            allocator.caching = False
            self.assertFalse(allocator.caching)
            block = allocator.allocate(MIB)
            self.assertEqual(allocator.usage()["reserved"], 0)
            self.assertEqual(allocator.base_allocation(block), (block, MIB))
            allocator.free(block)
            self.assertEqual(allocator.memory_info(), before)
        with Allocator("backend:cpu", "sim") as allocator, self.assertRaisesRegex(Error, "not supported"):
            allocator.caching = False

    def test_expandable_segments_are_listed(self):
        with Allocator("expandable_segments:True", "sim") as allocator:
            allocator.set_reserve_class(7, "weights")
            allocator.set_reserve_class(7, None)
            allocator.enable_peer(1)
            allocator.allocate(3 * MIB, stream=7)
            ((stream, kind, mapped),) = allocator.expandable_segments()
            self.assertEqual((stream, kind), (7, "large"))
            self.assertGreaterEqual(mapped, 3 * MIB)


class Pools(unittest.TestCase):
    def test_a_pool_has_the_callers_name(self):
        pool = (0, 900100)
        with Allocator("", "sim") as allocator:
            self.assertEqual(allocator.pool_users(pool), 0)
            with self.assertRaisesRegex(Error, "bad pool"):
                allocator.pool_live(pool)
            allocator.ensure_pool(pool, use_on_oom=True)
            allocator.ensure_pool(pool)
            allocator.set_pool_options(pool, no_split=True)
            self.assertEqual(allocator.pool_users(pool), 2)
            self.assertEqual(allocator.pool_live(pool), [])
            with allocator.pool_scope(pool, stream=7):
                blocks = [allocator.allocate(700, stream=7) for _ in range(20)]
            with allocator.pool_scope(pool):
                blocks.append(allocator.allocate(700))
            self.assertEqual(allocator.pool_live(pool), sorted(blocks))
            for block in blocks:
                allocator.free(block)
            for _ in range(2):
                allocator.release_pool(pool)
            self.assertEqual(allocator.usage()["reserved"], 0)
            with self.assertRaisesRegex(Error, "bad pool"):
                allocator.empty_pool(pool)
            with self.assertRaises(ValueError):
                allocator.ensure_pool((0, -1))

    def test_a_pool_goes_back_to_a_checkpoint(self):
        pool = (3, 0)
        with Allocator("", "sim") as allocator:
            allocator.ensure_pool(pool)
            with allocator.pool_scope(pool):
                a, b = allocator.allocate(700), allocator.allocate(700)
                with allocator.checkpoint(pool) as checkpoint:
                    allocator.free(a)
                    allocator.free(b)
                    other = allocator.allocate(900)
                    freed, live = checkpoint.restore()
                    self.assertEqual((freed, sorted(live)), ([other], sorted([a, b])))
                with self.assertRaises(Error):
                    checkpoint.restore()
            allocator.free(a)
            self.assertEqual(allocator.pool_live(pool), [b])


class Hooks(unittest.TestCase):
    def test_a_tracker_is_called_until_it_is_removed(self):
        with Allocator("", "sim") as allocator:
            entries = []

            def tracker_function(entry):
                entries.append(entry)
                # A tracker gets no entries for its own blocks, but for the segment that they need.
                if entry["action"] == "alloc":
                    allocator.free(allocator.allocate(512))

            tracker = allocator.add_tracker(tracker_function)
            self.assertFalse(allocator.recording)
            allocator.record_memory_history(context=None)
            self.assertTrue(allocator.recording)
            allocator.set_metadata("epoch 1")
            self.assertEqual(allocator.metadata(), "epoch 1")
            with allocator.compile_context("[1/0]"):
                block = allocator.allocate(700, stream=7)
            actions = [(entry["action"], entry["stream"]) for entry in entries]
            self.assertEqual(actions, [("segment_alloc", 7), ("alloc", 7), ("segment_alloc", 0)])
            alloc = entries[1]
            self.assertEqual((alloc["addr"], alloc["size"], alloc["stream"]), (block, 700, 7))
            self.assertEqual((alloc["compile_context"], alloc["user_metadata"]), ("[1/0]", "epoch 1"))
            allocator.remove_tracker(tracker)
            allocator.free(block)
            self.assertEqual(len(entries), 3)
            with self.assertRaisesRegex(Error, "nothing was added"):
                allocator.remove_tracker(tracker)

    def test_failures_and_pressure_call_the_functions(self):
        before = len(_hooks._held)
        with Allocator("", "sim") as allocator:
            reports, calls = [], []
            observer = allocator.add_oom_observer(lambda *numbers: reports.append(numbers))
            callback = allocator.add_free_memory_callback(lambda: calls.append(1))
            allocator.switch("expandable_segments:True")
            _, total = allocator.memory_info()
            with self.assertRaises(OutOfMemoryError):
                allocator.allocate(1 << 50)
            self.assertEqual([(device, size, of) for device, size, of, _ in reports], [(0, 1 << 50, total)])
            self.assertGreaterEqual(len(calls), 1)
            allocator.remove_oom_observer(observer)
            allocator.remove_free_memory_callback(callback)
            self.assertEqual(len(_hooks._held), before)
            calls.clear()
            with self.assertRaises(OutOfMemoryError):
                allocator.allocate(1 << 50)
            self.assertEqual((len(reports), calls), (1, []))
            allocator.add_oom_observer(print)
        self.assertEqual(len(_hooks._held), before, "what is not removed goes with the allocator")

    def test_what_is_no_function_is_refused_at_once(self):
        before = len(_hooks._held)
        with Allocator("", "sim") as allocator:
            for add in (allocator.add_tracker, allocator.add_oom_observer, allocator.add_free_memory_callback):
                for wrong in ("x", 5, None):
                    with self.assertRaisesRegex(TypeError, "expected a function, got"):
                        add(wrong)
        self.assertEqual(len(_hooks._held), before)

    def test_trackers_come_and_go_while_threads_work(self):
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history(context=None, max_entries=100)
            streams = []

            def work(stream):
                for _ in range(300):
                    allocator.free(allocator.allocate(4096, stream))

            threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 4)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                tracker = allocator.add_tracker(lambda entry: streams.append(entry["stream"]))
                allocator.remove_tracker(tracker)
                gc.collect()
                # Otherwise this loop keeps the interpreter lock from the other threads for minutes.
                time.sleep(0.001)
            self.assertTrue(set(streams) <= {1, 2, 3})
            self.assertEqual(allocator.usage()["allocated"], 0)

    def test_a_program_that_ends_with_hooks_ends_well(self):
        program = (
            "import stratalloc\n"
            "own = stratalloc.Allocator('', 'sim')\n"
            "own.add_tracker(lambda entry: None)\n"
            "own.add_oom_observer(print)\n"
            "own.record_memory_history()\n"
            "own.allocate(512)\n"
            "print('done')\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)


class Metrics(unittest.TestCase):
    def test_prometheus_reads_the_counters_of_all_allocators(self):
        with Allocator("", "sim") as one, Allocator("backend:cpu", "sim") as two:
            held = one.allocate(3 * MIB), two.allocate(5 * MIB)
            lines = [line for line in stratalloc.metrics().splitlines() if line[:1] != "#"]
            requested = [line for line in lines if line.startswith("stratalloc_requested_bytes{")]
            for backend, size in (("native", 3 * MIB), ("cpu", 5 * MIB)):
                own = [line for line in requested if f'backend="{backend}"' in line]
                self.assertIn(f'pool="all"}} {size}', "\n".join(own))
            self.assertEqual(len({line.split()[0] for line in lines}), len(lines))
            one.free(held[0])
            two.free(held[1])


class Sharing(unittest.TestCase):
    CONF = "expandable_segments:True,expandable_segments_ipc:True"

    def test_another_process_sees_a_block(self):
        with Allocator(self.CONF, "host") as allocator:
            block = allocator.allocate(3 * MIB)
            ctypes.memset(block, 0x5A, 3 * MIB)
            shared = allocator.share(block)
            self.assertEqual(shared, allocator.share(block))
            program = (
                "import ctypes, sys, stratalloc\n"
                f"own = stratalloc.Allocator({self.CONF!r}, 'host')\n"
                "with own.open_shared(bytes.fromhex(sys.argv[1])) as block:\n"
                "    print(block.size_bytes, ctypes.string_at(block.address + block.size_bytes - 1, 1))\n"
            )
            command = [sys.executable, "-c", program, shared.hex()]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            self.assertEqual(done.stdout, f"{3 * MIB} b'Z'\n", done.stderr)
            with self.assertRaisesRegex(Error, "invalid argument"):
                allocator.open_shared(shared[:-1])
            with self.assertRaisesRegex(Error, "unknown address"):
                allocator.share(block + 512)
            for wrong in (5, 10**9, 2**64, None, "text", [1]):
                with self.assertRaisesRegex(TypeError, "shared: expected bytes, got"):
                    allocator.open_shared(wrong)


if __name__ == "__main__":
    unittest.main()
