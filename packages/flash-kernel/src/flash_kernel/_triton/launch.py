"""Host side of the kernels: outputs, grid, arguments, launch."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_kernel._triton.config import (
    BlockConfig,
    KernelConfigs,
    KernelSpec,
    compute_capability,
    configs_for,
    float32_precision,
    padded_head_dim,
    piece_widths,
    takes_pieces,
)
from flash_kernel._triton.forward import (
    REDO_TILES,
    flash_attention_forward_kernel,
    flash_attention_redo_kernel,
)
from flash_kernel._triton.prepared import (
    Describe,
    PreparedLaunch,
    View,
    as_it_is,
    blank,
    describe_blocks,
    describe_packed_blocks,
    is_aligned,
    is_interpreted,
)
from flash_kernel.variant import PLAIN, Modifiers, Variant

LOG2_E = math.log2(math.e)
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny
KEY_TENSORS = ("k", "v", "dk", "dv")  # tensors whose rows are keys: they come in tiles of BLOCK_N
VALUE_TENSORS = ("v", "o", "do", "dv")  # tensors as wide as v
# making a descriptor at each launch takes the host longer than so few rows take the GPU; of rows
# alone, not of heads or batch, since a row's result must not depend on how many there are
SHORT_ROWS = 256
REDO_BLOCK_M = 64
REDO_PROGRAMS = 512  # enough for every SM, where there are so many tiles
ABSENT = (0, 0, 0, 0)  # strides of a modifier that is not there
NO_EXTRAS = (*PLAIN, None, None)  # neither modifiers nor packed sequences


class Options(NamedTuple):
    """What a launch depends on besides its tensors."""

    variant: Variant
    precision: str  # of float32 products, see `float32_precision`
    configs: KernelConfigs | None  # None: the table's
    use_descriptors: bool | None  # None: if the device and the tensors' alignment allow it
    num_sequences: int | None = None  # of packed tensors; None where they are not packed
    view: View = as_it_is  # of what is handed to the launch; it is prepared with what this shows
    redoes: bool = False  # only the tiles that another kernel has marked


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """The forward of inputs of one layout, prepared.

    The inputs may have any shape of which `prepare_forward` was given a view: a launch looks at
    their addresses alone.
    """

    launches: tuple[PreparedLaunch, ...]  # none where there are no outputs
    o: Tensor | None  # what o is like; None: like q
    lse: Tensor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...] = NO_EXTRAS
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse``; extras are slopes, bias, mask, sinks, and two cu_seqlens."""
        o = torch.empty_like(q if self.o is None else self.o)
        lse = torch.empty_like(self.lse)
        for launch in self.launches:
            launch(q, k, v, o, lse, *extras)
        return o, lse


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    num_sequences: int | None = None,
    *,
    view: View = as_it_is,
    lse_shape: Sequence[int] | None = None,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> Forward:
    """Prepare ``o`` and ``lse`` of ``q [B, H, M, D]``, ``k [B, H_kv, N, D]``, ``v [.., N, D_v]``.

    ``view`` shows the tensors so; lse has the shape of q without D if none is given.  ``modifiers``
    are those of `as_pairs`.  Where sequences are packed, the tensors have batch 1 and hold them one
    after the other, and slopes are ``[sequences, H]``.  ``configs`` and ``use_descriptors``
    override what the device and the tensors' alignment suggest; every choice gives the same values
    up to rounding.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    o_like = None if shape == q.shape else blank(shape, q.dtype, q.device)
    o = torch.empty_like(q if o_like is None else o_like)
    lse = blank(lse_shape or q.shape[:-1], torch.float32, q.device)
    if lse.numel() == 0:
        return Forward((), o_like, lse)
    precision = float32_precision(q.dtype, compute_capability(q.device))
    options = Options(variant, precision, configs, use_descriptors, num_sequences, view)
    launch = forward_launch(view(q), view(k), view(v), view(o), modifiers, options)
    return Forward((launch,), o_like, lse)


def tile_grid(
    batch: int, num_heads: int, num_rows: int, block: int, num_sequences: int | None = None
) -> tuple[int, int]:
    """Return the grid of a kernel whose programs own tiles of rows, as `head_and_tile` reads it."""
    if num_sequences is None:
        return batch * num_heads, triton.cdiv(num_rows, block)
    # the slots of `sequence_and_tile`: a sequence may have one that it does not need
    return num_rows // block + num_sequences, num_heads


def redo_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    variant: Variant,
    num_sequences: int | None = None,
    view: View = as_it_is,
) -> PreparedLaunch:
    """Prepare to compute anew, in o and lse, the tiles of rows in which some row's lse is NaN."""
    precision = float32_precision(q.dtype, compute_capability(q.device))
    options = Options(variant, precision, None, None, num_sequences, view, redoes=True)
    return forward_launch(q, k, v, o, PLAIN, options)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, modifiers: Modifiers, options: Options
) -> PreparedLaunch:
    """Prepare the launch of o and lse: one program per head and query tile."""
    config = (options.configs or default_configs(q, v)).forward
    if options.redoes:
        config = redo_config(config)
    batch, num_heads, seqlen_q, _ = q.shape
    scale = options.variant.scale
    spec = kernel_spec(q, v, config, modifiers, options)
    # folded into the exponential, a factor of 0 would make NaN of hidden scores, which are -inf
    prescaled = spec.PRESCALED or scale * LOG2_E < SMALLEST_FACTOR
    scalars = (num_heads, num_heads // k.shape[1], seqlen_q, k.shape[2], options.num_sequences or 0)
    kernel = flash_attention_forward_kernel
    grid = tile_grid(batch, num_heads, seqlen_q, config.block_m, options.num_sequences)
    if options.redoes:
        kernel = flash_attention_redo_kernel
        heads, tiles = tile_grid(batch, num_heads, seqlen_q, config.block_m)
        most = triton.cdiv(REDO_PROGRAMS, heads)
        grid = heads, max(triton.cdiv(tiles, REDO_TILES.value), min(tiles, most))
    return prepare(
        kernel,
        grid,
        {"q": q, "k": k, "v": v, "o": o},
        7,
        modifiers,
        (*scalars, scale, LOG2_E if prescaled else scale * LOG2_E, *window_scalars(options)),
        config,
        dataclasses.replace(spec, PRESCALED=prescaled),
        options,
    )


def redo_config(forward: BlockConfig) -> BlockConfig:
    """Return the redo kernel's configuration, given the forward's: tiles have at most 64 rows.

    So few are done again for one that failed.  Nor would 128 rows fit at head_dim 256, because q
    and o do not share room where the tile lies within a loop.
    """
    block_m = min(forward.block_m, REDO_BLOCK_M)
    num_warps = forward.num_warps * block_m // forward.block_m
    return dataclasses.replace(forward, block_m=block_m, num_warps=num_warps)


def prepare(
    kernel: Any,
    grid: tuple[int, int],
    tiled: dict[str, Tensor],
    num_buffers: int,
    modifiers: Modifiers | None,
    scalars: tuple[Any, ...],
    config: BlockConfig,
    spec: KernelSpec,
    options: Options,
) -> PreparedLaunch:
    """Prepare a kernel whose arguments are tiled tensors, buffers, strides, scalars and SPEC.

    ``tiled`` holds the tensors that are read or written by tiles of rows; ``num_buffers`` counts
    the tensors that follow, which are always passed as pointers.
    """
    use_descriptors = options.use_descriptors
    if use_descriptors is None:
        # packed, how many rows there are says nothing of how many a sequence has
        takes = {"takes_short": spec.IS_PACKED, "is_forward": "do" not in tiled}
        is_whole = config.max_width is None
        use_descriptors = is_whole and can_use_descriptors(*tiled.values(), **takes)
    # of two pieces by columns, ptxas loses operands' addresses; see docs/tuning-log.md
    by_rows = all(tensor.stride(-1) == 1 for tensor in tiled.values())
    in_pieces = not use_descriptors and (by_rows or spec.MAX_WIDTH is not None)
    spec = dataclasses.replace(spec, USE_DESCRIPTORS=use_descriptors, IN_PIECES=in_pieces)
    describers: list[Describe | None] = [None] * (len(tiled) + num_buffers)
    describe = describe_packed_blocks if spec.IS_PACKED else describe_blocks
    leading = [1, 1, 1] if spec.IS_PACKED else [1, 1]
    if use_descriptors:
        for index, name in enumerate(tiled):
            rows = spec.BLOCK_N if name in KEY_TENSORS else spec.BLOCK_M
            width = spec.BLOCK_DV if name in VALUE_TENSORS else spec.BLOCK_D
            describers[index] = describe([*leading, rows, width], options.view)
    strides = [tensor.stride() for tensor in tiled.values()]
    if modifiers is not None:
        strides += [ABSENT if x is None else x.stride() for x in modifiers[:3]]
    return PreparedLaunch(kernel, grid, describers, (*strides, *scalars, spec), config.options)


def window_scalars(options: Options) -> tuple[int, int, float]:
    """Return left, right and softcap as a kernel takes them; what is absent is not read."""
    _, left, right, softcap = options.variant
    return left or 0, right or 0, softcap or 0.0


def kernel_spec(
    q: Tensor, v: Tensor, config: BlockConfig, modifiers: Modifiers, options: Options
) -> KernelSpec:
    """Return what a kernel is compiled for, given q, v and the tile sizes."""
    variant = options.variant
    changes_scores = variant.softcap, modifiers.alibi_slopes, modifiers.bias
    return KernelSpec(
        HEAD_DIM=q.shape[-1],
        HEAD_DIM_V=v.shape[-1],
        BLOCK_D=padded_head_dim(q.shape[-1]),
        BLOCK_DV=padded_head_dim(v.shape[-1]),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION=options.precision,
        MAX_WIDTH=config.max_width,
        USE_DESCRIPTORS=False,
        PRESCALED=any(x is not None for x in changes_scores),
        HAS_LEFT=variant.left is not None,
        HAS_RIGHT=variant.right is not None,
        HAS_SOFTCAP=variant.softcap is not None,
        HAS_ALIBI=modifiers.alibi_slopes is not None,
        HAS_BIAS=modifiers.bias is not None,
        HAS_MASK=modifiers.mask is not None,
        HAS_SINKS=modifiers.sinks is not None,
        IS_PACKED=options.num_sequences is not None,
    )


def default_configs(q: Tensor, v: Tensor) -> KernelConfigs:
    """Return the table's configurations for the device, dtype and wider head dim.

    Of more than 128 columns those in two pieces count as the wider: their tiles are the smaller.
    """
    head_dim = max(q.shape[-1], v.shape[-1], key=lambda d: (d > 128 and len(piece_widths(d)), d))
    configs = configs_for(head_dim, q.dtype, compute_capability(q.device))
    if configs is None:
        msg = f"no kernel configuration for {q.dtype} with head_dim {head_dim} on {q.device}"
        raise ValueError(msg)
    return configs


def can_use_descriptors(
    *tensors: Tensor, takes_short: bool = False, is_forward: bool = False
) -> bool:
    """Say whether to read every tensor ``[B, H, rows, D]`` through a TMA descriptor."""
    if not is_interpreted():
        is_short = all(tensor.shape[2] <= SHORT_ROWS for tensor in tensors)
        if (is_short and not takes_short) or compute_capability(tensors[0].device) < 90:
            return False
    if any(takes_pieces(tensor.shape[-1], is_forward=is_forward) for tensor in tensors):
        return False
    return all(is_aligned(tensor) for tensor in tensors)
