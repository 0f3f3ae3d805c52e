"""What the Hopper kernels take, and how they are built: plain data, no Triton."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CAPABILITY = 90  # compute capability 9.0 alone: wgmma exists nowhere else
OLDEST_TRITON = (3, 6)
DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = {"impl": ("dense", "packed"), "backward": ("dense",)}
MAX_SEQLEN = 1 << 28  # rows are counted in 32 bits
# What `auto` takes of what the kernels can do; the rest it leaves to the portable kernels.
# Up to 32 columns are padded to 64 here: the portable kernels make half the products there.
AUTO_HEAD_DIMS: Sequence[int] = range(40, 257, 8)
AUTO_LAYOUTS = ("dense", "packed")
AUTO_SOFTCAP = True
# Up to so many rows, of q and of k, the host needs less time for one launch without descriptors
# than for two with them, and the GPU hardly any.
FEW_ROWS = 256
SMALLEST_SCALE = 1e-30  # the running maximum is that of unscaled scores: a scale must be positive
# the forward's tanh loses digits of scores that are small beside the softcap: 1e-4 at this one
LARGEST_SOFTCAP = 1000.0
# all are padded to one of a few widths; the copy engine takes rows in multiples of 16 bytes
HEAD_DIMS = range(8, 257, 8)
WIDEST_FUSED = 128  # up to here one kernel makes dq, dk and dv; above, dk and dv fill its registers

WARPGROUP_ROWS = 64  # query rows of one warpgroup: the M of a wgmma


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward is built for a head dim."""

    block_n: int  # keys of a block
    consumers: int = 2  # warpgroups that multiply, 64 query rows each
    stages: int = 2  # blocks of K, and of V, on their way or in use
    q_buffers: int = 2  # 1: o leaves through the buffer of q
    consumer_registers: int = 240
    producer_registers: int = 24
    swath_mib: int = 32  # K and V of the heads that run together: they are to stay in the L2 cache


@dataclass(frozen=True)
class ForwardSpec:
    """The compile-time side of a forward launch, handed to the kernel as one ``constexpr``."""

    WIDTHS: tuple[int, ...]  # columns of the pieces of a tile: the head dim, padded
    BLOCK_N: int
    CONSUMERS: int
    STAGES: int
    Q_BUFFERS: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    SHARES_KEYS: bool  # the warpgroups of a tile have the same rows of different heads of a group
    HAS_RIGHT: bool  # a row sees the keys up to some distance after its own position: causal
    HAS_LEFT: bool  # ... and down to some distance before it
    HAS_SOFTCAP: bool
    IS_PACKED: bool  # many sequences, one after the other
    MASKS_FIRST: bool  # the block at the right end of a tile needs a mask
    MASKS_LAST: bool  # so do blocks at the left end
    MAY_BE_EMPTY: bool  # there are rows that see no key
    SHIFT: int  # log2 of the largest p that the first block may give, negated

    @property
    def ROW_BYTES(self) -> int:
        """Bytes that the copy engine counts for a row."""
        return 2 * sum(self.WIDTHS)

    @property
    def THREADS(self) -> int:
        """Threads at a named barrier of all consumers and the producer."""
        return 128 * self.CONSUMERS + 32


# The best of the measurements in docs/hopper-log.md, by the columns of a tile's pieces; 96 and 192
# are built like their neighbours.
FORWARD = {
    (64,): ForwardConfig(block_n=128, stages=3),
    (64, 32): ForwardConfig(block_n=128, stages=3),
    (128,): ForwardConfig(block_n=128),
    (128, 64): ForwardConfig(block_n=64, stages=3, q_buffers=1),
    (256,): ForwardConfig(block_n=64, q_buffers=1),
}
# d = 64 from this many keys on: three consumers share each block of K and V
FORWARD_LONG = {
    (64,): ForwardConfig(
        block_n=128, consumers=3, stages=2, consumer_registers=160, producer_registers=32
    ),
    (256,): ForwardConfig(block_n=64, q_buffers=1, swath_mib=64),
}
LONG = 8192


def is_chosen(layout: str, head_dim: int, longest: int, *, has_softcap: bool) -> bool:
    """Say whether `auto` takes the forward for a request, of ``longest`` rows of q or k."""
    # packed, the rows of all sequences say nothing of one; its bits must not depend on the others
    is_short = layout == "dense" and longest <= FEW_ROWS
    fits = head_dim in AUTO_HEAD_DIMS and layout in AUTO_LAYOUTS
    return fits and not is_short and (AUTO_SOFTCAP or not has_softcap)


def widths_of(head_dim: int) -> tuple[int, ...]:
    """Return the pieces of a tile of at least ``head_dim`` columns: the copy engine pads."""
    return min((widths for widths in FORWARD if sum(widths) >= head_dim), key=sum)


def forward_config(head_dim: int, seqlen_k: int) -> ForwardConfig:
    """Return the forward's configuration for a head dim and a number of keys."""
    widths = widths_of(head_dim)
    return (FORWARD_LONG if seqlen_k >= LONG else {}).get(widths, FORWARD[widths])


class LayoutRefusal(ValueError):
    """The tensors lie in memory as the copy engine cannot read them; the portable kernels can."""


class BuildFailure(RuntimeError):
    """A kernel cannot be compiled or loaded here; says why in one line."""
