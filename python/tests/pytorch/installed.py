"""Runs the Python programs of the package's README, with PyTorch and the package as they are installed, and checks
that PyTorch's class is an object of the package.

usage: installed.py README
"""

import pathlib
import re
import sys

import stratalloc


def main(readme):
    programs = re.findall("^```python\n(.*?)^```$", pathlib.Path(readme).read_text(), re.DOTALL | re.MULTILINE)
    assert len(programs) == 3 and programs[0].startswith("import stratalloc\nstratalloc.install(")
    names = {}
    for program in programs:
        exec(program, names)
    package = pathlib.Path(stratalloc.__file__).parent
    extension = pathlib.Path(stratalloc.install().extension)
    assert extension.parent == package / "prebuilt", extension
    assert names["torch"].cuda.memory_allocated() == 4 << 20
    print(f"the programs of the README ran with {extension.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
