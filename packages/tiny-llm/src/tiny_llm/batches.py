"""Batches from tokens: windows at random places, and where their documents begin."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiny_llm.data import TokenArray, Tokens
from tiny_llm.devices import to_device
from tiny_llm.errors import ConfigError


def sample_batch(
    tokens: Tokens | TokenArray,
    batch_size: int,
    seq_len: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draw windows at random places; returns inputs and targets ``[batch_size, seq_len]``, int64.

    Args:
        tokens: A token file, or an array of ids ``[count]``.
        batch_size: Number of windows.
        seq_len: Tokens per window.
        generator: A CPU generator; its state alone decides the places.
        device: Where the batch is to be.

    Raises:
        ConfigError: There are fewer than seq_len + 1 tokens.
    """
    starts = draw_starts(tokens, batch_size, seq_len, generator)
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
    return inputs_and_targets(torch.from_numpy(windows.astype(np.int64)), device)


def inputs_and_targets(windows: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return windows ``[B, T + 1]`` as inputs and targets ``[B, T]`` on a device.

    The target of a token is the token after it.  The windows are moved as one and cut there.
    """
    moved = to_device(windows, device)
    return moved[:, :-1].contiguous(), moved[:, 1:].contiguous()


def draw_starts(
    tokens: Tokens | TokenArray, batch_size: int, seq_len: int, generator: torch.Generator
) -> list[int]:
    """Draw where the windows of `sample_batch` begin.

    Raises:
        ConfigError: There are fewer than seq_len + 1 tokens.
    """
    check_long_enough(tokens, seq_len)
    starts: list[int] = torch.randint(
        len(tokens) - seq_len, (batch_size,), generator=generator
    ).tolist()
    return starts


def positions_in_documents(
    tokens: Tokens | TokenArray, starts: Sequence[int], seq_len: int
) -> Tensor:
    """Return how far each token of some windows is from its document's beginning, int64 ``[B, T]``.

    A document that began before a window counts from the window's first token.

    Args:
        tokens: A token file or shards, which know their documents.
        starts: Where the windows begin.
        seq_len: Tokens per window.

    Raises:
        ConfigError: `tokens` is a bare array.
    """
    if isinstance(tokens, np.ndarray):
        raise ConfigError(
            "`within_documents` needs a token file or shards, which know where documents end"
        )
    rows = []
    for start in starts:
        first, last = np.searchsorted(
            tokens.document_ends, np.array([start, start + seq_len], np.uint64), side="right"
        )
        # a document that ends at e is followed by one that begins there
        ends = np.asarray(tokens.document_ends[first:last], dtype=np.int64)
        begins = np.concatenate(([0], ends[ends < start + seq_len] - start))
        index = np.arange(seq_len)
        rows.append(index - begins[np.searchsorted(begins, index, side="right") - 1])
    return torch.from_numpy(np.stack(rows))


def check_long_enough(tokens: Tokens | TokenArray, seq_len: int) -> None:
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
