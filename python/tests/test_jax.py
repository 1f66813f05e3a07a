"""The environment for JAX. Needs no JAX."""

import os
import sys
import types
import unittest
from unittest import mock

import stratalloc
import stratalloc.jax
from stratalloc.jax import VARIABLES, enable


class Enable(unittest.TestCase):
    def setUp(self):
        without = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment = mock.patch.dict(os.environ, without, clear=True)
        environment.start()
        self.addCleanup(environment.stop)

    def test_the_variables_are_set_once_or_twice(self):
        enable()
        enable()
        self.assertEqual({name: os.environ[name] for name in VARIABLES}, VARIABLES)
        self.assertEqual(VARIABLES["XLA_PYTHON_CLIENT_ALLOCATOR"], "cuda_async")

    def test_it_is_too_late_once_jax_uses_a_device(self):
        bridge = types.ModuleType("jax._src.xla_bridge")
        for functions, is_late in (({}, True), ({"backends_are_initialized": lambda: True}, True),
                                   ({"backends_are_initialized": lambda: False}, False)):
            vars(bridge).update(functions)
            modules = {"jax": types.ModuleType("jax"), "jax._src.xla_bridge": bridge}
            with mock.patch.dict(sys.modules, modules):
                if is_late:
                    with self.assertRaisesRegex(stratalloc.LibraryError, "^JAX uses its devices already"):
                        enable()
                    self.assertFalse(VARIABLES.keys() & os.environ.keys())
                else:
                    enable()

    def test_a_variable_with_another_value_is_refused_and_kept(self):
        for name, value in (
            ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
            ("XLA_PYTHON_CLIENT_PREALLOCATE", "true"),
        ):
            with mock.patch.dict(os.environ, {name: value}):
                with self.assertRaisesRegex(stratalloc.LibraryError, f"{name} is '{value}'"):
                    enable()
                self.assertEqual(os.environ[name], value)
                self.assertLessEqual(VARIABLES.keys() & os.environ.keys(), {name})
        with mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_PREALLOCATE": "False"}):
            enable()
            self.assertEqual(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], "false")
        with mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}):
            enable()


if __name__ == "__main__":
    unittest.main()
