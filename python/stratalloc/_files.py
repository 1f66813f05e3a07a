"""Files that appear under their name only when they are complete. A file is written under a random temporary name
in the same folder, synced and renamed. Only the process that created a temporary file removes it: in containers,
other processes may have the same id. The Rust library writes its files in the same way."""

import contextlib
import os
import secrets


@contextlib.contextmanager
def replacing(path):
    """Yields a binary file that replaces the one at ``path`` when the block of code ends. If that fails, the old
    file keeps its content. A device or a pipe is written in place."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    path = os.path.realpath(path)
    with temporary(os.path.dirname(path)) as file:
        with contextlib.suppress(OSError):
            os.chmod(file.name, os.stat(path).st_mode & 0o7777)
        yield file
        file.flush()
        move(file.name, path)


@contextlib.contextmanager
def temporary(folder):
    """Yields a new binary file in a folder. Removes its name at the end."""
    while True:
        name = os.path.join(folder, f".stratalloc-{secrets.token_hex(8)}.part")
        with contextlib.suppress(FileExistsError):
            file = open(name, "xb")
            break
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def move(temporary, path):
    """Renames a complete file, which may replace another. Waits until it is on the disk."""
    _sync(temporary)
    os.replace(temporary, path)
    _sync_folder(path)


def move_to_first_free(temporary, paths):
    """Renames a complete file to the first of these paths where no file is, and returns it. Waits until the file
    is on the disk."""
    _sync(temporary)
    for path in paths:
        try:
            os.link(temporary, path)
        except FileExistsError:
            continue
        except OSError:
            # The file system has no links.
            if os.path.lexists(path):
                continue
            os.replace(temporary, path)
        _sync_folder(path)
        return path


def _sync_folder(path):
    # Some file systems cannot sync a folder.
    with contextlib.suppress(OSError):
        _sync(os.path.dirname(path) or ".")


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
