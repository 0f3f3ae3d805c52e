"""The KV cache: keys and values of earlier tokens, so that each is computed once.

How a model reads with one:

    cache = KVCache(model.config, batch_size=2, device=device, dtype=dtype)
    with torch.no_grad():
        logits = model(prompts, cache=cache)     # [B, T], padded at the end
        cache.advance([5, 3])                    # the tokens that count; padding is overwritten
        logits = model(next_tokens, cache=cache)  # [B, 1], each row at its own position
        cache.advance(1)

The caller advances, not the model: so a step can be compiled, repeated, or taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tiny_llm.errors import ConfigError
from tiny_llm.model_config import ModelConfig


class AttentionCache(Protocol):
    """What a layer needs of a cache; `KVCache` is one."""

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v ``[B, H_kv, M, D]`` of the new tokens; return all ``[B, H_kv, N, D]``."""

    def positions(self, seqlen_q: int) -> Tensor:
        """Return the positions of M new tokens, int64 ``[M]`` or ``[B, M]``."""

    def key_lengths(self, seqlen_q: int) -> Tensor | None:
        """Return the keys each sequence has with M new tokens, ``[B]``; None if all have N."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a static `KVCache`, all of it in tensors.

    Code compiled with one of these serves every layer, since no layer's number is in it.

    Attributes:
        k, v: The buffers ``[B, H_kv, capacity, D]``.
        lengths: Tokens held for each sequence, int64 ``[B]``.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v ``[B, H_kv, M, D]`` behind each sequence's tokens; return the buffers."""
        rows = torch.arange(len(k), device=k.device)[:, None]  # [B, 1]
        places = self.positions(k.shape[2])  # [B, M]
        # torch.compile does this in place; of a scatter it would copy the whole buffer
        self.k[rows, :, places] = k.transpose(1, 2)
        self.v[rows, :, places] = v.transpose(1, 2)
        return self.k, self.v

    def positions(self, seqlen_q: int) -> Tensor:
        """Return where M new tokens will stand, int64 ``[B, M]``."""
        return self.lengths[:, None] + torch.arange(seqlen_q, device=self.lengths.device)

    def key_lengths(self, seqlen_q: int) -> Tensor:
        """Return each sequence's number of keys with M new tokens, ``[B]``."""
        return self.lengths + seqlen_q


