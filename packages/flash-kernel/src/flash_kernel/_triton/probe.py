"""The smallest launch there is, to find out whether Triton can launch on this machine at all."""

import torch
import triton


@triton.jit
def probe_kernel():
    pass


def launch_probe(device: torch.device) -> None:
    """Compile and launch; raises what Triton raises where it lacks a C compiler, say.

    No tensor is made: under ``torch.func`` or fake tensors it would not be a real one, and what is
    found out here holds for the whole process.
    """
    with torch.cuda.device(device):
        probe_kernel[(1,)]()
