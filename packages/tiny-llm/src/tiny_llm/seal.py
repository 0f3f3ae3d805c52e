"""The last twelve bytes of a checkpoint: a mark and the CRC-32 of all before it."""

import os
import struct
from pathlib import Path
from typing import BinaryIO

from tiny_llm.errors import FormatError
from tiny_llm.files import crc32_of

TRAILER = struct.Struct("<8sI")
TRAILER_MARK = b"TINYCKPT"


def seal(file: BinaryIO) -> None:
    """Append the seal to a file that can be read back, all of it written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    checksum = crc32_of(file, size)
    file.write(TRAILER.pack(TRAILER_MARK, checksum))


def verify_seal(path: Path) -> None:
    """Check the mark and the checksum at the end of a checkpoint.

    Raises:
        OSError: The file cannot be read.
        FormatError: It has no seal, or another content than was sealed.
    """
    with path.open("rb") as file:
        archive_size = file.seek(0, os.SEEK_END) - TRAILER.size
        file.seek(max(0, archive_size))
        trailer = file.read(TRAILER.size)
        if len(trailer) < TRAILER.size or not trailer.startswith(TRAILER_MARK):
            message = f"{path} is not a tiny-llm checkpoint, or it is truncated"
            raise FormatError(message)
        file.seek(0)
        checksum = crc32_of(file, archive_size)
    if trailer != TRAILER.pack(TRAILER_MARK, checksum):
        message = f"checkpoint {path} is damaged (wrong checksum)"
        raise FormatError(message)
