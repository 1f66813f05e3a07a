"""Files of the package: they appear complete, and files of other processes stay."""

import gzip
import json
import os
import pathlib
import pickle
import stat
import tempfile
import unittest
from unittest import mock

from stratalloc import _files, _history


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def names(self):
        return sorted(os.listdir(self.folder))

    def write(self, name, content):
        with _files.replacing(self.folder / name) as file:
            file.write(content)

    def test_a_file_is_replaced_when_the_new_one_is_complete(self):
        path = self.folder / "run"
        self.write("run", b"old")
        path.chmod(0o640)
        with self.assertRaises(ZeroDivisionError), _files.replacing(path) as file:
            file.write(b"new")
            self.assertEqual(path.read_bytes(), b"old")
            1 / 0
        self.assertEqual(path.read_bytes(), b"old")
        self.write("run", b"new")
        self.assertEqual(path.read_bytes(), b"new")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o640)
        self.assertEqual(self.names(), ["run"])

    def test_equal_random_names_and_files_that_were_left_over_do_no_harm(self):
        left = [f"run.pickle.{os.getpid()}.part", ".stratalloc-0.part"]
        for name in left:
            (self.folder / name).write_text("left")
        names = ["0", "1", "1", "2"]
        with mock.patch.object(_files.secrets, "token_hex", side_effect=lambda _: names.pop(0)):
            with _files.replacing(self.folder / "run.pickle") as first:
                with _files.replacing(self.folder / "run.pickle") as second:
                    second.write(b"second")
                first.write(b"first")
        self.assertEqual((self.folder / "run.pickle").read_bytes(), b"first")
        self.assertEqual(self.names(), sorted([*left, "run.pickle"]))

    def test_a_link_and_a_device_stay(self):
        self.write("target", b"old")
        (self.folder / "link").symlink_to("target")
        self.write("link", b"new")
        self.assertTrue((self.folder / "link").is_symlink())
        self.assertEqual((self.folder / "target").read_bytes(), b"new")
        self.write(os.devnull, b"new")
        self.assertFalse(os.path.isfile(os.devnull))

    def test_a_snapshot_replaces_no_file(self):
        snapshot = {"segments": [], "device_traces": [[]]}
        paths = [str(self.folder / f"run-{number}.pickle") for number in (1, 2, 3)]
        (self.folder / "run-1.pickle").write_text("other")
        for link in (os.link, mock.Mock(side_effect=PermissionError)):
            with mock.patch.object(_files.os, "link", link):
                path = _history.write_first_free(snapshot, paths)
            with open(path, "rb") as file:
                self.assertEqual(pickle.load(file), snapshot)
        self.assertEqual(self.names(), ["run-1.pickle", "run-2.pickle", "run-3.pickle"])
        self.assertEqual((self.folder / "run-1.pickle").read_text(), "other")

    def test_every_format_can_be_read(self):
        snapshot = {"segments": [{"name": "é"}]}
        readers = {"pickle": pickle.load, "json": json.load}
        for name, read in readers.items():
            for end, opener in (("", open), (".gz", gzip.open)):
                path = self.folder / f"run.{name}{end}"
                _history.write(snapshot, path)
                with opener(path, "rb") as file:
                    self.assertEqual(read(file), snapshot)
        self.assertEqual(len(self.names()), 4)


if __name__ == "__main__":
    unittest.main()
