"""Host side of the forward: outputs, workspace, launch."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    widths_of,
)
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._hopper.forward_spec import (
    Sizes,
    clipped,
    count_tiles,
    forward_spec,
    key_bytes,
    score_factors,
)
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
    packed_descriptor_shape,
)
from flash_kernel.variant import Variant

# Triton 3.10 is to stop fusing by default; multiplications and additions apart cost 10%
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
NOTHING = (None,) * 4  # in place of second descriptors

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
    in_pieces: bool  # the tensors are passed twice, for two descriptors each

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...] = NO_EXTRAS
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse``; of the extras there are the two cu_seqlens alone."""
        o, lse = torch.empty_like(q), torch.empty_like(self.lse)
        tiled = q, k, v, o
        rest = tiled if self.in_pieces else NOTHING
        of_launch = *tiled, *rest, lse, workspace(q.device), *extras[-2:]
        of_redo = *tiled, lse, *extras
        if self.launch.compiled is None:
            compile_together((self.launch, of_launch), (self.redo, of_redo))
        self.launch(*of_launch)
        self.redo(*of_redo)
        return o, lse


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    num_sequences: int | None = None,
    *,
    view: View = as_it_is,
    lse_shape: Sequence[int] | None = None,
    config: ForwardConfig | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare a `Forward` of ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``.

    ``view`` shows the tensors so; lse has the shape of q without D if none is given.  Where
    sequences are packed, the tensors have batch 1 and hold them one after the other.  ``config``
    overrides the table's.

    Raises:
        LayoutRefusal: Rows are not contiguous, or addresses or strides not multiples of 16 bytes.
        BuildFailure: The kernel does not compile here; at the first launch.
    """
    lse = blank(lse_shape or q.shape[:-1], torch.float32, q.device)
    if q.numel() == 0 or k.numel() == 0:  # nobody sees a key
        return lambda q, *_: (torch.zeros_like(q), torch.full_like(lse, -math.inf))
    tiled = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}
    q, k, v, o = shown = [view(x) for x in tiled.values()]
    check_layout(dict(zip(tiled, shown, strict=True)))
    sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], num_sequences)
    config = config or forward_config(sizes.head_dim, sizes.longest_keys)
    launch = forward_launch(q, sizes, variant, config, view)
    redo = redo_launch(q, k, v, o, variant, num_sequences, view)
    return Forward(launch, redo, lse, len(widths_of(sizes.head_dim)) == 2)


def check_layout(tensors: dict[str, Tensor]) -> None:
    """Raise unless the copy engine can read the tensors ``[B, H, rows, D]``, by name."""
    for name, x in tensors.items():
        if not is_aligned(x):
            msg = (
                f"impl='hopper' reads `{name}` by the copy engine: its rows must be contiguous, "
                "and its address and other strides multiples of 16 bytes, got strides "
                f"{x.stride()}. "
                "Pass impl='triton' or impl='auto', or a contiguous tensor."
            )
            raise LayoutRefusal(msg)


def forward_launch(
    q: Tensor, sizes: Sizes, variant: Variant, config: ForwardConfig, view: View
) -> PreparedLaunch:
    """Prepare the launch of o and lse: one CTA for each SM, or for each tile if there are fewer."""
    variant = clipped(variant, sizes)
    spec = forward_spec(config, q.dtype, sizes, variant)
    units, row_tiles = count_tiles(spec, sizes)
    swath = triton.cdiv(units, triton.cdiv(key_bytes(sizes), config.swath_mib << 20))
    programs = min(units * row_tiles, num_sms(q.device))
    scalars = (
        *(sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0),
        *(sizes.num_heads, sizes.group, units, row_tiles, swath, sizes.num_sequences or 0),
        *score_factors(variant),
    )
    return Launch(
        flash_attention_hopper_forward_kernel,
        (programs, 1),
        (*describers(spec, q.dtype, view), None, None, None, None),
        (*scalars, spec),
        OPTIONS,
    )


def describers(
    spec: ForwardSpec, dtype: torch.dtype, view: View = as_it_is
) -> list[Describe | None]:
    """Return what makes the descriptors of q, k, v and o, and of their second pieces."""
    describe = describe_packed_tiles if spec.IS_PACKED else describe_tiles
    leading = [1, 1, 1] if spec.IS_PACKED else [1, 1]
    made: list[Describe | None] = [
        describe([*leading, rows, width], dtype, view)
        for width in spec.WIDTHS
        for rows in (WARPGROUP_ROWS, spec.BLOCK_N, spec.BLOCK_N, WARPGROUP_ROWS)
    ]
    return made + [None] * (8 - len(made))


def describe_tiles(block: list[int], dtype: torch.dtype, view: View) -> Describe:
    """Return what makes a descriptor by blocks of that shape, laid out as wgmma reads them."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])

    return lambda x: TensorDescriptor(view(x), *descriptor_shape(view(x)), block, layout)


def describe_packed_tiles(block: list[int], dtype: torch.dtype, view: View) -> Describe:
    """Return the same of packed sequences."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
    return lambda x: TensorDescriptor(view(x), *packed_descriptor_shape(view(x)), block, layout)


def describe_floats(block: list[int]) -> Describe:
    """Return what makes a descriptor by float32 blocks of that shape, which lie plainly."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))

    def describe(x: Tensor) -> Any:
        return TensorDescriptor(x, *descriptor_shape(x), block, layout)

    return describe


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
