"""The exit of a process while daemon threads of Python are inside the library."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

PREPARED = """
import atexit, os, sys, threading
left = []
@atexit.register
def last():
    # Functions run in the reverse order, so this is after the package's own. A thread that is still inside would
    # end there.
    os.write(1, b"left" if left else b"still inside")
import stratalloc
a = stratalloc.Allocator("backend:native", device="sim")
inside = threading.Event()
def stay(*_):
    if not inside.is_set():
        inside.set()
        os.read(0, 1)
        left.append(True)
"""
WAIT = """
threading.Thread(target=work, daemon=True).start()
inside.wait()
atexit.register(os.write, 1, b"exits ")
"""
# Threads that run freely. Letters of the mode: k tracker, f free-memory callback, t layers:[track], e
# empty_cache, c close().
RANDOM = """
import sys, threading, stratalloc
mode = sys.argv[1]
a = stratalloc.Allocator("layers:[track]" if 't' in mode else "backend:native", device="sim")
a.record_memory_history("all", context="all")
if 'k' in mode: a.add_tracker(lambda e: None)
if 'f' in mode: a.add_free_memory_callback(lambda: False)
rounds = threading.Semaphore(0)
def work():
    while True:
        p = a.allocate(1 << 20); q = a.allocate(50 << 20); a.free(p); a.free(q)
        if 'e' in mode: a.empty_cache()
        rounds.release()
for _ in range(4): threading.Thread(target=work, daemon=True).start()
for _ in range(50): rounds.acquire()
if 'c' in mode: a.close()
"""


class Exit(unittest.TestCase):
    def ends(self, code):
        command = [sys.executable, "-c", PREPARED + textwrap.dedent(code) + WAIT]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self.assertEqual(os.read(process.stdout.fileno(), 6), b"exits ")
            output, errors = process.communicate(b"x", timeout=60)
        self.assertEqual((process.returncode, output), (0, b"left"), errors)

    def test_it_waits_for_a_thread_inside_each_callback(self):
        for add in (
            "a.record_memory_history(context=None); a.add_tracker(stay)",
            "a.add_free_memory_callback(stay)",
        ):
            with self.subTest(add):
                self.ends(f"{add}\ndef work(): a.allocate(1 << 20)")
        with self.subTest("OOM observer"):
            self.ends("""
                a.add_oom_observer(stay)
                def work(): a.allocate(1 << 50)
            """)

    def test_it_waits_for_a_thread_inside_the_stack_source(self):
        for name in ("_gather", "_release", "_frames"):
            with self.subTest(name):
                self.ends(f"""
                    from stratalloc import _history
                    class Stacks(_history._Stacks):
                        def {name}(self, *arguments):
                            stay()
                            return super().{name}(*arguments)
                    a.close()
                    _history._stacks = None
                    _history._Stacks = Stacks
                    a = stratalloc.Allocator("", device="sim")
                    a.record_memory_history()
                    def work():
                        a.free(a.allocate(1 << 20))
                        a.snapshot()
                        a.record_memory_history(None)
                """)

    def test_it_waits_for_a_thread_that_takes_a_snapshot(self):
        self.ends("""
            from stratalloc import _history
            string_at = _history.ctypes.string_at
            def read(*arguments):
                stay()
                return string_at(*arguments)
            _history.ctypes.string_at = read
            def work(): a.snapshot()
        """)

    def test_it_ends_well_whatever_threads_do(self):
        for mode in ("k", "c", "kc", "tkfe", "n"):
            for _ in range(2):
                with self.subTest(mode):
                    command = [sys.executable, "-c", RANDOM, mode]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, 0, done.stderr)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_the_child_of_a_fork_waits_for_no_thread_of_its_parent(self):
        self.ends("""
            a.record_memory_history(context=None)
            a.add_tracker(stay)
            def work(): a.allocate(1 << 20)
            def child():
                inside.wait()
                if os.fork() == 0:
                    atexit.unregister(last)
                    atexit.unregister(os.write)
                    sys.exit(0)
                assert os.wait()[1] == 0
            threads = threading.Thread
            class Thread(threads):
                def start(self):
                    super().start()
                    child()
            threading.Thread = Thread
        """)


class Signals(unittest.TestCase):
    @unittest.skipUnless(hasattr(signal, "setitimer"), "no timers")
    def test_handlers_that_snapshot_or_allocate_run_while_stacks_are_gathered(self):
        program = """
import signal, sys, stratalloc
a = stratalloc.Allocator("backend:native", device="sim")
a.record_memory_history("all", context="all", max_entries=50)
count = 0
def handler(*_):
    global count
    count += 1
    {"alloc": lambda: a.free(a.allocate(1 << 20)), "snap": a.snapshot,
     "dump": lambda: a.dump_snapshot(sys.argv[2])}[sys.argv[1]]()
    signal.setitimer(signal.ITIMER_REAL, 0.0007)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0007)
while count < 100:
    a.free(a.allocate(1 << 20))
signal.signal(signal.SIGALRM, signal.SIG_IGN)
"""
        with tempfile.TemporaryDirectory() as folder:
            for mode in ("alloc", "snap", "dump"):
                command = [sys.executable, "-c", program, mode, os.path.join(folder, "s.pickle")]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
