"""What is measured: one case, and grids of cases."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

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
    ``[batch, num_kv_heads, seqlen_k, head_dim]``; None means as many heads as the queries have.
    Causal is aligned bottom-right: query i sees the keys j <= i + seqlen_k - seqlen_q.  A window
    of w hides what is more than w keys from there, on both sides.  ``mode`` is the forward without
    gradients (``fwd``), the backward alone (``bwd``) or a forward followed by its backward
    (``fwd+bwd``).

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
    num_kv_heads: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "num_heads", "seqlen_q", "seqlen_k", "head_dim", "num_kv_heads"):
            size = getattr(self, name)
            if size is not None and size < 1:
                msg = f"`{name}` must be at least 1, got {size}."
                raise InputError(msg)
        if self.num_heads % self.kv_heads:
            msg = f"`num_heads` {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}."
            raise InputError(msg)
        if self.window is not None and self.window < 0:
            msg = f"`window` must be at least 0, got {self.window}."
            raise InputError(msg)
        check_name("dtype", self.dtype, DTYPES)
        check_name("mode", self.mode, MODES)

    @property
    def shape(self) -> "Case":
        """The same problem with the mode left out (set to ``fwd``): what is checked once."""
        return replace(self, mode="fwd")

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of q, k and v."""
        # the command line needs this module's names before it can afford torch's import
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    def __str__(self) -> str:
        return (
            f"{self.dtype} b={self.batch} h={heads(self)} n={lengths(self)} "
            f"d={self.head_dim} {mask_name(self)} {self.mode}"
        )


def heads(case: Case) -> str:
    """Return the number of heads, as ``32/8`` where k and v have fewer."""
    return str(case.num_heads) if case.num_kv_heads is None else f"{case.num_heads}/{case.kv_heads}"


def mask_name(case: Case) -> str:
    """Return ``causal`` or ``full``, with the window if there is one."""
    mask = "causal" if case.is_causal else "full"
    return mask if case.window is None else f"{mask} w={case.window}"


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


CASE_FIELDS = tuple(field.name for field in fields(Case))
