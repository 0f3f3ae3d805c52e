"""What a kernel is compiled for: the specification it is handed, and the tile sizes to choose."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """The compile-time side of a launch, passed to a kernel as one ``tl.constexpr``.

    One kernel is compiled for each distinct value, whatever the sequence lengths.
    """

    HEAD_DIM: int  # of q and k
    HEAD_DIM_V: int  # of v and o
    BLOCK_D: int  # HEAD_DIM padded to a power of two, at least 16: what tl.dot takes
    BLOCK_DV: int  # HEAD_DIM_V, likewise
    BLOCK_M: int  # query rows of a tile
    BLOCK_N: int  # key rows of a tile
    PRECISION: str  # of a float32 product, see `float32_precision`; other dtypes have but one
    USE_DESCRIPTORS: bool  # tiles move through tensor descriptors (TMA), not through pointers
    PRESCALED: bool = False  # scores are scaled before all else, not within the exponential
    IN_PIECES: bool = False  # tiles may be several pieces, see `piece_widths`
    MAX_WIDTH: int | None = None  # columns of a piece
    IS_GROUPED: bool = False  # several query heads share a head of k and v
    HAS_LEFT: bool = False  # a window bounds the keys before a row's position
    HAS_RIGHT: bool = False  # a window, or causality, bounds the keys after it
    HAS_SOFTCAP: bool = False
    HAS_ALIBI: bool = False
    HAS_BIAS: bool = False
    HAS_MASK: bool = False
    HAS_SINKS: bool = False
    PAGE_SIZE: int = 0  # key rows of a page, where k and v lie in pages; 0: they do not
    IS_PACKED: bool = False  # sequences lie one after the other in tensors of batch 1

    @property
    def WIDTHS(self) -> tuple[int, ...]:
        """The columns of each piece of a tile of q or k."""
        return piece_widths(self.HEAD_DIM, self.MAX_WIDTH) if self.IN_PIECES else (self.BLOCK_D,)

    @property
    def WIDTHS_V(self) -> tuple[int, ...]:
        """The columns of each piece of a tile of v or o."""
        return piece_widths(self.HEAD_DIM_V, self.MAX_WIDTH) if self.IN_PIECES else (self.BLOCK_DV,)

    @property
    def HIDES_PAIRS(self) -> bool:
        """Whether a row may be kept from keys that are there, not only from those past the end."""
        return self.HAS_LEFT or self.HAS_RIGHT or self.HAS_MASK or self.HAS_BIAS


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Tile sizes and launch options of one kernel."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None  # of a thread; so that two programs fit a multiprocessor
    max_width: int | None = None  # columns of a piece of a tile, which is then read by pointers

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch and compiler take."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


@dataclasses.dataclass(frozen=True)
class KernelConfigs:
    """The block configurations of the three kernels that share a table entry."""

    forward: BlockConfig
    dk_dv: BlockConfig
    dq: BlockConfig


def _configs(
    forward: tuple[int, ...], dk_dv: tuple[int, ...], dq: tuple[int, ...]
) -> KernelConfigs:
    return KernelConfigs(*(BlockConfig(*config) for config in (forward, dk_dv, dq)))


# query rows of a tile of the row statistics, the small kernel before the backward
STATISTICS_BLOCK_M = 32
# rows that the statistics of a sequence are padded to: the largest BLOCK_M, so that the backward
# reads them in whole tiles
STATISTICS_PADDING = 128

# 128 columns and a second piece.  By the forward's tile of 256 columns, where rows are unaligned,
# the ptxas of Triton 3.6 loses the address of a product's operand; see docs/tuning-log.md
_WIDE_PIECES = _configs((64, 32, 4, 3), (64, 64, 8, 2), (64, 32, 4, 3))

# (BLOCK_M, BLOCK_N, warps, stages[, registers]) of the forward, dk/dv and dq kernels, by generation
# and the columns of a tile: of its pieces together where there is such an entry, else BLOCK_D.
HALF_PRECISION = {
    # up to 227 KiB of shared memory; the best of the sweep in docs/tuning-log.md, on an H200
    "hopper": {
        64: _configs((128, 64, 8, 3, 128), (64, 64, 4, 3), (128, 64, 8, 3, 128)),
        # a third program fits the multiprocessor; more registers only the second, exact pass takes
        80: _configs((64, 64, 4, 3, 168), (64, 64, 4, 2), (128, 64, 8, 3)),
        128: _configs((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3)),
        **dict.fromkeys((144, 160, 192), _WIDE_PIECES),
        256: _configs((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 3)),
    },
    # as much; but products there read a tile of K or V from shared memory in a second layout
    "blackwell": {
        64: _configs((128, 64, 8, 3, 128), (64, 64, 4, 3), (128, 64, 8, 3, 128)),
        128: _configs((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3)),
        256: _configs((128, 64, 8, 2), (64, 64, 8, 1), (64, 32, 4, 3)),
    },
    # up to 99 KiB (sm_86, sm_89, sm_120)
    "ampere": {
        64: _configs((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
        128: _configs((128, 64, 8, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
        256: _configs((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    },
    # up to 64 KiB (sm_75, AMD)
    "portable": {
        64: _configs((64, 64, 4, 1), (32, 64, 4, 1), (64, 32, 4, 1)),
        128: _configs((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        256: _configs((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
}

# Columns of a piece where a product of float32 is three of TF32.  Tensor cores cut off what they
# add instead of rounding it, so their sums are short, and then added in float32 (Ootomo and Yokota,
# 2022, arXiv 2203.03341).  A forward tile has about as many keys as a piece has columns: o, and
# delta with it, is then off to the same side as dp, and their difference keeps its digits.
# Tiles have at most 32 rows, so that the products are those of a warp: of a warpgroup's, in kernels
# of several pieces, Triton 3.6 and its ptxas leave descriptors unset.
SPLIT_WIDTH = 64


def _split(*config: int) -> BlockConfig:
    return BlockConfig(*config, max_width=SPLIT_WIDTH)


_FLOAT32_SPLIT = {
    32: KernelConfigs(_split(32, 32, 4, 2), _split(32, 32, 4, 1), _split(32, 32, 4, 1)),
    64: KernelConfigs(_split(32, 64, 4, 2), _split(32, 32, 4, 1), _split(32, 32, 4, 1)),
    128: KernelConfigs(_split(32, 64, 8, 1), _split(32, 32, 8, 1), _split(32, 32, 8, 2)),
    256: KernelConfigs(_split(32, 64, 8, 1), _split(16, 16, 4, 1), _split(16, 32, 8, 1)),
}
# with room for the next tile of K and V
_FLOAT32_AHEAD = _FLOAT32_SPLIT | {
    128: dataclasses.replace(_FLOAT32_SPLIT[128], forward=_split(32, 64, 8, 2))
}
FLOAT32 = {
    "hopper": _FLOAT32_AHEAD,
    "blackwell": _FLOAT32_AHEAD,
    "ampere": _FLOAT32_SPLIT,
    # exact products, on no tensor core; 64 KiB do not hold the backward of a head_dim above 128
    "portable": {
        64: _configs((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        128: _configs((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    },
}

# (BLOCK_N, warps, stages) of the decode kernel, by generation and BLOCK_D: as many bytes of the
# cache on their way at once as keep memory busy.  A float32 tile has half the keys.
DECODE = {
    "hopper": {64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)},
    "blackwell": {64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)},
    "ampere": {64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)},
    "portable": {64: (64, 4, 1), 128: (32, 4, 1), 256: (32, 4, 1)},
}
DECODE_BLOCK_M = 64  # query rows of a decode tile, at most
SMALLEST_SPLIT = 256  # keys that a program is worth starting for; whole tiles of every table
MAX_SPLITS = 128  # of a sequence
SPLIT_PROGRAMS = 256  # programs that one sequence is split into: enough to fill a large GPU
COMBINE_ELEMENTS = 4096  # of a tile of the kernel that joins the splits

# rows that a descriptor of packed sequences pretends to have; see `prepared.describe_packed_blocks`
PACKED_ROWS = 1 << 30

ALIGNMENT = 16  # bytes: what the copy engine asks of an address and of every stride but the last

MAX_TILES = 65535  # programs along the second axis of a grid, that of the tiles


def compute_capability(device: torch.device) -> int:
    """Return 90 for an NVIDIA GPU of compute capability 9.0, and 0 for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def allows_tf32(dtype: torch.dtype) -> bool:
    """Say whether torch's own products of this dtype on CUDA would use TF32.

    ``torch.backends.cuda.matmul.fp32_precision`` reflects the older switches, ``allow_tf32`` and
    ``torch.set_float32_matmul_precision``, as well.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def float32_precision(dtype: torch.dtype, capability: int) -> str:
    """Return how ``tl.dot`` multiplies: "ieee", "tf32x3" or "tf32"; for half precision, "ieee".

    Three TF32 products make one of float32 on tensor cores; docs/numerics.md says how exactly.
    Older GPUs have no TF32, and Triton knows the three on NVIDIA's alone.
    """
    if allows_tf32(dtype):
        return "tf32"
    return "tf32x3" if dtype == torch.float32 and capability >= 80 else "ieee"


def generation(capability: int) -> str:
    """Return the table's name for a compute capability, 90 for 9.0; 0 stands for no NVIDIA GPU."""
    if 90 <= capability < 120:
        return "hopper" if capability < 100 else "blackwell"
    return "ampere" if capability >= 80 else "portable"


