"""What the Hopper backward is compiled for, and the table of its configurations: no Triton."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardSpec:
    """The compile-time side of a launch, passed to the kernels as one ``constexpr``."""

    BLOCK_D: int  # head dim of a tile: 64 or 128; narrower tensors are padded with zeros by TMA
    BLOCK_M: int  # query rows of a tile
    BLOCK_N: int = 128  # key rows of a tile, 64 for each consumer
    DQ_BY_TMA: bool = True  # a warp adds dq by TMA; else the consumers do, from registers
    IS_ORDERED: bool = False  # dq is added in a fixed order; needs DQ_BY_TMA
    IS_ROTATED: bool = False  # ordered tiles begin at different blocks, and dq has two sums
    STATISTICS_FIRST: bool = False  # lse and delta start the accumulators of the scores
    IS_GROUPED: bool = False  # several query heads share a head of k and v
    HAS_LEFT: bool = False  # a window bounds the keys before a row's position
    HAS_RIGHT: bool = False  # a window, or causality, bounds the keys after it
    HAS_TAIL: bool = False  # the last tile of keys is not full
    HAS_MASK: bool = False  # never; `_triton.primitives` asks
    USE_DESCRIPTORS: bool = False  # of the kernels before and after; never
    PAGE_SIZE: int = 0  # likewise

    @property
    def SUMS(self) -> int:
        """Sums that a block's dq has."""
        return 2 if self.IS_ROTATED else 1

    @property
    def HIDES_PAIRS(self) -> bool:
        """Whether a row may be kept from a key."""
        return self.HAS_LEFT or self.HAS_RIGHT

    @property
    def IS_MASKED(self) -> bool:
        """Whether some query blocks need the mask."""
        return self.HIDES_PAIRS or self.HAS_TAIL


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes and choices of one head dim."""

    block_m: int
    dq_by_tma: bool  # in the fast mode; the deterministic one always does
    statistics_first: bool


CONFIGS = {
    64: BackwardConfig(128, dq_by_tma=True, statistics_first=True),
    128: BackwardConfig(64, dq_by_tma=False, statistics_first=False),
}

# Key tiles of a head from which on, in the ordered mode, each begins at another query block
ROTATED_FROM = 32

# Heads whose q, do and dq sums take no more than this together are worked on at a time: half of the
# L2 cache of an H200
BYTES_TOGETHER = 24 << 20
