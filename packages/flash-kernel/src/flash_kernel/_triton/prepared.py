"""Launches prepared once and repeated cheaply.

Triton's own launch specialises, hashes and looks up every argument, and a tensor descriptor checks
itself each time it is built: several hundred microseconds for a backward, longer than many kernels
run.  All of it depends on shapes, strides, dtypes and alignment alone.  So that is the key under
which a launch is prepared; from its second time on, only addresses change.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_kernel._triton.config import PACKED_ROWS

Describe = Callable[[Tensor], Any]  # makes a descriptor of a tensor
ALIGNMENT = 16  # bytes: what the copy engine asks of an address and of every stride but the last
MAX_EXTENT = 2**31 - 1  # of a descriptor's dimension
MAX_PREPARED = 4096  # shapes met; when there are more, all are forgotten and prepared anew


class PreparedLaunch:
    """A kernel, its grid, and every argument but the addresses of its tensors.

    ``kernel`` takes its tensors first.  For each of them ``describers`` has what makes the
    descriptor to pass, or None to pass the tensor itself; ``constants`` are the arguments after,
    ``options`` those of Triton (``num_warps`` and the like).
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        describers: Sequence[Describe | None],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1)
        self.describers = describers
        self.constants = constants
        self.options = options
        self.templates: list[Any] = []
        self.compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        if self.compiled is None:
            return self._launch_first(tensors)
        # an address as a number: asking a tensor for its own costs the launcher several times that
        arguments = [
            x.data_ptr() if template is None else with_base(template, x)
            for x, template in zip(tensors, self.templates, strict=True)
        ]
        return self._launch_again(device, arguments)

    def _launch_again(self, device: torch.device, arguments: list[Any]) -> None:
        """Launch what is compiled: as Triton does, but for the records it makes for profilers."""
        compiled = self.compiled
        if device.type != "cuda" or is_profiled():
            return compiled[self.grid](*arguments, *self.constants)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        function, metadata = compiled.function, compiled.packed_metadata
        no_records = (None, None, None)  # for the hooks, the hook before and the hook after
        return compiled.run(
            *self.grid, stream, function, metadata, *no_records, *arguments, *self.constants
        )

    def _launch_first(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton, which compiles; keep the compiled kernel for the next time."""
        arguments = [
            x if describer is None else describer(x)
            for x, describer in zip(tensors, self.describers, strict=True)
        ]
        compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
        if compiled is None:  # Triton interprets
            return
        # a template must not keep the first call's tensors alive
        self.templates = [
            None if describer is None else with_base(x, None)
            for x, describer in zip(arguments, self.describers, strict=True)
        ]
        self.compiled = compiled


def is_profiled() -> bool:
    """Say whether somebody listens to Triton's launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def with_base(template: Any, base: Tensor | None) -> Any:
    """Copy a descriptor onto another address, without the checks that its key has passed."""
    descriptor = object.__new__(type(template))
    descriptor.__dict__.update(template.__dict__, base=base)
    return descriptor


def descriptor_shape(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape and the strides that a descriptor over ``x``, which `is_aligned`, has."""
    # the stride of a dimension of size 1 is arbitrary, but a descriptor has every stride aligned
    leading = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride if size > 1 else ALIGNMENT for size, stride in leading]
    return list(x.shape), [*strides, 1]


def describe_blocks(block: list[int]) -> Describe:
    """Return what makes a descriptor by blocks of that shape."""
    return partial(_describe, block=block)


def _describe(x: Tensor, *, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, *descriptor_shape(x), block)


def describe_packed_blocks(block: list[int]) -> Describe:
    """Return what makes a descriptor of packed sequences; see `_describe_packed`."""
    return partial(_describe_packed, block=block)


def _describe_packed(x: Tensor, *, block: list[int]) -> TensorDescriptor:
    """Return a descriptor over packed sequences ``x [1, H, total, D]`` that can end at any row.

    A descriptor stops at the end of the tensor, and a tile at the end of a sequence would take in
    the rows of the next.  So this one pretends to have 2^30 rows, of which a sequence is the last:
    what a tile has beyond them is outside, read as 0 and never written.  Two dimensions in front,
    of stride 2^34 - s and s for rows of stride s, move its base: at 2^30 of the first and at
    ``end`` of the second, row ``2^30 - length + i`` is at

        2^30 * (2^34 - s) + end * s + (2^30 - length + i) * s = 2^64 + (end - length + i) * s

    and 2^64 is nothing to an address of 64 bits.  Triton's ``tools.ragged_tma`` has this idea.
    """
    _, num_heads, total, width = x.shape
    stride_head = x.stride(1) if num_heads > 1 else ALIGNMENT
    stride_row = x.stride(2) if total > 1 else ALIGNMENT
    shape = [MAX_EXTENT, MAX_EXTENT, num_heads, PACKED_ROWS, width]
    strides = [2**34 - stride_row, stride_row, stride_head, stride_row, 1]
    return TensorDescriptor(x, shape, strides, block)


def layout_key(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return what a prepared launch depends on of its tensors: all but address and contents."""
    return tuple(
        None
        if x is None
        else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0)
        for x in tensors
    )


def is_aligned(x: Tensor) -> bool:
    """Say whether rows are contiguous, and addresses and strides multiples of 16 bytes."""
    if x.numel() == 0 or x.shape[-1] == 1 or x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT:
        return False
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    return all(stride > 0 and stride * x.element_size() % ALIGNMENT == 0 for stride in strides)


Prepared = TypeVar("Prepared")  # a launch, or several that have one key
_prepared: dict[Hashable, Any] = {}


def prepared(key: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
    """Return the launch prepared under a key, preparing it if it is new."""
    launch: Prepared | None = _prepared.get(key)
    if launch is None:
        if len(_prepared) >= MAX_PREPARED:
            _prepared.clear()
        launch = _prepared[key] = prepare()
    return launch


def is_interpreted() -> bool:
    """Say whether Triton interprets its kernels on the CPU."""
    return bool(knobs.runtime.interpret)
