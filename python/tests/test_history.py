"""The recorded history of an allocator, with Python stacks."""

import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest

from stratalloc import Allocator, Error, _history

KINDS = ("backend:native", "backend:native,expandable_segments:True", "backend:cudaMallocAsync")


def forward(allocator):
    return allocator.allocate(1 << 20)


class History(unittest.TestCase):
    def test_a_snapshot_has_entries_segments_and_stacks(self):
        for conf in KINDS:
            with self.subTest(conf), Allocator(conf, "sim") as allocator:
                allocator.record_memory_history()
                allocator.set_metadata("epoch 1")
                kept = forward(allocator)
                with allocator.scope("optimizer"):
                    allocator.free(allocator.allocate(700, stream=9))
                snapshot = allocator.snapshot()
                entries = snapshot["device_traces"][0]
                alloc = next(entry for entry in entries if entry["action"] == "alloc")
                self.assertEqual((alloc["addr"], alloc["size"]), (kept, 1 << 20))
                self.assertEqual(alloc["frames"][0]["name"], "forward")
                self.assertEqual(alloc["frames"][0]["filename"], __file__)
                self.assertEqual(alloc["user_metadata"], "epoch 1")
                freed = next(entry for entry in entries if entry["action"] == "free_requested")
                self.assertEqual((freed["size"], freed["stream"]), (700, 9))
                self.assertEqual(freed["frames"][0]["name"], "optimizer")
                blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
                live = [block for block in blocks if block["state"] == "active_allocated"]
                self.assertEqual([block["address"] for block in live], [kept])
                self.assertEqual(live[0]["frames"][0]["name"], "forward")
                settings = snapshot["allocator_settings"]
                self.assertIn("stratalloc", settings)

    def test_annotations_have_a_beginning_and_an_end(self):
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history()
            with allocator.annotate("step </script> 1"):
                allocator.free(allocator.allocate(512))
            annotations = allocator.snapshot()["external_annotations"]
            self.assertEqual([one["name"] for one in annotations], ["step </script> 1"] * 2)
            self.assertEqual([one["stage"] for one in annotations], ["START", "END"])
            self.assertLessEqual(annotations[0]["time_us"], annotations[1]["time_us"])

    def test_the_ring_forgets_the_oldest(self):
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history(max_entries=10, context=None)
            for _ in range(2000):
                allocator.free(allocator.allocate(512))
            snapshot = allocator.snapshot()
            self.assertEqual(len(snapshot["device_traces"][0]), 10)
            self.assertEqual(snapshot["allocator_settings"]["dropped_entries"], 6001 - 10)
            allocator.record_memory_history(skip_actions=["free_requested"], clear_history=True)
            allocator.free(allocator.allocate(512))
            actions = [entry["action"] for entry in allocator.snapshot()["device_traces"][0]]
            self.assertEqual(actions, ["alloc", "free_completed"])

    def test_stacks_are_held_once_and_released(self):
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history()
            for _ in range(100):
                allocator.free(forward(allocator))
            held = _history._stacks._held
            self.assertLess(len({id(stack) for stack in held.values()}), 5)
            allocator.record_memory_history(enabled=None)
            self.assertEqual(len(held), 0)
            self.assertEqual(len(_history._stacks._known), 0)
            self.assertEqual(allocator.snapshot()["device_traces"], [[]])

    def test_wrong_words_are_refused_as_pytorch_refuses_them(self):
        with Allocator("", "sim") as allocator:
            for words in ({"enabled": "some"}, {"context": "none"}, {"stacks": "cpp"}):
                with self.assertRaisesRegex(ValueError, "expected"):
                    allocator.record_memory_history(**words)
            with self.assertRaisesRegex(Error, "no action is called \"walk\""):
                allocator.record_memory_history(skip_actions=["walk"])

    def test_files_are_written_whole_or_not_at_all(self):
        with tempfile.TemporaryDirectory() as folder, Allocator("", "sim") as allocator:
            allocator.record_memory_history(context="state")
            forward(allocator)
            path = os.path.join(folder, "run.pickle")
            allocator.dump_snapshot(path)
            with open(path, "rb") as file:
                written, later = pickle.load(file), allocator.snapshot()
            noted = later["device_traces"][0].pop()
            self.assertEqual((noted["action"], noted["addr"]), ("snapshot", 0))
            self.assertEqual(noted["size"], sum(s["active_size"] for s in later["segments"]))
            self.assertEqual(written, later)
            for bad in (folder, os.path.join(folder, "no", "run.pickle")):
                with self.assertRaises(Error):
                    allocator.dump_snapshot(bad)
            self.assertEqual(os.listdir(folder), ["run.pickle"])

    def test_threads_record_at_once(self):
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history()

            def work(stream):
                for _ in range(200):
                    allocator.free(allocator.allocate(4096, stream))

            threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                allocator.snapshot()
                gc.collect()
            actions = [entry["action"] for entry in allocator.snapshot()["device_traces"][0]]
            self.assertEqual(actions.count("alloc"), 800)
            self.assertEqual(actions.count("free_completed"), 800)

    def test_a_signal_handler_may_take_a_snapshot_at_any_line_of_the_stack_source(self):
        # A trace function runs between two lines, as a signal handler does.
        with Allocator("", "sim") as allocator:
            allocator.record_memory_history()
            allocator.allocate(512)
            lines = set()

            def trace(frame, event, _):
                code = frame.f_code
                if code.co_filename != _history.__file__ or code.co_name not in ("_gather", "_release", "_frames"):
                    return None
                if event == "line" and frame.f_lineno not in lines:
                    lines.add(frame.f_lineno)
                    sys.settrace(None)
                    allocator.snapshot()
                    allocator.free(forward(allocator))
                    sys.settrace(trace)
                return trace

            sys.settrace(trace)
            try:
                for _ in range(3):
                    allocator.free(forward(allocator))
                    entries = allocator.snapshot()["device_traces"][0]
                allocator.record_memory_history(enabled=None)
            finally:
                sys.settrace(None)
            self.assertGreater(len(lines), 10)
            self.assertIn("forward", [frame["name"] for entry in entries for frame in entry.get("frames", ())])
            self.assertEqual(len(_history._stacks._held), 0)

    def test_a_program_that_ends_while_it_records_ends_well(self):
        program = (
            "import stratalloc\n"
            "own = stratalloc.Allocator('', 'sim')\n"
            "own.record_memory_history()\n"
            "own.allocate(512)\n"
            "print('done')\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)

    def test_a_leak_is_reported_with_the_python_code_that_allocated(self):
        program = (
            "import stratalloc\n"
            "own = stratalloc.Allocator('layers:[track]', 'sim')\n"
            "def session(): own.allocate(2 << 20)\n"
            "for _ in range(3): session()\n"
            "own.free(own.allocate(512))\n"
        )
        for ending in ("", "own.close()\n"):
            done = subprocess.run(
                [sys.executable, "-c", program + ending], capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("never freed: 6.00 MiB in 3 blocks\n"), 1)
            self.assertIn("s old: session (<string>:3) < <module> (<string>:4)", done.stderr)


if __name__ == "__main__":
    unittest.main()
