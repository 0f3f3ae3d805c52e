"""Tokens from text files, and batches from tokens."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tiny_llm.errors import ConfigError, FileError
from tiny_llm.files import CHUNK_BYTES, reason_of
from tiny_llm.token_file import TokenArray, TokenFile, write_token_file
from tiny_llm.tokenizer import ByteTokenizer

__all__ = [
    "TokenArray",
    "TokenFile",
    "check_long_enough",
    "prepare_tokens",
    "sample_batch",
    "stdlib_sources",
]


def prepare_tokens(
    paths: Iterable[str | Path],
    out: str | Path,
    tokenizer: ByteTokenizer,
    *,
    progress: bool = False,
) -> TokenFile:
    """Tokenize files into one token file, in the given order, each followed by end-of-text.

    Memory stays bounded whatever the size.  `out` appears whole or not at all.

    Args:
        paths: Files of any bytes.
        out: The token file to write.  An old token file is replaced, any other file is not.
        tokenizer: Turns bytes into ids.
        progress: Show a progress bar on stderr.

    Raises:
        ConfigError: `paths` is empty.
        FileError: A source cannot be read, or `out` cannot be written.
        FormatError: `out` exists and is no token file.
    """
    sources = [Path(path) for path in paths]
    if not sources:
        raise ConfigError("nothing to prepare: no source files were given")
    total = sum(_source_size(source) for source in sources)
    with tqdm(total=total, desc="prepare", unit="B", unit_scale=True, disable=not progress) as bar:
        chunks = _token_chunks(sources, tokenizer, on_bytes=bar.update)
        return write_token_file(out, chunks, vocab_size=tokenizer.vocab_size)


def sample_batch(
    tokens: TokenFile | TokenArray, batch_size: int, seq_len: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw windows at random places; returns inputs and targets ``[batch_size, seq_len]``, int64.

    The target of a token is the token after it.

    Args:
        tokens: A token file, or an array of ids ``[count]``.
        batch_size: Number of windows.
        seq_len: Tokens per window.
        generator: A CPU generator; its state alone decides the places.

    Raises:
        ConfigError: There are fewer than seq_len + 1 tokens.
    """
    check_long_enough(tokens, seq_len)
    starts = torch.randint(len(tokens) - seq_len, (batch_size,), generator=generator)
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts.tolist()])
    batch = torch.from_numpy(windows.astype(np.int64))  # [batch_size, seq_len + 1]
    return batch[:, :-1], batch[:, 1:]


def check_long_enough(tokens: TokenFile | TokenArray, seq_len: int) -> None:
    """Refuse tokens that are too few for one window and the target of its last token.

    Raises:
        ConfigError: There are fewer than seq_len + 1 tokens.
    """
    if len(tokens) < seq_len + 1:
        message = (
            f"seq_len={seq_len} needs at least {seq_len + 1} tokens, got {len(tokens)}; "
            "prepare more text or lower seq_len"
        )
        raise ConfigError(message)


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


def _source_size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        message = f"cannot read {path}: {reason_of(error)}"
        raise FileError(message) from error
    if path.is_dir():
        message = f"cannot read {path}: it is a folder; name the files in it"
        raise FileError(message)
    return size


def _token_chunks(
    sources: Sequence[Path], tokenizer: ByteTokenizer, *, on_bytes: Callable[[int], object]
) -> Iterator[list[int]]:
    # cutting anywhere is right because the tokenizer maps each byte by itself
    for source in sources:
        try:
            with source.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    on_bytes(len(chunk))
                    yield tokenizer.encode(chunk)
        except OSError as error:
            message = f"cannot read {source}: {reason_of(error)}"
            raise FileError(message) from error
        yield [tokenizer.end_of_text]
