"""How much memory a run will take: predicted before it is tried."""

from pathlib import Path

import torch

from attn_bench.case import Case
from attn_bench.providers import Provider

MIB = 2**20
# score matrices that a dense forward, and a forward with its backward, hold at once, in float32
DENSE_FORWARD, DENSE_BACKWARD = 2.5, 4.0


def predicted_mib(case: Case, provider: Provider) -> float:
    """Return the memory that one run should take beyond its inputs, in MiB.

    Outputs, gradients and the statistics of the softmax, and where the provider keeps the scores,
    a few matrices ``[B, H, M, N]``.  Scratch space of a library is not known here.
    """
    size = 4 if case.dtype == "fp32" else 2
    rows = case.batch * case.num_heads * case.seqlen_q
    queries = rows * case.head_dim * size
    keys = case.batch * case.kv_heads * case.seqlen_k * case.head_dim * size
    is_forward = case.mode == "fwd"
    results = queries + 4 * rows if is_forward else 2 * queries + 2 * keys + 8 * rows
    total = float(results)
    if provider.keeps_scores:
        total += (DENSE_FORWARD if is_forward else DENSE_BACKWARD) * 4 * rows * case.seqlen_k
    return total / MIB


def available_mib(device: torch.device) -> float | None:
    """Return how much memory can still be had on the device, None if nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + cached) / MIB
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) / 1024
    return None


def why_too_large(case: Case, provider: Provider, device: torch.device) -> str | None:
    """Return why a run is not worth trying, None if it should fit.

    On a CPU, running out of memory is no error that can be caught: the system ends the process.
    """
    needed, free = predicted_mib(case, provider), available_mib(device)
    if free is None or needed <= free:
        return None
    return f"predicted {needed:,.0f} MiB beyond the inputs, {free:,.0f} MiB are free: not tried"
