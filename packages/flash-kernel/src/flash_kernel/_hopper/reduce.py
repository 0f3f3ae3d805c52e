"""Operations on shared memory that some Triton between 3.6 and 3.9 does not export.

Triton 3.8 exports ``tma_reduce_add`` as ``async_atomic_add``.  3.6 and 3.7 can build it, but export
no function for it; the builtin below does what theirs does.  ``reinterpret`` has an underscore
before its name up to 3.7 or 3.8.
"""

from typing import Any

from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from flash_kernel._hopper.compat import gl, gluon


@builtin
def _tma_reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@builtin
def reinterpret(memory: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return a view of the same bytes in another shape and layout."""
    sizes = [getattr(size, "value", size) for size in shape]
    return _semantic.memdesc_reinterpret(
        memory, memory.dtype, sizes, getattr(layout, "value", layout)
    )


tma_reduce_add = getattr(tma, "async_atomic_add", None) or _tma_reduce_add


@gluon.jit
def reductions_have_landed():
    """Wait until every bulk copy of this warp is in global memory, not only out of shared memory.

    A turn given on after this is given on with the sum.  The proxy fences order the copies, which
    are asynchronous, with the atomics on either side.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync -1; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
