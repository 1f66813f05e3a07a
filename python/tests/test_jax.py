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

    def test_it_is_too_late_after_the_import(self):
        for module in ("jax", "jaxlib"):
            with mock.patch.dict(sys.modules, {module: types.ModuleType(module)}):
                with self.assertRaisesRegex(stratalloc.LibraryError, f"^{module} was imported already"):
                    enable()
        self.assertFalse(VARIABLES.keys() & os.environ.keys())

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


if __name__ == "__main__":
    unittest.main()
