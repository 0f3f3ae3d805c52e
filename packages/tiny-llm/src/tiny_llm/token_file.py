"""The format of token files: written in bounded memory, then mapped, whatever their size.

    offset  0   magic       8 bytes  b"TINYLLM" and a zero
            8   version     uint32   2
            12  dtype       8 bytes  b"uint16" or b"uint32", zero-padded
            20  vocab_size  uint32   every token is below it
            24  count       uint64   number of tokens
            32  checksum    uint32   CRC-32 of all that follows the header, then of the header with
                                     this field zero
            36  tokenizer   uint32   checksum of the tokenizer
            40  documents   uint64   number of documents
            48  zeros       16 bytes
            64  tokens      `count` little-endian numbers of that dtype
                ends        `documents` little-endian uint64: where each document ends, in tokens

`tiny_llm.data` fills them and draws from them.
"""

import struct
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiny_llm.errors import FileError, FormatError
from tiny_llm.files import atomic_write, crc32_of, reason_of

MAGIC = b"TINYLLM\0"
VERSION = 2
HEADER = struct.Struct("<8sI8sIQIIQ16x")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_DTYPE = np.dtype("<u8")

TokenArray = npt.NDArray[Any]


class Header(NamedTuple):
    """The fields of a header, in the order of the file."""

    magic: bytes
    version: int
    dtype_name: bytes
    vocab_size: int
    num_tokens: int
    checksum: int
    tokenizer: int
    documents: int

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The tokens' type, or None if the name is impossible."""
        return DTYPES.get(self.dtype_name.rstrip(b"\0").decode("latin-1"))


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A memory-mapped token file; a slice reads from the disk only what it covers.

    Attributes:
        path: Where it lies.
        vocab_size: Every token is below this.
        checksum: Identifies the content.
        array: All tokens ``[count]``, read-only.
        tokenizer_checksum: `Tokenizer.checksum` of the tokenizer that made it.
        document_ends: Cumulative lengths ``[documents]``: document i is the tokens from end i - 1
            (or 0) up to end i, its end-of-text included.
    """

    path: Path
    vocab_size: int
    checksum: int
    array: TokenArray
    tokenizer_checksum: int
    document_ends: TokenArray

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
                raw = file.read(HEADER.size)
                header, dtype = _parse_header(path, raw)
                ends_at = HEADER.size + header.num_tokens * dtype.itemsize
                size = ends_at + header.documents * END_DTYPE.itemsize
                _check_size(path, path.stat().st_size, size)
                payload_checksum = crc32_of(file, size - HEADER.size)
            tokens = np.memmap(
                path, dtype, mode="r", offset=HEADER.size, shape=(header.num_tokens,)
            )
            ends = np.memmap(path, END_DTYPE, mode="r", offset=ends_at, shape=(header.documents,))
        except FileNotFoundError:
            message = f"token file {path} does not exist; make it with tiny-llm prepare"
            raise FileError(message) from None
        except OSError as error:
            message = f"cannot read token file {path}: {reason_of(error)}"
            raise FileError(message) from error
        if _full_checksum(header, payload_checksum) != header.checksum:
            message = f"token file {path} is damaged (wrong checksum); prepare it again"
            raise FormatError(message)
        return cls(path, header.vocab_size, header.checksum, tokens, header.tokenizer, ends)


def write_token_file(
    path: str | Path,
    documents: Iterable[Iterable[list[int]]],
    *,
    vocab_size: int,
    tokenizer_checksum: int = 0,
) -> TokenFile:
    """Write tokens as they come and open the result; the file appears whole or not at all.

    Args:
        path: The file to write.  An old token file is replaced, any other file is not.
        documents: The tokens of each document, piece by piece, its end-of-text included; at least
            one token in all.
        vocab_size: Every token is below this.
        tokenizer_checksum: `Tokenizer.checksum` of the tokenizer that made the tokens.

    Raises:
        FileError: `path` cannot be written.
        FormatError: `path` exists and is no token file.
    """
    path = Path(path)
    _check_replaceable(path)
    dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = payload_checksum = 0
    ends = array("Q")
    with atomic_write(path) as file:
        file.write(bytes(HEADER.size))  # a place for the header, whose count is not known yet
        for document in documents:
            for tokens in document:
                payload = np.array(tokens, dtype=DTYPES[dtype_name]).tobytes()
                file.write(payload)
                count += len(tokens)
                payload_checksum = zlib.crc32(payload, payload_checksum)
            ends.append(count)
        payload = np.array(ends, dtype=END_DTYPE).tobytes()
        file.write(payload)
        payload_checksum = zlib.crc32(payload, payload_checksum)
        header = Header(
            magic=MAGIC,
            version=VERSION,
            dtype_name=dtype_name.encode(),
            vocab_size=vocab_size,
            num_tokens=count,
            checksum=0,
            tokenizer=tokenizer_checksum,
            documents=len(ends),
        )
        checksum = _full_checksum(header, payload_checksum)
        file.seek(0)
        file.write(HEADER.pack(*header._replace(checksum=checksum)))
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


def _parse_header(path: Path, raw: bytes) -> tuple[Header, np.dtype[Any]]:
    if not raw.startswith(MAGIC):
        message = f"{path} is not a tiny-llm token file; make one with tiny-llm prepare"
        raise FormatError(message)
    if len(raw) < HEADER.size:
        message = f"token file {path} is truncated inside its header; prepare it again"
        raise FormatError(message)
    header = Header(*HEADER.unpack(raw))
    if header.version != VERSION:
        message = (
            f"token file {path} has format version {header.version}, this tiny-llm reads "
            f"{VERSION}; prepare it again"
        )
        raise FormatError(message)
    dtype = header.dtype
    if dtype is None or header.num_tokens == 0 or header.documents == 0:
        message = f"token file {path} is damaged (impossible header); prepare it again"
        raise FormatError(message)
    return header, dtype


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


def _full_checksum(header: Header, payload_checksum: int) -> int:
    return zlib.crc32(HEADER.pack(*header._replace(checksum=0)), payload_checksum)
