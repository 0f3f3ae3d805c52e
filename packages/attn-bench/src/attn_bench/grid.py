"""Grids of cases: the presets, and the shapes of known models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attn_bench.case import MODES, Case, check_name
from attn_bench.errors import InputError


@dataclass(frozen=True)
class Grid:
    """Axes whose product is the cases.

    Two of `d_models`, `num_heads` and `head_dims` fix the heads; the third follows from
    d_model = num_heads * head_dim.  An empty `seqlens_k` means as many keys as queries, an empty
    `batches` means `total_tokens` // seqlen_q.
    """

    dtypes: tuple[str, ...]
    seqlens_q: tuple[int, ...]
    d_models: tuple[int, ...] = ()
    num_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    seqlens_k: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    total_tokens: int | None = None
    causal: tuple[bool, ...] = (False, True)
    modes: tuple[str, ...] = MODES
    num_kv_heads: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    def with_axes(self, given: Mapping[str, Any]) -> "Grid":
        """Return a copy with some axes replaced.

        Of the three axes that describe the heads, those not given yield to those given, so that two
        remain; head_dims yields last.
        """
        heads = ("head_dims", "d_models", "num_heads")
        asked = [name for name in heads if name in given]
        own = [name for name in heads if name not in given and getattr(self, name)]
        dropped = own[max(0, 2 - len(asked)) :]
        return replace(self, **{**given, **dict.fromkeys(dropped, ())})

    def cases(self) -> list[Case]:
        """Return the cases, the modes of one shape next to each other.

        Raises:
            InputError: if the axes contradict each other or a value is out of range.
        """
        return [
            Case(
                dtype=dtype,
                batch=self._batch(batch, n_q),
                num_heads=heads,
                seqlen_q=n_q,
                seqlen_k=n_k or n_q,
                head_dim=head_dim,
                is_causal=causal,
                mode=mode,
                # one way to say that there are as many, so that equal cases are equal
                num_kv_heads=None if kv_heads == heads else kv_heads,
                window=window,
            )
            for dtype, (heads, head_dim), kv_heads, causal, window, n_q, n_k, batch, mode in (
                self._product()
            )
        ]

    def _product(self) -> Iterator[tuple[Any, ...]]:
        return product(
            self.dtypes,
            self._heads(),
            self.num_kv_heads or (None,),
            self.causal,
            self.windows or (None,),
            self.seqlens_q,
            self.seqlens_k or (0,),
            self.batches or (0,),
            self.modes,
        )

    def _heads(self) -> list[tuple[int, int]]:
        """Return the pairs (num_heads, head_dim)."""
        given = [self.d_models, self.num_heads, self.head_dims]
        if sum(map(bool, given)) != 2:
            msg = (
                "exactly two of `--d-model`, `--heads` and `--head-dim` fix the heads, got d_model "
                f"{self.d_models}, heads {self.num_heads}, head_dim {self.head_dims}."
            )
            raise InputError(msg)
        if not self.d_models:
            return list(product(self.num_heads, self.head_dims))
        if self.head_dims:
            return [
                (split(d, dim, "head_dim"), dim)
                for d, dim in product(self.d_models, self.head_dims)
            ]
        return [(n, split(d, n, "heads")) for d, n in product(self.d_models, self.num_heads)]

    def _batch(self, batch: int, seqlen: int) -> int:
        if self.batches:
            return batch
        if self.total_tokens is None:
            raise InputError("give `--batch`, or `--total-tokens` to derive it from the length.")
        if self.total_tokens < seqlen:
            msg = f"`--total-tokens` must be at least the length {seqlen}, got {self.total_tokens}."
            raise InputError(msg)
        return self.total_tokens // seqlen


def split(d_model: int, parts: int, name: str) -> int:
    """Return d_model / parts, or raise InputError if it does not divide evenly."""
    if parts < 1 or d_model % parts:
        msg = f"`d_model` {d_model} is not a multiple of {name} {parts}."
        raise InputError(msg)
    return d_model // parts


PRESETS = {
    # seconds on a CPU; what CI runs
    "smoke": Grid(
        dtypes=("fp32",),
        seqlens_q=(64, 100),
        num_heads=(2,),
        head_dims=(32,),
        batches=(1,),
        modes=("fwd", "fwd+bwd"),
    ),
    # the grid of the FlashAttention papers: 16k tokens in all, hidden size 2048
    "paper": Grid(
        dtypes=("bf16",),
        seqlens_q=(512, 1024, 2048, 4096, 8192, 16384),
        d_models=(2048,),
        head_dims=(64, 128),
        total_tokens=16384,
        modes=("fwd", "bwd"),
    ),
    # what a course on building language models asks for: one sequence, every length and width
    "course": Grid(
        dtypes=("bf16", "fp32"),
        seqlens_q=tuple(2**power for power in range(7, 17)),
        num_heads=(1,),
        head_dims=(16, 32, 64, 128),
        batches=(1,),
        causal=(True,),
    ),
}

# what attention costs in a model does not depend on its weights, only on these
# one query for each sequence of a batch, over the keys and values of a cache.  A mask would hide
# nothing: the query is the last position.
DECODE_PRESETS = {
    "smoke": Grid(
        dtypes=("fp32",),
        seqlens_q=(1,),
        seqlens_k=(64, 100),
        num_heads=(4,),
        num_kv_heads=(2,),
        head_dims=(32,),
        batches=(2,),
        causal=(False,),
        modes=("fwd",),
    ),
    "serving": Grid(
        dtypes=("bf16",),
        seqlens_q=(1,),
        seqlens_k=(2048, 8192, 32768),
        num_heads=(32,),
        num_kv_heads=(8, 32),
        head_dims=(128,),
        batches=(1, 8, 64),
        causal=(False,),
        modes=("fwd",),
    ),
}

# name: (heads of q, heads of k and v, head dim, context length in training, window)
MODELS: dict[str, tuple[int, int, int, int, int | None]] = {
    "gpt2": (12, 12, 64, 1024, None),
    "gpt2-xl": (25, 25, 64, 1024, None),
    "llama-3-8b": (32, 8, 128, 8192, None),
    "llama-3-70b": (64, 8, 128, 8192, None),
    "mistral-7b": (32, 8, 128, 8192, 4096),
    "qwen3-0.6b": (16, 8, 128, 8192, None),
    "qwen3-8b": (32, 8, 128, 8192, None),
}


def grid_of_model(name: str) -> Grid:
    """Return one sequence of the model `name` in training: its heads, window and context length.

    Raises:
        InputError: if the model is unknown.
    """
    check_name("model", name, MODELS)
    num_heads, num_kv_heads, head_dim, seqlen, window = MODELS[name]
    return Grid(
        dtypes=("bf16",),
        seqlens_q=(seqlen // 4, seqlen),
        num_heads=(num_heads,),
        head_dims=(head_dim,),
        batches=(1,),
        causal=(True,),
        modes=("fwd", "bwd"),
        num_kv_heads=(num_kv_heads,),
        windows=() if window is None else (window,),
    )
