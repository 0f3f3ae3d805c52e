"""What the Hopper backward for head dims above 128 is compiled for: plain data, no Triton."""

from dataclasses import dataclass

from flash_kernel._hopper.config import ForwardConfig

# dq has the tiles of the forward, and q and do stay where q alone did: room for two blocks of K and
# one of V
DQ = ForwardConfig(block_n=64, stages=2, q_buffers=1)


@dataclass(frozen=True)
class KeysSpec:
    """The compile-time side of the dk and dv launch, passed to the kernel as one ``constexpr``."""

    WIDTHS: tuple[int, ...]  # columns of the pieces of a tile: the head dim, padded
    BLOCK_M: int = 64  # query rows of a block
    BLOCK_N: int = 64  # key rows of a tile
    STAGES: int = 2  # blocks of q, and of do, on their way or in use
    IS_GROUPED: bool = False  # several query heads share a head of k and v
    HAS_LEFT: bool = False  # a window bounds the keys before a row's position
    HAS_RIGHT: bool = False  # a window, or causality, bounds the keys after it
    HAS_TAIL: bool = False  # the last tile of keys is not full
    HAS_MASK: bool = False  # never; `_triton.primitives` asks
    USE_DESCRIPTORS: bool = False  # likewise
    IS_PACKED: bool = False
    PAGE_SIZE: int = 0

    @property
    def HIDES_PAIRS(self) -> bool:
        """Whether a row may be kept from keys that are there, not only from those past the end."""
        return self.HAS_LEFT or self.HAS_RIGHT
