"""Files: written whole or not at all, told by checksums, and read as JSON."""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tiny_llm.errors import FileError, FormatError

CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file beside `path` that takes its place once the block has ended well.

    It can be written and read back.  If the block raises, it is removed, and whatever was at `path`
    stays as it was.

    Raises:
        FileError: `path` is a folder or cannot be written, or the disk is full.
    """
    if path.is_dir():
        message = f"cannot write {path}: it is a folder; name a file"
        raise FileError(message)
    # one fixed name: what a killed process left behind is overwritten by the next one
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _removed_on_failure(temporary):
            with temporary.open("w+b") as file:
                yield file
                file.flush()
                # the data must be on the disk before the name points to it
                os.fsync(file.fileno())
            temporary.replace(path)
    except FileError:
        raise
    except OSError as error:
        message = f"cannot write {path}: {reason_of(error)}"
        raise FileError(message) from error


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if path.exists():
            path.unlink()
        raise


def reason_of(error: OSError) -> str:
    """The operating system's words for `error`, without number and file name."""
    return error.strerror or str(error)


def crc32_of(file: BinaryIO, length: int) -> int:
    """Return the CRC-32 of the next `length` bytes of `file`, read piece by piece."""
    checksum = 0
    while length > 0 and (chunk := file.read(min(length, CHUNK_BYTES))):
        checksum = zlib.crc32(chunk, checksum)
        length -= len(chunk)
    return checksum


def read_json_object(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds, by name.

    Raises:
        FileError: It cannot be read.
        FormatError: It is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        message = f"cannot read {path}: {reason_of(error)}"
        raise FileError(message) from error
    except ValueError as error:
        message = f"{path} is not JSON: {error}"
        raise FormatError(message) from error
    if not isinstance(content, dict):
        message = f"{path} must hold a JSON object, got {type(content).__name__}"
        raise FormatError(message)
    return content
