"""What one attention differs in from ``softmax(scale * q k^T) v``, as small records."""

from typing import NamedTuple

from torch import Tensor


class Variant(NamedTuple):
    """Numbers: they decide which kernel is compiled and which keys are visited.

    Row i stands at position ``i + N - M`` among the keys, and sees those from ``left`` before it to
    ``right`` after it; None is unbounded.  Causal is ``right = 0``.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)

    @property
    def is_windowed(self) -> bool:
        """Whether some keys are hidden by their distance."""
        return self.left is not None or self.right is not None


class Modifiers(NamedTuple):
    """Tensors that change the scores, after scale and softcap, in this order; None for none."""

    alibi_slopes: Tensor | None = None  # float32 [H] or [B, H]: adds -slope * |i + N - M - j|
    bias: Tensor | None = None  # broadcasts to [..., M, N], added
    mask: Tensor | None = None  # bool, broadcasts to [..., M, N]: True may attend
    sinks: Tensor | None = None  # [H]: one more score in each row's denominator

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors there are."""
        return [x for x in self if x is not None]


PLAIN = Modifiers()


class Packing(NamedTuple):
    """Where packed sequences lie: sequence b from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``."""

    cu_seqlens_q: Tensor  # int32 or int64 [B + 1], starts at 0
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None = None  # no sequence is longer; None: not said
    max_seqlen_k: int | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences are packed."""
        return self.cu_seqlens_q.shape[0] - 1


def make_variant(
    head_dim: int,
    *,
    is_causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
) -> Variant:
    """Fold the public options into numbers: causal bounds the window on the right."""
    left, right = (None, None) if window is None else window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    scale = head_dim**-0.5 if scale is None else float(scale)
    return Variant(scale, left, right, None if softcap is None else float(softcap))
