"""Token shards: a folder of token files that reads like one, made piece by piece.

    tokens/
        shard-00000.bin  shard-00001.bin  ...     token files; each ends where a document ends
        shards.json                               what they were made from, and how far it got

A preparation that was stopped goes on after the last whole shard.  Only the shard in work is lost.
"""

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from tiny_llm.errors import FileError, FormatError
from tiny_llm.files import atomic_write, reason_of
from tiny_llm.token_file import TokenArray, TokenFile, write_token_file

INDEX = "shards.json"


@dataclass(frozen=True)
class ShardIndex:
    """What a folder of shards was made from, and what is done."""

    sources: str
    tokenizer_checksum: int
    vocab_size: int
    shard_tokens: int
    shards: tuple[str, ...] = ()
    documents: int = 0
    complete: bool = False

    def describes_the_same_work_as(self, other: "ShardIndex") -> bool:
        """True if both come from the same text in the same way, however far they got."""
        return replace(self, shards=(), documents=0, complete=False) == replace(
            other, shards=(), documents=0, complete=False
        )


@dataclass(frozen=True, eq=False)
class TokenShards:
    """Several token files behind one another; the interface is `TokenFile`'s."""

    path: Path
    files: tuple[TokenFile, ...]

    @classmethod
    def open(cls, path: str | Path) -> "TokenShards":
        """Map all shards of a folder.

        Raises:
            FileError: There is no such folder, or a shard cannot be read.
            FormatError: The preparation is not complete, or a shard is damaged or foreign.
        """
        path = Path(path)
        index = read_index(path)
        if index is None:
            message = f"{path} holds no token shards; make them with tiny-llm prepare"
            raise FileError(message)
        if not index.complete:
            message = f"{path} is not complete; repeat the tiny-llm prepare that was stopped"
            raise FormatError(message)
        files = tuple(TokenFile.open(path / name) for name in index.shards)
        for file in files:
            if file.tokenizer_checksum != index.tokenizer_checksum:
                message = f"{file.path} was made with another tokenizer than {path / INDEX} says"
                raise FormatError(message)
        return cls(path, files)

    @property
    def vocab_size(self) -> int:
        """Every token is below this."""
        return self.files[0].vocab_size

    @property
    def tokenizer_checksum(self) -> int:
        """`Tokenizer.checksum` of the tokenizer that made the tokens."""
        return self.files[0].tokenizer_checksum

    @cached_property
    def checksum(self) -> int:
        """Identifies the content of all shards."""
        return zlib.crc32(json.dumps([file.checksum for file in self.files]).encode())

    @cached_property
    def document_ends(self) -> TokenArray:
        """Cumulative lengths of all documents, as in `TokenFile`."""
        parts = zip(self._starts, self.files, strict=True)
        return np.concatenate([file.document_ends + np.uint64(start) for start, file in parts])

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(file) for file in self.files[:-1])]

    def __len__(self) -> int:
        return self._starts[-1] + len(self.files[-1])

    def __getitem__(self, window: slice) -> TokenArray:
        start, stop, step = window.indices(len(self))
        parts = []
        position, shard = start, bisect_right(self._starts, start) - 1
        while position < stop:
            file, offset = self.files[shard], self._starts[shard]
            parts.append(file[position - offset : stop - offset])
            position, shard = offset + len(file), shard + 1
        joined = np.concatenate(parts) if parts else self.files[0][0:0]
        return joined[::step]


def write_shards(
    folder: Path, documents: Iterable[Iterable[list[int]]], plan: ShardIndex
) -> TokenShards:
    """Write, or finish writing, the shards of `documents`.

    Args:
        folder: Made if need be.
        documents: The tokens of each document, piece by piece, from the first one on.
        plan: What is to be made; its `shards` and `documents` are ignored.

    Raises:
        FileError: The folder cannot be written.
        FormatError: It holds shards of another text, tokenizer or size.
    """
    done = read_index(folder) or plan
    if not done.describes_the_same_work_as(plan):
        message = (
            f"{folder} holds shards of other text, another tokenizer or another size; "
            "choose another folder or remove it"
        )
        raise FormatError(message)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write into {folder}: {reason_of(error)}"
        raise FileError(message) from error
    remaining = _PeekableDocuments(islice(iter(documents), done.documents, None))
    while not done.complete and remaining:
        shard = _OneShard(remaining, plan.shard_tokens)
        name = f"shard-{len(done.shards):05}.bin"
        write_token_file(
            folder / name,
            shard,
            vocab_size=plan.vocab_size,
            tokenizer_checksum=plan.tokenizer_checksum,
        )
        total = done.documents + shard.documents
        done = replace(done, shards=(*done.shards, name), documents=total)
        _write_index(folder, done)
    _write_index(folder, replace(done, complete=True))
    return TokenShards.open(folder)


def read_index(folder: Path) -> ShardIndex | None:
    """Return the index of a folder of shards, or None if there is none.

    Raises:
        FormatError: It is damaged.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return ShardIndex(**{**content, "shards": tuple(content["shards"])})
    except (ValueError, TypeError, KeyError) as error:
        message = f"{path} is damaged: {error}; prepare again into an empty folder"
        raise FormatError(message) from error


def _write_index(folder: Path, index: ShardIndex) -> None:
    with atomic_write(folder / INDEX) as file:
        file.write(json.dumps(asdict(index), indent=1).encode())


class _PeekableDocuments:
    """Documents one by one; true while there is another."""

    def __init__(self, documents: Iterator[Iterable[list[int]]]) -> None:
        self._documents = documents
        self._next = next(documents, None)

    def __bool__(self) -> bool:
        return self._next is not None

    def pop(self) -> Iterator[list[int]]:
        """Yield the pieces of the next document, then make the one after it the next."""
        yield from self._next or ()
        self._next = next(self._documents, None)


class _OneShard:
    """As many documents as make `size` tokens; a document is never cut."""

    def __init__(self, documents: _PeekableDocuments, size: int) -> None:
        self._remaining, self._size = documents, size
        self.documents = self._tokens = 0

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        while self._remaining and self._tokens < self._size:
            yield self._counted(self._remaining.pop())
            self.documents += 1

    def _counted(self, pieces: Iterator[list[int]]) -> Iterator[list[int]]:
        for piece in pieces:
            self._tokens += len(piece)
            yield piece
