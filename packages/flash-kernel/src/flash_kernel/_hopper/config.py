"""What the Hopper kernels take, and how they are built: plain data, no Triton."""

from dataclasses import dataclass

import torch

CAPABILITY = 90  # compute capability 9.0 alone: wgmma exists nowhere else
OLDEST_TRITON = (3, 6)
DTYPES = (torch.float16, torch.bfloat16)
MAX_SEQLEN = 1 << 28  # rows are counted in 32 bits
# `auto` leaves heads of so few rows, of q and of k, to the portable kernels: the host needs less
# time for one launch without descriptors than for two with them, and the GPU hardly any
FEW_ROWS = 256
SMALLEST_SCALE = 1e-30  # the running maximum is that of unscaled scores: a scale must be positive
BACKWARD_HEAD_DIMS: tuple[int, ...] = (64, 128)

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

    HEAD_DIM: int
    BLOCK_N: int
    CONSUMERS: int
    STAGES: int
    Q_BUFFERS: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    SHARES_KEYS: bool  # the warpgroups of a tile have the same rows of different heads of a group
    HAS_RIGHT: bool  # a row sees the keys up to some distance after its own position: causal
    HAS_LEFT: bool  # ... and down to some distance before it
    MASKS_FIRST: bool  # the block at the right end of a tile needs a mask
    MASKS_LAST: bool  # so do blocks at the left end
    MAY_BE_EMPTY: bool  # there are rows that see no key
    SHIFT: int  # log2 of the largest p that the first block may give, negated


# The best of the measurements in docs/hopper-log.md.
FORWARD = {
    64: ForwardConfig(block_n=128, stages=3),
    128: ForwardConfig(block_n=128),
    256: ForwardConfig(block_n=64, q_buffers=1),
}
# d = 64 from this many keys on: three consumers share each block of K and V
FORWARD_LONG = {
    64: ForwardConfig(
        block_n=128, consumers=3, stages=2, consumer_registers=160, producer_registers=32
    ),
    256: ForwardConfig(block_n=64, q_buffers=1, swath_mib=64),
}
LONG = 8192
FORWARD_HEAD_DIMS = tuple(FORWARD)


def forward_config(head_dim: int, seqlen_k: int) -> ForwardConfig:
    """Return the forward's configuration for a head dim of the table."""
    long = FORWARD_LONG.get(head_dim)
    return long if long is not None and seqlen_k >= LONG else FORWARD[head_dim]


class LayoutRefusal(ValueError):
    """The tensors lie in memory as the copy engine cannot read them; the portable kernels can."""


class BuildFailure(RuntimeError):
    """A kernel cannot be compiled or loaded here; says why in one line."""
