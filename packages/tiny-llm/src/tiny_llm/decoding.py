"""Decoding at speed: one token of each sequence at a time, with shapes that never change.

A model's decoding step launches hundreds of small kernels, and a GPU waits for the host between
them.  With a static cache each step is the same program on the same memory: it can be captured in a
CUDA graph, which the host starts with one call, and compiled before, which leaves fewer kernels.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tiny_llm.cache import KVCache
from tiny_llm.errors import AttentionUnavailable, ConfigError
from tiny_llm.transformer import Block, Transformer

MODES = ("auto", "eager", "graph", "compile")
# capacities are multiples of this, so that texts of about the same length share a compiled step
CAPACITY_STEP = 256


def resolve_mode(model: Transformer, mode: str) -> str:
    """Return what a mode comes to for a model where it is, and settle its attention for that.

    Args:
        model: On its device, in its dtype.
        mode: "eager"; "graph", a CUDA graph; "compile", `torch.compile` and on a GPU a CUDA graph;
            or "auto", "graph" on a GPU where the attention takes the lengths of a static cache.

    Raises:
        ConfigError: There is no such mode, or no GPU for a graph.
        AttentionUnavailable: The model's attention cannot read a static cache.
    """
    if mode not in MODES:
        message = f"`decode` must be one of {', '.join(MODES)}, got {mode!r}"
        raise ConfigError(message)
    weight = model.embedding.weight
    if mode == "graph" and not weight.is_cuda:
        raise ConfigError("decode 'graph' needs a CUDA device: use 'compile' or 'eager'")
    if mode == "eager" or (mode == "auto" and not weight.is_cuda):
        return "eager"
    try:
        model.resolve_attention(device=weight.device, dtype=weight.dtype, ragged=True)
    except AttentionUnavailable:
        if mode == "auto":
            return "eager"
        raise
    return "graph" if mode == "auto" else mode


def capacity_for(model: Transformer, tokens: int) -> int:
    """Return the capacity of a static cache that takes so many tokens, if the model can."""
    rounded = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
    return min(rounded, model.config.max_seq_len)


class DecodingStep:
    """Reads one more token of every sequence and returns the logits of the next one.

    Args:
        model: Whose attention reads a static cache; see `resolve_mode`.
        cache: What the sequences are so far; it becomes a static one.
        mode: "eager", "graph" or "compile".
    """

    def __init__(self, model: Transformer, cache: KVCache, mode: str) -> None:
        cache.static = True
        self._model, self._cache = model, cache
        device = model.embedding.weight.device
        self._tokens = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=device)
        self._read = _compiled(model, cache) if mode == "compile" else self._read_plainly
        self._captures = device.type == "cuda" and mode != "eager"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return the logits ``[B, vocab_size]`` after the next token of each sequence.

        They lie in memory that the next call overwrites.

        Args:
            tokens: One id for each sequence, int64 ``[B]``.

        Raises:
            ConfigError: The cache is full.
        """
        if max(self._cache.host_lengths) >= self._cache.capacity:
            message = f"the cache has room for {self._cache.capacity} tokens, and is full"
            raise ConfigError(message)
        given = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens)
        self._tokens.copy_(given[:, None], non_blocking=True)
        if self._captures and self._graph is None:
            self._capture()
        if self._graph is not None and self._logits is not None:
            self._graph.replay()
            logits = self._logits
        else:
            logits = self._run()
        self._cache.advance(1)
        return logits

    def _read_plainly(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(tokens, cache=self._cache)
        return logits

    def _run(self) -> Tensor:
        return self._read(self._tokens)[:, -1]

    def _capture(self) -> None:
        """Record one step.  It is repeatable: the cache's lengths change outside of it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # what is made on a first call must not be recorded
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._run()
        self._graph = graph


def _compiled(model: Transformer, cache: KVCache) -> Callable[[Tensor], Tensor]:
    """Return the logits' function of tokens ``[B, 1]``, in compiled parts.

    One block is compiled, not the model: blocks that are alike share its code, which so takes
    seconds however many there are.
    """
    # products with a single row reach the memory's speed only as tuned reductions
    on_gpu = model.embedding.weight.is_cuda
    options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if on_gpu else None
    block_forward = torch.compile(Block.forward, dynamic=False, options=options)
    logits_of = torch.compile(_logits, dynamic=False, options=options)
    blocks = cast("Iterable[Block]", model.blocks)
    layers = [(block, cache.layer(index)) for index, block in enumerate(blocks)]

    def read(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for block, layer in layers:
            x = block_forward(block, x, None, layer)
        return logits_of(model, x)

    return read


def _logits(model: Transformer, x: Tensor) -> Tensor:
    logits: Tensor = model.head(model.norm(x))
    return logits
