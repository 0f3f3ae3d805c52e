"""Several processes, one model: DistributedDataParallel and FSDP2, started by `torchrun`.

Every process draws the same batch and computes its own rows of it, so that the losses do not depend
on how many processes there are, but for rounding.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tiny_llm.errors import ConfigError
from tiny_llm.transformer import Transformer

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """This process's place among all.

    Attributes:
        kind: ``none``, ``ddp`` (every process holds the model) or ``fsdp`` (each holds a part).
        rank: Number of this process.
        world_size: How many there are.
    """

    kind: str = "none"
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True in the one process that prints and saves."""
        return self.rank == 0

    def shard(self, model: Transformer) -> None:
        """Under fsdp, leave this process its part of each parameter; do it before the optimizer."""
        if self.kind == "fsdp":
            # with gloo and a GPU in the machine, the default mesh would be the GPU's
            kind = next(model.parameters()).device.type
            mesh = init_device_mesh(kind, (self.world_size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            # the chunked loss calls this in place of `forward`
            register_fsdp_forward_method(model, "hidden_states")

    def replicate(self, module: nn.Module) -> nn.Module:
        """Under ddp, return the module that averages its gradients over the processes."""
        return nn.parallel.DistributedDataParallel(module) if self.kind == "ddp" else module

    def rows(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch ``[B, T]``."""
        return batch.tensor_split(self.world_size)[self.rank]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a number over all processes."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def gathered(self, value: T) -> list[T]:
        """Return what each process gave, by rank."""
        if self.world_size == 1:
            return [value]
        everyone: list[T] = [value] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def accumulating(
        self, module: nn.Module, model: nn.Module, *, last: bool
    ) -> AbstractContextManager[None]:
        """Keep gradients to this process until the last micro-batch, and reduce them once."""
        if self.kind == "ddp" and not last:
            waiting: AbstractContextManager[None] = module.no_sync()  # type: ignore[operator]
            return waiting
        if self.kind == "fsdp":
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def agree(self, fine: bool) -> bool:
        """Return True in every process if `fine` is True in all of them."""
        if self.world_size == 1:
            return fine
        votes = torch.tensor(0.0 if fine else 1.0, device=_collective_device())
        dist.all_reduce(votes)
        return votes.item() == 0


SINGLE = Parallel()


def local_device(name: str) -> str:
    """Return the device of this process: under torchrun, ``cuda`` is the one of its local rank."""
    local_rank = os.environ.get("LOCAL_RANK")
    automatic = name == "auto" and torch.cuda.is_available()
    if local_rank is not None and (name == "cuda" or automatic):
        return f"cuda:{local_rank}"
    return name


@contextmanager
def process_group(kind: str, device: torch.device) -> Iterator[Parallel]:
    """Join the processes that torchrun started, and leave them at the end.

    Args:
        kind: ``auto`` (ddp, where there are several processes), ``none``, ``ddp`` or ``fsdp``.
        device: This process's; gloo connects CPUs and NCCL GPUs.

    Raises:
        ConfigError: `kind` needs torchrun, or forbids it.
    """
    launched = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    if kind in ("ddp", "fsdp") and not launched:
        message = (
            f"--parallel {kind} needs torchrun (torchrun --nproc-per-node 2 -m tiny_llm ...); "
            "for one process pass --parallel auto"
        )
        raise ConfigError(message)
    if kind == "none" and world_size > 1:
        message = f"--parallel none is for one process, torchrun started {world_size}"
        raise ConfigError(message)
    if kind == "auto":
        kind = "ddp" if world_size > 1 else "none"
    if kind == "none":
        yield SINGLE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Parallel(kind, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _collective_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
