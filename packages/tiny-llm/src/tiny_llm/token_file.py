"""The format of token files: written in bounded memory, then mapped, whatever their size.

    offset  0   magic       8 bytes  b"TINYLLM" and a zero
            8   version     uint32   1
            12  dtype       8 bytes  b"uint16" or b"uint32", zero-padded
            20  vocab_size  uint32   every token is below it
            24  count       uint64   number of tokens
            32  checksum    uint32   CRC-32 of the tokens, then of the header with this field zero
            36  zeros       28 bytes
            64  tokens      `count` little-endian numbers of that dtype

`tiny_llm.data` fills them and draws from them.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiny_llm.errors import FileError, FormatError
from tiny_llm.files import atomic_write, crc32_of, reason_of

MAGIC = b"TINYLLM\0"
VERSION = 1
HEADER = struct.Struct("<8sI8sIQI28x")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

TokenArray = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A memory-mapped token file; a slice reads from the disk only what it covers.

    Attributes:
        path: Where it lies.
        vocab_size: Every token is below this.
        checksum: Identifies the content.
        array: All tokens ``[count]``, read-only.
    """

    path: Path
    vocab_size: int
    checksum: int
    array: TokenArray

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, window: slice) -> TokenArray:
        part: TokenArray = self.array[window]
        return part

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Map a token file after checking its header, size and checksum.

        Raises:
            FileError: There is no such file, or it cannot be read.
            FormatError: It is foreign, of another version, truncated or damaged.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER.size)
                dtype, vocab_size, count, checksum = _parse_header(path, header)
                payload_bytes = count * dtype.itemsize
                _check_size(path, path.stat().st_size, HEADER.size + payload_bytes)
                payload_checksum = crc32_of(file, payload_bytes)
            array = np.memmap(path, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,))
        except FileNotFoundError:
            message = f"token file {path} does not exist; make it with tiny-llm prepare"
            raise FileError(message) from None
        except OSError as error:
            message = f"cannot read token file {path}: {reason_of(error)}"
            raise FileError(message) from error
        if _full_checksum(header, payload_checksum) != checksum:
            message = f"token file {path} is damaged (wrong checksum); prepare it again"
            raise FormatError(message)
        return cls(path, vocab_size, checksum, array)


def write_token_file(
    path: str | Path, chunks: Iterable[list[int]], *, vocab_size: int
) -> TokenFile:
    """Write tokens as they come and open the result; the file appears whole or not at all.

    Args:
        path: The file to write.  An old token file is replaced, any other file is not.
        chunks: The tokens, piece by piece; at least one token in all.
        vocab_size: Every token is below this.

    Raises:
        FileError: `path` cannot be written.
        FormatError: `path` exists and is no token file.
    """
    path = Path(path)
    _check_replaceable(path)
    dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = payload_checksum = 0
    with atomic_write(path) as file:
        file.write(bytes(HEADER.size))  # a place for the header, whose count is not known yet
        for tokens in chunks:
            payload = np.array(tokens, dtype=DTYPES[dtype_name]).tobytes()
            file.write(payload)
            count += len(tokens)
            payload_checksum = zlib.crc32(payload, payload_checksum)
        described = (MAGIC, VERSION, dtype_name.encode(), vocab_size, count)
        checksum = _full_checksum(HEADER.pack(*described, 0), payload_checksum)
        file.seek(0)
        file.write(HEADER.pack(*described, checksum))
    return TokenFile.open(path)


def _check_replaceable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError:
        # nothing there, or nothing that can be read: writing will tell
        return
    if start not in (b"", MAGIC):
        message = f"{path} exists and is no token file; choose another name or remove it"
        raise FormatError(message)


def _parse_header(path: Path, header: bytes) -> tuple[np.dtype[Any], int, int, int]:
    """Return dtype, vocab_size, count and checksum."""
    if not header.startswith(MAGIC):
        message = f"{path} is not a tiny-llm token file; make one with tiny-llm prepare"
        raise FormatError(message)
    if len(header) < HEADER.size:
        message = f"token file {path} is truncated inside its header; prepare it again"
        raise FormatError(message)
    _, version, dtype_name, vocab_size, count, checksum = HEADER.unpack(header)
    if version != VERSION:
        message = (
            f"token file {path} has format version {version}, this tiny-llm reads {VERSION}; "
            "prepare it again"
        )
        raise FormatError(message)
    dtype = DTYPES.get(dtype_name.rstrip(b"\0").decode("latin-1"))
    if dtype is None or count == 0:
        message = f"token file {path} is damaged (impossible header); prepare it again"
        raise FormatError(message)
    return dtype, vocab_size, count, checksum


def _check_size(path: Path, size: int, expected: int) -> None:
    if size < expected:
        message = (
            f"token file {path} is truncated: {size} of {expected} bytes are there; "
            "prepare it again"
        )
        raise FormatError(message)
    if size > expected:
        message = f"token file {path} has {size - expected} bytes too many; prepare it again"
        raise FormatError(message)


def _full_checksum(header: bytes, payload_checksum: int) -> int:
    without_checksum = HEADER.pack(*HEADER.unpack(header)[:-1], 0)
    return zlib.crc32(without_checksum, payload_checksum)