def padded_head_dim(head_dim: int) -> int:
    """Return the power of two, at least 16, that a tile of ``head_dim`` columns is padded to."""
    return max(16, 1 << (head_dim - 1).bit_length())


def piece_widths(head_dim: int, max_width: int | None = None) -> tuple[int, ...]:
    """Return the widths, powers of two, of the pieces that hold ``head_dim`` columns.

    With a ``max_width`` there are as many as it takes; else one or two: 80 columns are 64 + 16, not
    128.  Up to 64 the exponentials take longer than the products, and nothing is gained.
    """
    if max_width is not None:
        whole, rest = divmod(head_dim, max_width)
        return (max_width,) * whole + ((padded_head_dim(rest),) if rest else ())
    padded = padded_head_dim(head_dim)
    first = padded // 2
    second = padded_head_dim(head_dim - first)
    return (first, second) if padded > 64 and second < first else (padded,)


def takes_pieces(head_dim: int, *, is_forward: bool) -> bool:
    """Say whether to read rows in pieces, by pointers, also where a descriptor could pad them.

    A descriptor has one block shape, and so no pieces, but takes a third fewer instructions a tile.
    In a forward, whose product of two pieces waits between them, 64 + 32 columns gain less than
    that; see docs/tuning-log.md.
    """
    widths = piece_widths(head_dim)
    return len(widths) > 1 and not (is_forward and widths == (64, 32))


