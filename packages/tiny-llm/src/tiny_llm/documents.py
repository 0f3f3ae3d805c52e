"""Documents from files, folders, and the columns of JSON Lines and Parquet files.

A document is an iterator of pieces of bytes, so that one of any size takes bounded memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny_llm.errors import ConfigError, FileError, FormatError, MissingExtraError
from tiny_llm.files import CHUNK_BYTES, reason_of

Document = Iterator[bytes]
OnBytes = Callable[[int], object]
TABLES = (".jsonl", ".parquet")


def find_sources(paths: Iterable[str | Path], column: str | None = None) -> list[Path]:
    """Return the files that `paths` name, folders replaced by the files in them, sorted.

    Hidden files and folders are left out of folders; with a `column`, so is what is no table.

    Raises:
        ConfigError: Nothing was named, a folder is empty, or a file with a column is no table.
        FileError: A path cannot be read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found.extend(_files_in(path, column))
            continue
        try:
            with path.open("rb"):
                found.append(path)
        except OSError as error:
            message = f"cannot read {path}: {reason_of(error)}"
            raise FileError(message) from error
        if column is not None and path.suffix not in TABLES:
            message = f"--column {column} needs .jsonl or .parquet files, got {path}"
            raise ConfigError(message)
    if not found:
        raise ConfigError("nothing to prepare: no source files were given")
    return found


def iter_documents(
    sources: Sequence[Path], column: str | None, on_bytes: OnBytes
) -> Iterator[Document]:
    """Yield the documents in order: each file is one, or with a `column` each row.

    Args:
        sources: What `find_sources` gave.
        column: Where the text is in .jsonl and .parquet files.
        on_bytes: Told how many bytes of text each piece has, for a progress bar.

    Raises:
        FileError: A source cannot be read.
        FormatError: A table is damaged or has no such column of text.
        MissingExtraError: A Parquet file needs pyarrow.
    """
    for source in sources:
        try:
            if column is None:
                yield _file_pieces(source, on_bytes)
                continue
            rows = _parquet_rows if source.suffix == ".parquet" else _jsonl_rows
            for text in rows(source, column):
                on_bytes(len(text))
                yield iter([text])
        except OSError as error:
            message = f"cannot read {source}: {reason_of(error)}"
            raise FileError(message) from error


def _files_in(folder: Path, column: str | None) -> list[Path]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (column is None or path.suffix in TABLES)
    ]
    if not files:
        message = f"cannot read {folder}: the folder holds no files to prepare"
        raise FileError(message)
    return files


def _file_pieces(source: Path, on_bytes: OnBytes) -> Document:
    """Cut a file at line ends, so that a tokenizer sees whole words and whole characters."""
    try:
        with source.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                piece += b"" if piece.endswith(b"\n") else file.readline(CHUNK_BYTES)
                on_bytes(len(piece))
                yield piece
    except OSError as error:
        message = f"cannot read {source}: {reason_of(error)}"
        raise FileError(message) from error


def _jsonl_rows(source: Path, column: str) -> Iterator[bytes]:
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                message = f"{source} line {number} is not JSON: {error}"
                raise FormatError(message) from error
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                message = f"{source} line {number} has no text under {column!r}"
                raise FormatError(message)
            # JSON can spell half a surrogate pair, UTF-8 cannot
            yield text.encode("utf-8", errors="replace")


def _parquet_rows(source: Path, column: str) -> Iterator[bytes]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        message = f"{source} needs the optional package pyarrow: install tiny-llm[parquet]"
        raise MissingExtraError(message) from error
    try:
        with pyarrow.parquet.ParquetFile(source) as table:
            names = table.schema_arrow.names
            if column not in names:
                message = f"{source} has no column {column!r}; it has {', '.join(names)}"
                raise FormatError(message)
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | bytes):
                        message = f"column {column!r} of {source} holds {text!r}, which is no text"
                        raise FormatError(message)
                    yield text.encode() if isinstance(text, str) else text
    except pyarrow.ArrowInvalid as error:
        message = f"{source} is no Parquet file: {error}"
        raise FormatError(message) from error