class KVCache:
    """Keys and values of all layers, allocated once.

    Args:
        config: The model's.
        batch_size: Number of sequences B.
        capacity: Tokens per sequence; by default `max_seq_len`.
        device: Where the model is.
        dtype: What it computes in.
        static: Give every call the whole buffers, and `key_lengths` that say how much of them is
            filled.  Shapes then never change, which CUDA graphs and `torch.compile` need.

    Attributes:
        lengths: Tokens held for each sequence, int64 ``[B]`` on `device`.

    Raises:
        ConfigError: A size is below 1, or `capacity` is above what the model can see.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        *,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        static: bool = False,
    ) -> None:
        self.capacity = config.max_seq_len if capacity is None else capacity
        if batch_size < 1 or not 1 <= self.capacity <= config.max_seq_len:
            message = (
                f"a cache needs `batch_size` from 1 and `capacity` from 1 to {config.max_seq_len}, "
                f"got {batch_size} and {self.capacity}"
            )
            raise ConfigError(message)
        shape = (config.num_layers, batch_size, config.kv_heads, self.capacity, config.head_dim)
        self.static = static
        self._k = torch.zeros(shape, device=device, dtype=dtype)
        self._v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # the same on the host, so that asking for them never waits for the device
        self._host_lengths = [0] * batch_size

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self._host_lengths)

    @property
    def host_lengths(self) -> tuple[int, ...]:
        """The numbers in `lengths`, known without waiting for the device."""
        return tuple(self._host_lengths)

    @property
    def nbytes(self) -> int:
        """Memory of the buffers in bytes."""
        return self._k.nbytes + self._v.nbytes

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v ``[B, H_kv, M, D]`` behind each sequence's tokens; return all with them.

        Returns:
            Views ``[B, H_kv, N, D]`` of the buffers.  With sequences of different lengths N is the
            longest, and `key_lengths` tells where each ends.

        Raises:
            ConfigError: No room is left, the shapes differ, or gradients are being recorded.
        """
        self._check(k)
        seqlen = k.shape[2]
        k_all, v_all = self._k[layer_index], self._v[layer_index]
        if self._is_uniform:
            start = self._host_lengths[0]
            k_all[:, :, start : start + seqlen] = k
            v_all[:, :, start : start + seqlen] = v
        else:
            self.layer(layer_index).update(layer_index, k, v)
        if self.static:
            return k_all, v_all
        end = max(self._host_lengths) + seqlen
        return k_all[:, :, :end], v_all[:, :, :end]

    def positions(self, seqlen_q: int) -> Tensor:
        """Return where M new tokens will stand, int64 ``[M]``, or ``[B, M]`` if rows differ."""
        steps = torch.arange(seqlen_q, device=self.lengths.device)
        if self._is_uniform:
            return steps + self._host_lengths[0]
        return self.lengths[:, None] + steps

    def layer(self, index: int) -> LayerCache:
        """Return one layer's buffers; both are the same memory."""
        return LayerCache(self._k[index], self._v[index], self.lengths)

    def key_lengths(self, seqlen_q: int) -> Tensor | None:
        """Return each sequence's number of keys with M new tokens, or None if all have all."""
        return None if self._is_uniform else self.lengths + seqlen_q

    def advance(self, counts: int | Sequence[int]) -> None:
        """Keep the tokens written last: the first `counts` of each sequence.

        Args:
            counts: One number for all sequences, or one for each.

        Raises:
            ConfigError: A number is negative or goes past the capacity, or there are not B of them.
        """
        if isinstance(counts, int) and 0 <= counts <= self.capacity - max(self._host_lengths):
            # without a copy from the host: each token that is decoded comes here
            self._host_lengths = [length + counts for length in self._host_lengths]
            self.lengths += counts
            return
        counts = [counts] * self.batch_size if isinstance(counts, int) else list(counts)
        if len(counts) != self.batch_size or min(counts) < 0:
            message = f"`counts` must be {self.batch_size} numbers from 0, got {counts}"
            raise ConfigError(message)
        self.set_lengths([a + b for a, b in zip(self._host_lengths, counts, strict=True)])

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Say how many tokens of each sequence count; fewer than before takes tokens back.

        Raises:
            ConfigError: A number is out of range, or there are not B of them.
        """
        lengths = list(lengths)
        if (
            len(lengths) != self.batch_size
            or not 0 <= min(lengths) <= max(lengths) <= self.capacity
        ):
            message = (
                f"`lengths` must be {self.batch_size} numbers from 0 to {self.capacity}, "
                f"got {lengths}"
            )
            raise ConfigError(message)
        self._host_lengths = lengths
        # in place: a captured CUDA graph goes on reading this tensor
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int64))

    def fill_normal(self, generator: torch.Generator) -> None:
        """Put random keys and values everywhere, for tests and benchmarks."""
        for buffer in (self._k, self._v):
            buffer.normal_(generator=generator)

    @property
    def _is_uniform(self) -> bool:
        return not self.static and len(set(self._host_lengths)) == 1

    def _check(self, k: Tensor) -> None:
        if torch.is_grad_enabled() and k.requires_grad:
            raise ConfigError("a cache holds no gradients: call the model under torch.no_grad()")
        batch, heads, seqlen, head_dim = k.shape
        expected = (self.batch_size, self._k.shape[2], self._k.shape[4])
        if (batch, heads, head_dim) != expected or k.dtype != self._k.dtype:
            message = (
                f"the cache holds [B, H_kv, D] = {list(expected)} in {self._k.dtype}, "
                f"got {[batch, heads, head_dim]} in {k.dtype}"
            )
            raise ConfigError(message)
        if not self.static and max(self._host_lengths) + seqlen > self.capacity:
            message = (
                f"the cache has room for {self.capacity} tokens, "
                f"got {max(self._host_lengths)} and {seqlen} more"
            )
            raise ConfigError(message)
