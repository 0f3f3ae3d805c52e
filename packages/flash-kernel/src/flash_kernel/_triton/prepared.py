"""Launches prepared once and repeated cheaply.

Triton's own launch specialises, hashes and looks up every argument, and a tensor descriptor checks
itself each time it is built: several hundred microseconds for a backward, longer than many kernels
run.  All of it depends on shapes, strides, dtypes and alignment alone.  So a launch is prepared for
tensors of one such kind; from its second time on, only addresses change.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_kernel._triton.config import ALIGNMENT, PACKED_ROWS

View = Callable[[Tensor], Tensor]  # shows a caller's tensor as [B, heads, rows, width]
Describe = Callable[[Tensor], Any]  # makes a descriptor of a caller's tensor
COMPILES_TOGETHER = True  # the kernels of one call, at its first
MAX_EXTENT = 2**31 - 1  # of a descriptor's dimension
# Triton's caches are not for threads: what one compiles, another may find unfinished
_compiling = RLock()


class PreparedLaunch:
    """A kernel, its grid, and every argument but the addresses of its tensors.

    ``kernel`` takes its tensors first.  For each of them ``describers`` has what makes the
    descriptor to pass, or None to pass the address itself; ``constants`` are the arguments after,
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
        self.templates: list[Any] | None = None  # of descriptors; None if there are none
        self.compiled: Any = None
        self.cuda_index: int | None = None  # of the device that it is compiled for

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the tensors' device; None is what the kernel ignores."""
        if self.compiled is None:
            return self._launch_first(tensors)
        index = self.cuda_index
        if index is None or index == torch._C._cuda_getDevice():
            return self._launch_again(tensors)
        with torch.cuda.device(index):
            return self._launch_again(tensors)

    def is_new_to_gpu(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Say whether the next launch compiles for a GPU."""
        return self.compiled is None and not is_interpreted() and device_of(tensors).type == "cuda"

    def _launch_again(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch what is compiled: as Triton does, but for the records it makes for profilers."""
        # an address as a number: asking a tensor for its own costs the launcher several times that
        if self.templates is None:
            arguments = [0 if x is None else x.data_ptr() for x in tensors]
        else:
            arguments = [
                (0 if x is None else x.data_ptr()) if template is None else with_base(template, x)
                for x, template in zip(tensors, self.templates, strict=True)
            ]
        compiled = self.compiled
        if self.cuda_index is None or is_profiled():
            compiled[self.grid](*arguments, *self.constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.cuda_index)
        function, metadata = compiled.function, compiled.packed_metadata
        # None: no records for the hooks, no hook before and none after
        compiled.run(
            *self.grid, stream, function, metadata, None, None, None, *arguments, *self.constants
        )

    def _launch_first(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch through Triton, which compiles; keep the compiled kernel for the next time."""
        device = device_of(tensors)
        arguments = self.first_arguments(tensors)
        with _compiling, on_device(device):
            compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
        if compiled is None:  # Triton interprets
            return
        if any(self.describers):
            # a template must not keep the first call's tensors alive
            self.templates = [
                None if describer is None else with_base(x, None)
                for x, describer in zip(arguments, self.describers, strict=True)
            ]
        self.cuda_index = device.index if device.type == "cuda" else None
        self.compiled = compiled

    def first_arguments(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        """Return what Triton compiles for: tensors and descriptors, some tensor for None."""
        stand_in = [x for x in tensors if x is not None][-1]
        return [
            (stand_in if x is None else x) if describer is None else describer(x)
            for x, describer in zip(tensors, self.describers, strict=True)
        ]


def compile_together(*launches: tuple[PreparedLaunch, tuple[Tensor | None, ...]]) -> None:
    """Compile the launches that are new, each in a thread: Triton's compilers release the GIL.

    Nothing is launched.
    """
    new = [(launch, tensors) for launch, tensors in launches if launch.is_new_to_gpu(tensors)]
    if not COMPILES_TOGETHER or len(new) < 2:
        return
    with (
        # what fails here fails again where it is launched, and that knows what to make of it
        suppress(Exception),
        _compiling,
        on_device(device_of(new[0][1])),
        ThreadPoolExecutor(len(new)) as executor,
        AsyncCompileMode(executor, ignore_errors=True),
    ):
        for launch, tensors in new:
            arguments = (*launch.first_arguments(tensors), *launch.constants)
            launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)


def device_of(tensors: tuple[Tensor | None, ...]) -> torch.device:
    """Return the device of a launch."""
    return next(x.device for x in tensors if x is not None)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one; Triton launches and compiles for that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def as_it_is(x: Tensor) -> Tensor:
    """Show a tensor that is ``[B, heads, rows, width]`` already."""
    return x


def is_profiled() -> bool:
    """Say whether somebody listens to Triton's launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without memory, like which `torch.empty_like` makes contiguous ones.

    That takes half the time of `torch.empty`, which has to read the shape, dtype and device.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    number = torch.empty_strided((1,), (1,), dtype=dtype, device=device)
    like = number.expand(shape)
    # a call may be met first while a CUDA graph is captured: keep nothing of its pool
    number.untyped_storage().resize_(0)
    return like


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


def describe_blocks(block: list[int], view: View) -> Describe:
    """Return what makes a descriptor by blocks of that shape, of a tensor shown by a view."""
    return lambda x: TensorDescriptor(view(x), *descriptor_shape(view(x)), block)


def describe_packed_blocks(block: list[int], view: View) -> Describe:
    """Return what makes a descriptor of packed sequences; see `packed_descriptor_shape`."""
    return lambda x: TensorDescriptor(view(x), *packed_descriptor_shape(view(x)), block)


def packed_descriptor_shape(x: Tensor) -> tuple[list[int], list[int]]:
    """Return shape and strides of a descriptor over packed sequences that can end at any row.

    They are ``x [1, H, total, D]``.  A descriptor stops at the end of the tensor, and a tile at the
    end of a sequence would take in the rows of the next.  So this one pretends to have 2^30 rows,
    of which a sequence is the last: what a tile has beyond them is outside, read as 0 and never
    written.  Two dimensions in front, of stride 2^34 - s and s for rows of stride s, move its base:
    at 2^30 of the first and at ``end`` of the second, row ``2^30 - length + i`` is at

        2^30 * (2^34 - s) + end * s + (2^30 - length + i) * s = 2^64 + (end - length + i) * s

    and 2^64 is nothing to an address of 64 bits.  Triton's ``tools.ragged_tma`` has this idea.
    """
    _, num_heads, total, width = x.shape
    stride_head = x.stride(1) if num_heads > 1 else ALIGNMENT
    stride_row = x.stride(2) if total > 1 else ALIGNMENT
    shape = [MAX_EXTENT, MAX_EXTENT, num_heads, PACKED_ROWS, width]
    strides = [2**34 - stride_row, stride_row, stride_head, stride_row, 1]
    return shape, strides


def is_aligned(x: Tensor) -> bool:
    """Say whether rows are contiguous, and addresses and strides multiples of 16 bytes."""
    if x.numel() == 0 or x.shape[-1] == 1 or x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT:
        return False
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    return all(stride > 0 and stride * x.element_size() % ALIGNMENT == 0 for stride in strides)


def is_interpreted() -> bool:
    """Say whether Triton interprets its kernels on the CPU."""
    return bool(knobs.runtime.interpret)
