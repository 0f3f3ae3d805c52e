"""The Hopper forward on a simulated SM: who waits for whom, and what comes out."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from gluon_simulator import Descriptor, Pointer, Simulator, Value, rounded

from flash_kernel._hopper import tiles
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._hopper.launch import LOG2_E, clipped, count_tiles, forward_spec
from flash_kernel.reference import dense_attention
from flash_kernel.variant import Modifiers


def simulate(sizes, variant, config, *, dtype=torch.bfloat16, ctas=2, growth=0, seed=0, **changes):
    """Run the kernel; return o and lse, those of the reference, and the tiles done again."""
    name = str(dtype).removeprefix("torch.")
    random = np.random.default_rng(seed)
    shapes = [(sizes.num_heads, sizes.seqlen_q)] + [(sizes.num_heads_k, sizes.seqlen_k)] * 2
    q, k, v = (
        rounded(random.standard_normal((sizes.batch, *shape, sizes.head_dim), np.float32), name)
        for shape in shapes
    )
    if growth:  # of the scores of the last head, leftwards
        q[:, -1, :, 0] = 8
        ramp = np.linspace(1, -1, sizes.seqlen_k) * growth * sizes.head_dim**0.5 / 8
        k[:, -1, :, 0] = rounded(ramp, name)
    o = np.full_like(q, np.nan)
    lse = np.full(q.shape[:3], np.nan, np.float32)
    variant = clipped(variant, sizes)
    spec = dataclasses.replace(forward_spec(config, dtype, sizes, variant), **changes)
    units, row_tiles = count_tiles(spec, sizes)
    ctas = min(ctas, units * row_tiles)
    workspace = np.zeros(tiles.VERDICTS.value + 2 * ctas, np.int64)
    again = []
    replacements = {}

    def descriptor(x, rows):
        return Descriptor(x, [1, 1, rows, sizes.head_dim], name)

    simulator = Simulator(seed, replacements)
    scalars = (sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0)
    scalars += (sizes.num_heads, sizes.group, units, row_tiles, max(1, units - 1))
    arguments = (
        descriptor(q, 64),
        descriptor(k, config.block_n),
        descriptor(v, config.block_n),
        descriptor(o, 64),
        Pointer(lse.reshape(-1)),
        Pointer(workspace),
        *map(Value, scalars),
        variant.scale * LOG2_E,
        spec,
    )
    simulator.launch(flash_attention_hopper_forward_kernel, ctas, arguments)
    assert not workspace.any(), "the workspace is left as it was found"
    tensors = (torch.from_numpy(x).double() for x in (q, k, v))
    expected = dense_attention(*tensors, variant, Modifiers())
    return (torch.from_numpy(o), torch.from_numpy(lse)), expected, again
