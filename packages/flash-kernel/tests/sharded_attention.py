"""What each process of `test_distributed.py` does; a module of its own, for it to import."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from flash_kernel import flash_attention
from flash_kernel.testing import make_qkv

NUM_PROCESSES = 2
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Layer(nn.Module):
    """Projections around attention of two heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        o = flash_attention(q, k, v, is_causal=True, impl="reference", backward="dense")
        return self.out(o.transpose(1, 2).flatten(2))


def check_fsdp(mesh):
    """Each process has half of each parameter, and both have the gradients of one process."""
    torch.manual_seed(0)
    layer, sharded = Layer(), Layer()
    sharded.load_state_dict(layer.state_dict())
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(3, 7, 16)
    for model in (layer, sharded):
        model(x).square().mean().backward()
    for alone, parameter in zip(layer.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.grad, **CLOSE)


def check_heads(mesh):
    """Each process attends with its heads; `local_map` gives DTensors back."""
    leaves = make_qkv(2, 4, 9, 9, 8, dtype=torch.float32, requires_grad=True)
    expected = flash_attention(*leaves, is_causal=True, impl="reference")
    (dq,) = torch.autograd.grad(expected.square().sum(), leaves[:1])
    by_head = [Shard(1)]
    q, k, v = (distribute_tensor(x.detach(), mesh, by_head).requires_grad_() for x in leaves)

    def attention(q, k, v):
        return flash_attention(q, k, v, is_causal=True, impl="reference", backward="dense")

    placed = {"out_placements": by_head, "in_placements": (by_head,) * 3, "device_mesh": mesh}
    o = local_map(attention, **placed)(q, k, v)
    assert isinstance(o, DTensor)
    torch.testing.assert_close(o.full_tensor(), expected, **CLOSE)
    o.square().sum().backward()
    torch.testing.assert_close(q.grad.full_tensor(), dq, **CLOSE)

    with pytest.raises(TypeError, match=r"`q` must be a local tensor, got a DTensor\. .*local_map"):
        flash_attention(q, k, v)


def run_process(rank, file):
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=NUM_PROCESSES
    )
    try:
        mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
        check_fsdp(mesh)
        check_heads(mesh)
    finally:
        dist.destroy_process_group()
