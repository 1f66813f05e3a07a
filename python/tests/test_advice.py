"""Advice about the recording of this program."""

import json
import os
import sys
import unittest
from unittest import mock

import stratalloc
from stratalloc import _advice


class Advice(unittest.TestCase):
    def test_a_program_gets_advice_about_itself(self):
        written = []

        def dump(path, device):
            written.append((path, device))

        running = mock.Mock(__version__="2.8.1+cu128")
        command = mock.patch.dict(os.environ, STRATALLOC_COMMAND=sys.executable)
        dumped = mock.patch.object(_advice._torch, "dump_snapshot", dump)
        with command, dumped, mock.patch.dict(sys.modules, torch=running):
            with mock.patch.object(_advice, "json_of", lambda *words: [json.dumps(words)]):
                arguments = json.loads(stratalloc.advise(1, quick=False))
        self.assertEqual(arguments[1:5], ["advise", "--json", "--torch", "2.8.1+cu128"])
        self.assertEqual((written[0][0], written[0][1]), (arguments[-1], 1))


if __name__ == "__main__":
    unittest.main()
