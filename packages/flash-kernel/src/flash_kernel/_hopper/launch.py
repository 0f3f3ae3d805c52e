"""Host side of the forward: outputs, workspace, specification, launch."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.compat import TensorDescriptor, gl
from flash_kernel._hopper.config import (
    WARPGROUP_ROWS,
    BuildFailure,
    ForwardConfig,
    ForwardSpec,
    LayoutRefusal,
    forward_config,
)
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._triton.launch import NO_EXTRAS, redo_launch
from flash_kernel._triton.prepared import (
    Describe,
    PreparedLaunch,
    View,
    as_it_is,
    blank,
    compile_together,
    descriptor_shape,
    is_aligned,
)
from flash_kernel.variant import Variant

LOG2_E = math.log2(math.e)
# of p in float16: 2^-8 for the maximum of the first block leaves room for scores to grow by 2^23
HALF_SHIFT = 8
# Triton 3.10 is to stop fusing by default; multiplications and additions apart cost 10%
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Sizes(NamedTuple):
    """The sizes of one attention."""

    batch: int
    num_heads: int
    num_heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a head of k and v."""
        return self.num_heads // self.num_heads_k


# what went wrong, by kernel and SPEC: in other shapes too the same would be compiled in vain
_failures: dict[Hashable, str] = {}


