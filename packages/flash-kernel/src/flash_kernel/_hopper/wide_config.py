"""What the backward of wide heads, over 128 columns, is compiled for: plain data, no Triton."""

from dataclasses import dataclass

from flash_kernel._hopper.config import ForwardConfig

# dq has the tiles of the forward, and q and do stay where q alone did: room for two blocks of K and
# one of V
DQ = ForwardConfig(block_n=64, stages=2, q_buffers=1)

# Pieces of a tile of dk and dv, whatever the head dim: of (128, 64) the ptxas of Triton 3.6 makes a
# kernel that takes an operand from an address nobody wrote; see docs/hopper-log.md
KEYS_WIDTHS = (256,)

# Key heads whose tiles are handed out in turn where the first tiles of a head take longest: many
# even out what the last tiles leave idle, but their q and do are to stay in the L2 cache
HEADS_TOGETHER = 24
BYTES_TOGETHER = 48 << 20


@dataclass(frozen=True)
class KeysSpec:
    """The compile-time side of a launch of dk and dv, handed to the kernel as one ``constexpr``."""

    WIDTHS: tuple[int, ...]  # columns of the pieces of a tile: the head dim, padded
    BLOCK_M: int = 64  # query rows of a block
    BLOCK_N: int = 64  # keys of a tile
    STAGES: int = 2  # blocks of q, and of do, on their way or in use
    HAS_LEFT: bool = False  # a window bounds the keys before a row's position
    HAS_RIGHT: bool = False  # a window, or causality, bounds the keys after it
    HAS_MASK: bool = False  # never; `_triton.primitives` asks
    IS_PACKED: bool = False  # likewise; `pieces` asks

    @property
    def ROW_BYTES(self) -> int:
        """Bytes that the copy engine counts for a row."""
        return 2 * sum(self.WIDTHS)

    @property
    def HIDES_PAIRS(self) -> bool:
        """Whether a row may be kept from keys that are there, not only from those past the end."""
        return self.HAS_LEFT or self.HAS_RIGHT
