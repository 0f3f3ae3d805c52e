"""Files that appear whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attn_bench.errors import InputError


def check_writable(path: Path) -> None:
    """Raise InputError if `path` is a folder, has none to lie in, or must not be written."""
    if path.is_dir():
        msg = f"cannot write {path}: it is a folder; give a file name."
        raise InputError(msg)
    if not path.parent.exists():
        msg = f"cannot write {path}: {os.strerror(errno.ENOENT)}."
        raise InputError(msg)
    if not path.parent.is_dir():
        msg = f"cannot write {path}: {os.strerror(errno.ENOTDIR)}."
        raise InputError(msg)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        msg = f"cannot write {path}: permission denied."
        raise InputError(msg)


@contextmanager
def appearing_whole(path: Path) -> Iterator[IO[str]]:
    """Open a text file that takes the name `path` only if the ``with`` block ends well.

    Until then it is a temporary file in the same folder.  Opening that one is also the test that
    the folder can be written, before anything is measured.

    Raises:
        InputError: if `path` cannot be written.
    """
    check_writable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror or error}."
        raise InputError(msg) from error
    try:
        with file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