class Launch(PreparedLaunch):
    """A prepared launch, SPEC its last constant, that says so where it cannot be built."""

    def _launch_first(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton; whatever fails there fails for good."""
        what = (self.kernel, *self.constants[-1:])
        if what not in _failures:
            try:
                return super()._launch_first(tensors)
            # Gluon is experimental: a release may lack what the kernel needs, or compile it into
            # something too large.  There is another path, so that is an answer, not an end.
            except Exception as error:
                first_line = "".join(str(error).strip().splitlines()[:1])
                _failures[what] = f"cannot be built: {type(error).__name__}: {first_line}"
        raise BuildFailure(_failures[what])


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward of inputs of one layout, prepared; see the portable one.

    The second launch does again what the first has marked: on the same stream, or in the same
    graph, it needs no other order.
    """

    launch: PreparedLaunch
    redo: PreparedLaunch
    lse: Tensor  # what lse is like

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...] = NO_EXTRAS
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse``; there are no extras."""
        o, lse = torch.empty_like(q), torch.empty_like(self.lse)
        of_launch, of_redo = (q, k, v, o, lse, workspace(q.device)), (q, k, v, o, lse, *extras)
        if self.launch.compiled is None:
            compile_together((self.launch, of_launch), (self.redo, of_redo))
        self.launch(*of_launch)
        self.redo(*of_redo)
        return o, lse


def nothing_seen(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` where there are no keys, or no rows."""
    return torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    *,
    config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` of `prepare_forward`, prepared for this once."""
    return prepare_forward(q, k, v, variant, config=config)(q, k, v)


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    *,
    view: View = as_it_is,
    config: ForwardConfig | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare a `Forward` of ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``.

    ``view`` shows the tensors so.  ``config`` overrides the table's.

    Raises:
        LayoutRefusal: Rows are not contiguous, or addresses or strides not multiples of 16 bytes.
        BuildFailure: The kernel does not compile here; at the first launch.
    """
    if q.numel() == 0 or k.shape[-2] == 0:
        return nothing_seen
    lse = blank(q.shape[:-1], torch.float32, q.device)
    q, k, v, o = map(view, (q, k, v, torch.empty_like(q)))
    launch = forward_launch(q, k, v, o, variant, config, view)
    return Forward(launch, redo_launch(q, k, v, o, variant, view), lse)


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    variant: Variant,
    config: ForwardConfig | None,
    view: View,
) -> PreparedLaunch:
    """Prepare the launch of o and lse: one CTA for each SM, or for each tile if there are fewer."""
    for name, x in {"q": q, "k": k, "v": v, "o": o}.items():
        if not is_aligned(x):
            msg = (
                f"impl='hopper' reads `{name}` by the copy engine: its rows must be contiguous, "
                "and its address and other strides multiples of 16 bytes, got strides "
                f"{x.stride()}. "
                "Pass impl='triton' or impl='auto', or a contiguous tensor."
            )
            raise LayoutRefusal(msg)
    sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    config = config or forward_config(sizes.head_dim, sizes.seqlen_k)
    variant = clipped(variant, sizes)
    spec = forward_spec(config, q.dtype, sizes, variant)
    units, row_tiles = count_tiles(spec, sizes)
    swath = triton.cdiv(units, triton.cdiv(key_bytes(sizes), config.swath_mib << 20))
    programs = min(units * row_tiles, num_sms(q.device))
    scalars = (
        *(sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0),
        *(sizes.num_heads, sizes.group, units, row_tiles, swath),
        variant.scale * LOG2_E,
    )
    rows, keys = (
        describe_tiles([1, 1, size, sizes.head_dim], q.dtype, view)
        for size in (WARPGROUP_ROWS, config.block_n)
    )
    return Launch(
        flash_attention_hopper_forward_kernel,
        (programs, 1),
        (rows, keys, keys, rows, None, None),
        (*scalars, spec),
        OPTIONS,
    )


def clipped(variant: Variant, sizes: Sizes) -> Variant:
    """Drop the bounds of a window that lie beyond every row's keys."""
    _, left, right, _ = variant
    if left is not None and left >= sizes.seqlen_k - 1:
        left = None
    if right is not None and right >= sizes.seqlen_q - 1:
        right = None
    return variant._replace(left=left, right=right)


def forward_spec(
    config: ForwardConfig, dtype: torch.dtype, sizes: Sizes, variant: Variant
) -> ForwardSpec:
    """Return what the kernel is compiled for."""
    has_left, has_right = variant.left is not None, variant.right is not None
    # where the keys that a tile sees end at a multiple of 64, blocks of them can begin at multiples
    # of their size, and none needs a mask but the first
    ends_even = (sizes.seqlen_k - sizes.seqlen_q + (variant.right or 0)) % WARPGROUP_ROWS == 0
    return ForwardSpec(
        HEAD_DIM=sizes.head_dim,
        BLOCK_N=config.block_n,
        CONSUMERS=config.consumers,
        STAGES=config.stages,
        Q_BUFFERS=config.q_buffers,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        SHARES_KEYS=sizes.group % config.consumers == 0,
        HAS_RIGHT=has_right,
        HAS_LEFT=has_left,
        MASKS_FIRST=has_right or has_left or sizes.seqlen_k % config.block_n != 0,
        MASKS_LAST=has_left or (has_right and not ends_even),
        MAY_BE_EMPTY=has_right and sizes.seqlen_q > sizes.seqlen_k,
        SHIFT=HALF_SHIFT if dtype == torch.float16 else 0,
    )


def count_tiles(spec: ForwardSpec, sizes: Sizes) -> tuple[int, int]:
    """Return the number of units, heads or groups of heads, and the tiles of rows of each."""
    heads, rows = (spec.CONSUMERS, 1) if spec.SHARES_KEYS else (1, spec.CONSUMERS)
    units = sizes.batch * sizes.num_heads // heads
    return units, triton.cdiv(sizes.seqlen_q, rows * WARPGROUP_ROWS)


def key_bytes(sizes: Sizes) -> int:
    """Return the size of k and v."""
    return 2 * 2 * sizes.batch * sizes.num_heads_k * sizes.seqlen_k * sizes.head_dim


def describe_tiles(block: list[int], dtype: torch.dtype, view: View = as_it_is) -> Describe:
    """Return what makes a descriptor by blocks of that shape, laid out as wgmma reads them."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
    return lambda x: TensorDescriptor(view(x), *descriptor_shape(view(x)), block, layout)


_workspaces: dict[tuple[int, int], Tensor] = {}


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of a device's SMs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workspace(device: torch.device) -> Tensor:
    """Return int32 zeros that belong to the launch which is given them now.

    The kernel leaves them zero, so launches of one stream, which follow each other, share them.
    Streams do not.  A graph that is being captured may be replayed on any stream at any time, so
    its launches get zeros of their own, from the graph's memory and by a node of the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, device=device, dtype=torch.int32)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    zeros = _workspaces.get(key)
    if zeros is None:
        zeros = _workspaces[key] = torch.zeros(2, device=device, dtype=torch.int32)
    return zeros
