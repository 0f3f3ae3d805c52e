"""The two kernels of the Hopper backward above 128 columns, launched on a simulated SM."""

import types

import numpy as np
import torch
import triton.language as tl
from gluon_simulator import Descriptor, Pointer, Simulator, Value

from flash_kernel._hopper.forward_spec import Sizes, clipped
from flash_kernel._hopper.wide_dk_dv import flash_attention_wide_dk_dv_kernel
from flash_kernel._hopper.wide_dk_dv_launch import problem_of, specify
from flash_kernel._hopper.wide_dq import flash_attention_wide_dq_kernel
from flash_kernel._hopper.wide_dq_launch import dq_arguments, dq_spec


class WideSimulator(Simulator):
    """Adds the functions of plain Triton that a kernel shares with the portable ones."""

    def __init__(self, seed, edits):
        super().__init__(seed, edits)
        language = vars(self._language())
        self.stand_ins[id(tl)] = types.SimpleNamespace(**language, cast=lambda x, _: x)

    def _language(self):
        language = super()._language()
        language.cdiv = lambda x, y: (x + y - 1) // y
        language.convert_layout = lambda x, _, assert_trivial=False: x
        language.split = lambda x: (x[..., 0], x[..., 1])
        language.num_warps = lambda: self.task.warps
        return language


def simulated(
    kernel, num_outputs, blocks, numbers, spec, *, reads_statistics_by_tma=False, seed=0,
    edits=None, ctas=2,
):  # fmt: skip
    """Return a launch that runs on the simulator.

    It is given tensors that move by ``blocks`` of so many rows and columns, which are listed for
    the first and the second pieces, and of which the last ``num_outputs`` are written; the same
    again; then statistics, marks and workspace.
    """

    def launch(*tensors):
        statistics, marks, workspace = tensors[-3:]
        count = len(blocks) // 2
        tiled = tensors[:count]
        assert tensors[count:-3] == tiled, "descriptors of second pieces are of the same"
        arrays = [x.float().numpy() for x in tiled]
        for x in arrays[-num_outputs:]:
            x[...] = np.nan
        name = str(tiled[0].dtype).removeprefix("torch.")
        rows = statistics.numpy().reshape(-1)
        WideSimulator(seed, edits).launch(
            kernel,
            ctas,
            (
                *(
                    Descriptor(x, [1, 1, *block], name)
                    for x, block in zip(2 * arrays, blocks, strict=True)
                ),
                Descriptor(rows, [64], "float32") if reads_statistics_by_tma else Pointer(rows),
                Pointer(np.zeros(0) if marks is None else marks.numpy().reshape(-1)),
                Pointer(workspace.numpy().reshape(-1)),
                *map(Value, numbers),
                spec,
            ),
        )
        for x, array in zip(tiled[-num_outputs:], arrays[-num_outputs:], strict=True):
            x.copy_(torch.from_numpy(array))
        assert not workspace.any(), "the workspace is left as it was found"

    launch.compiled = "simulated"
    return launch


def simulated_dq(q, k, variant, _=None, **options):
    """Return what takes the place of `prepare_dq`."""
    variant, spec, sizes = dq_spec(q, k, variant, q.dtype)
    numbers, _ = dq_arguments(spec, sizes, variant)
    heights = (64, spec.BLOCK_N, spec.BLOCK_N, 64, 64)
    widths = spec.WIDTHS[0], spec.WIDTHS[-1]
    blocks = [(rows, width) for width in widths for rows in heights]
    return simulated(flash_attention_wide_dq_kernel, 1, blocks, numbers, spec, **options)


def simulated_dk_dv(q, k, variant, _=None, *, together=None, **options):
    """Return what takes the place of `prepare_dk_dv`."""
    sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    variant = clipped(variant, sizes)
    spec = specify(sizes, variant)
    numbers = problem_of(sizes, variant, spec)
    if together is not None:
        numbers = numbers._replace(heads_together=together)
    widths = spec.WIDTHS[0], spec.WIDTHS[-1]
    blocks = [(64, columns) for width in widths for columns in (*[width] * 5, 64)]  # dv: by 64
    return simulated(
        flash_attention_wide_dk_dv_kernel, 2, blocks, numbers, spec,
        reads_statistics_by_tma=True, **options,
    )  # fmt: skip
