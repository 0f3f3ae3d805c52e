"""Tokens from text files; `tiny_llm.batches` draws from them."""

import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from tqdm import tqdm

from tiny_llm.documents import Document, find_sources, iter_documents
from tiny_llm.errors import ConfigError, FileError
from tiny_llm.shards import ShardIndex, TokenShards, write_shards
from tiny_llm.token_file import TokenArray, TokenFile, write_token_file
from tiny_llm.tokenizer import Tokenizer

__all__ = [
    "TokenArray",
    "TokenFile",
    "TokenShards",
    "Tokens",
    "open_tokens",
    "prepare_shards",
    "prepare_tokens",
    "stdlib_sources",
]

Tokens: TypeAlias = TokenFile | TokenShards


def prepare_tokens(
    paths: Iterable[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    column: str | None = None,
    progress: bool = False,
) -> TokenFile:
    """Tokenize documents into one token file, in the given order, each followed by end-of-text.

    Memory stays bounded whatever the size.  `out` appears whole or not at all.

    Args:
        paths: Files of any bytes, and folders of them; see `documents.find_sources`.
        out: The token file to write.  An old token file is replaced, any other file is not.
        tokenizer: Turns bytes into ids.
        column: Take the rows of this column of .jsonl and .parquet files as documents.
        progress: Show a progress bar on stderr.

    Raises:
        ConfigError: `paths` is empty.
        FileError: A source cannot be read, or `out` cannot be written.
        FormatError: `out` exists and is no token file, or a table is damaged.
    """
    sources = find_sources(paths, column)
    with _progress_bar(sources, progress) as bar:
        return write_token_file(
            out,
            _tokenized(iter_documents(sources, column, bar.update), tokenizer),
            vocab_size=tokenizer.vocab_size,
            tokenizer_checksum=tokenizer.checksum,
        )


def prepare_shards(
    paths: Iterable[str | Path],
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int,
    column: str | None = None,
    progress: bool = False,
) -> TokenShards:
    """Tokenize documents into shards of about `shard_tokens` tokens; goes on where it was stopped.

    Args:
        paths: Files of any bytes, and folders of them; see `documents.find_sources`.
        folder: Where the shards go.
        tokenizer: Turns bytes into ids.
        shard_tokens: A shard is closed with the document that reaches this size.
        column: Take the rows of this column of .jsonl and .parquet files as documents.
        progress: Show a progress bar on stderr.

    Raises:
        ConfigError: `paths` is empty, or `shard_tokens` is not positive.
        FileError: A source cannot be read, or the folder cannot be written.
        FormatError: The folder holds shards of something else, or a table is damaged.
    """
    if shard_tokens < 1:
        message = f"`shard_tokens` must be at least 1, got {shard_tokens}"
        raise ConfigError(message)
    sources = find_sources(paths, column)
    plan = ShardIndex(
        sources=_fingerprint(sources, column),
        tokenizer_checksum=tokenizer.checksum,
        vocab_size=tokenizer.vocab_size,
        shard_tokens=shard_tokens,
    )
    with _progress_bar(sources, progress) as bar:
        documents = _tokenized(iter_documents(sources, column, bar.update), tokenizer)
        return write_shards(Path(folder), documents, plan)


def open_tokens(path: str | Path) -> Tokens:
    """Map a token file, or a folder of token shards.

    Raises:
        FileError: There is none, or it cannot be read.
        FormatError: It is foreign, incomplete or damaged.
    """
    return TokenShards.open(path) if Path(path).is_dir() else TokenFile.open(path)


def stdlib_sources(max_bytes: int | None = None) -> list[Path]:
    """Return the ``.py`` files of the running Python's standard library, sorted, tests left out.

    Args:
        max_bytes: Keep the total at or below this: a file that would pass it is left out.

    Raises:
        FileError: This Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    sources, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts) and path.is_file():
            size = path.stat().st_size
            if max_bytes is None or total + size <= max_bytes:
                sources.append(path)
                total += size
    if not sources:
        limit = "" if max_bytes is None else f" of at most {max_bytes} bytes"
        message = f"no standard library sources{limit} under {root}; name files instead"
        raise FileError(message)
    return sources


def _tokenized(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[Iterator[list[int]]]:
    # a document that is skipped is not tokenized: its pieces are never asked for
    def tokens_of(document: Document) -> Iterator[list[int]]:
        for piece in document:
            yield tokenizer.encode(piece)
        yield [tokenizer.end_of_text]

    return map(tokens_of, documents)


def _progress_bar(sources: Sequence[Path], shown: bool) -> "tqdm[NoReturn]":
    # compressed columns say nothing about how much text they hold
    packed = any(source.suffix == ".parquet" for source in sources)
    total = None if packed else sum(source.stat().st_size for source in sources)
    return tqdm(total=total, desc="prepare", unit="B", unit_scale=True, disable=not shown)


def _fingerprint(sources: Sequence[Path], column: str | None) -> str:
    """Name the text without reading it: places, sizes and times of change."""
    stats = [(str(source), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    return f"{zlib.crc32(repr((column, stats)).encode()):08x}"
