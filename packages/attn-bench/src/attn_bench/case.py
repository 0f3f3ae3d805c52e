"""What is measured: one case, and grids of cases."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from attn_bench.errors import InputError

if TYPE_CHECKING:
    import torch

# the names used on the command line and in result files -> torch's
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MODES = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Case:
    """One attention problem and what is timed of it.

    Queries are ``[batch, num_heads, seqlen_q, head_dim]``, keys and values
    ``[batch, num_heads, seqlen_k, head_dim]``.  Causal is aligned bottom-right: query i sees the
    keys j <= i + seqlen_k - seqlen_q.  ``mode`` is the forward without gradients (``fwd``), the
    backward alone (``bwd``) or a forward followed by its backward (``fwd+bwd``).

    Raises:
        InputError: if a size is below 1 or a name is unknown.
    """

    dtype: str
    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    is_causal: bool
    mode: str

    def __post_init__(self) -> None:
        for name in ("batch", "num_heads", "seqlen_q", "seqlen_k", "head_dim"):
            size = getattr(self, name)
            if size < 1:
                msg = f"`{name}` must be at least 1, got {size}."
                raise InputError(msg)
        check_name("dtype", self.dtype, DTYPES)
        check_name("mode", self.mode, MODES)

    @property
    def shape(self) -> "Case":
        """The same problem with the mode left out (set to ``fwd``): what is checked once."""
        return replace(self, mode="fwd")

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of q, k and v."""
        # the command line needs this module's names before it can afford torch's import
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return (
            f"{self.dtype} b={self.batch} h={self.num_heads} n={lengths(self)} "
            f"d={self.head_dim} {mask} {self.mode}"
        )


def lengths(case: Case) -> str:
    """Return ``n`` or, where they differ, ``n_q x n_k``."""
    if case.seqlen_q == case.seqlen_k:
        return str(case.seqlen_q)
    return f"{case.seqlen_q}x{case.seqlen_k}"


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise InputError unless `name` is one of `known`."""
    names = tuple(known)
    if name not in names:
        listed = ", ".join(repr(each) for each in names)
        msg = f"unknown {what} {name!r}; choose from {listed}."
        raise InputError(msg)


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
            Case(dtype, self._batch(batch, n_q), heads, n_q, n_k or n_q, head_dim, causal, mode)
            for dtype, (heads, head_dim), causal, n_q, n_k, batch, mode in product(
                self.dtypes,
                self._heads(),
                self.causal,
                self.seqlens_q,
                self.seqlens_k or (0,),
                self.batches or (0,),
                self.modes,
            )
        ]

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
}

CASE_FIELDS = tuple(field.name for field in fields(Case))
