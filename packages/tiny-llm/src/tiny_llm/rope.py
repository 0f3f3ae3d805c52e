"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout.

Pair i of a head holds the elements i and i + D/2, and is turned at position t by the angle

    t * theta ** (-2 i / D)        i = 0 .. D/2 - 1

so that q . k depends on the distance of their positions only.  The paper pairs neighbours
(2i, 2i + 1); halves are what Llama-family weights on Hugging Face are stored for.  The two differ
by a fixed permutation of the head's elements, so weights trained with one need it for the other.
"""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from tiny_llm.errors import ConfigError

FEW_TURNS, MANY_TURNS = 1.0, 4.0  # Llama 3's `low_freq_factor` and `high_freq_factor`


class RotaryEmbedding(nn.Module):
    """Rotates ``[..., T, D]`` by position.

    Args:
        head_dim: D, an even number.
        max_seq_len: Number of positions to prepare.
        theta: Base of the wavelengths.
        factor: Stretch of the longest wavelengths, see `stretched`; 1 is none.
        original_len: Length that a stretched model was first trained at.

    Raises:
        ConfigError: `head_dim` is odd.
    """

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        *,
        theta: float = 10_000.0,
        factor: float = 1.0,
        original_len: int = 8192,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            message = f"`head_dim` must be even, got {head_dim}"
            raise ConfigError(message)
        self.max_seq_len = max_seq_len
        # float64 here: at position 1e5 a float32 angle is off by 1e-2.  On the CPU even where the
        # model is built on the meta device: the tables are computed, not loaded.
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(max_seq_len, dtype=torch.float64, device="cpu")
        frequencies = stretched(theta ** (-pairs / head_dim), factor, original_len)
        angles = torch.outer(positions, frequencies)  # [T, D/2]
        # plain attributes, not buffers: model.to(torch.bfloat16) must not round the tables
        default = torch.get_default_device()
        device = "cpu" if default.type == "meta" else default
        self._cos = angles.cos().float().to(device)
        self._sin = angles.sin().float().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Take the tables along to another device; a compiled step must not find them elsewhere."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device=self._cos.device)).device
        if device.type != "meta":
            self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x ``[..., T, D]`` with each row rotated to its position, in x's dtype.

        Args:
            x: Rows to rotate; with positions ``[B, T]`` of shape ``[B, H, T, D]``.
            positions: int64 ``[T]`` or ``[B, T]``; by default 0 to T - 1.

        Raises:
            ConfigError: A position is `max_seq_len` or above (checked on the CPU only; a GPU
                would have to be waited for).
        """
        seq_len = x.shape[-2]
        if positions is None:
            self._check(seq_len)
        elif positions.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check(int(positions.max()) + 1)
        if self._cos.device != x.device:
            self._cos, self._sin = self._cos.to(x.device), self._sin.to(x.device)
        if positions is None:
            return rotate(x, self._cos[:seq_len], self._sin[:seq_len])
        cos, sin = self._cos[positions], self._sin[positions]  # [(B,) T, D/2]
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, D/2]: the same for every head
        return rotate(x, cos, sin)

    def _check(self, seq_len: int) -> None:
        if seq_len > self.max_seq_len:
            message = f"the model sees at most {self.max_seq_len} tokens, got {seq_len}"
            raise ConfigError(message)


def stretched(frequencies: Tensor, factor: float, original_len: int) -> Tensor:
    """Return the frequencies of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783) and later.

    Pairs that turn at least 4 times within `original_len` stay; those that turn less than once are
    slowed down by `factor`; between them the two are blended.
    """
    turns = original_len * frequencies / (2 * math.pi)
    kept = ((turns - FEW_TURNS) / (MANY_TURNS - FEW_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair i of every row of x ``[..., T, D]`` by the angle in cos, sin ``[T, D/2]``.

    Computed in float32 or better, returned in x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