def configs_for(head_dim: int, dtype: torch.dtype, capability: int) -> KernelConfigs | None:
    """Return the configurations of a head dim; None if it is larger than the table knows."""
    table = FLOAT32 if dtype == torch.float32 else HALF_PRECISION
    of_device = table[generation(capability)]
    padded = of_device.get(max(min(of_device), padded_head_dim(head_dim)))
    return of_device.get(sum(piece_widths(head_dim)), padded)


def decode_config(
    head_dim: int, dtype: torch.dtype, capability: int, num_rows: int, *, is_paged: bool = False
) -> BlockConfig:
    """Return the configuration of a decode tile of a group's ``num_rows`` queries."""
    of_device = DECODE[generation(capability)]
    block_n, num_warps, num_stages = of_device[max(64, padded_head_dim(head_dim))]
    block_m = min(DECODE_BLOCK_M, padded_head_dim(num_rows))
    max_width = None
    if dtype == torch.float32:
        block_n //= 2
        if capability >= 80:
            block_m, max_width = 16, SPLIT_WIDTH
    if is_paged:  # Triton halves the stages where addresses are themselves loaded
        num_stages = 2 * num_stages - 1
    return BlockConfig(block_m, block_n, num_warps, num_stages, max_width=max_width)


def has_few_queries(dtype: torch.dtype, num_rows: int, seqlen_k: int) -> bool:
    """Say whether the decode kernel, which splits the keys, takes a dense forward.

    ``num_rows`` are the queries of a group of heads together: they fit one tile, and a head has too
    few tiles to keep a GPU busy.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and num_rows <= DECODE_BLOCK_M and seqlen_k >= 2 * SMALLEST_SPLIT


def max_head_dim(dtype: torch.dtype, capability: int) -> int:
    """Return the largest head dim that `configs_for` knows."""
    return max(d for d in (64, 128, 256) if configs_for(d, dtype, capability) is not None)


def max_seqlen(configs: KernelConfigs) -> int:
    """Return how long a sequence the grids of these configurations can cover."""
    blocks = (configs.forward.block_m, configs.dk_dv.block_n, configs.dq.block_m)
    return MAX_TILES * min(STATISTICS_BLOCK_M, *blocks)
