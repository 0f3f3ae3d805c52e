"""The smallest launch there is, to find out whether Triton can launch on this machine at all."""

import torch
import triton
import triton.language as tl


@triton.jit
def probe_kernel(x_ptr):
    tl.store(x_ptr, 1)


def launch_probe(device: torch.device) -> None:
    """Compile, launch and read back; raises what Triton raises where it lacks a C compiler, say."""
    with torch.cuda.device(device):
        x = torch.zeros(1, device=device, dtype=torch.int32)
        probe_kernel[(1,)](x)
        if x.item() != 1:
            msg = "a Triton kernel was launched on this GPU but did not write its result"
            raise RuntimeError(msg)
