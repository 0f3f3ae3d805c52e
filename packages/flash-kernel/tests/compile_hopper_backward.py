"""Compile the Hopper backward for sm_90a, with no GPU; print what came out as a JSON line.

    python compile_hopper_backward.py --head-dim 128 [--causal] [--fast | --rotated]

A script of its own, because a process in which Triton interprets cannot compile.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
import triton
from compile_kernels import compile_one, inspect_cuda
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flash_kernel._hopper.backward import flash_attention_backward_kernel
from flash_kernel._hopper.backward_config import BackwardSpec
from flash_kernel._hopper.backward_ends import (
    flash_attention_backward_end_kernel,
    flash_attention_backward_start_kernel,
)
from flash_kernel._hopper.backward_launch import describers, specify
from flash_kernel._triton.config import BlockConfig
from flash_kernel.variant import Variant

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"dq_sum_ptr": "*fp32", "counters_ptr": "*i32", "marks_ptr": "*i32"}


def descriptor_types(head_dim: int, spec: BackwardSpec) -> dict[str, str]:
    """Return the types of the kernel's descriptors as its launch makes them."""
    x = torch.empty(1, 1, 128, head_dim, dtype=torch.bfloat16)
    tensors = [*[x] * 6, torch.empty(4 * spec.BLOCK_M), torch.empty(64, 256)]
    names = flash_attention_backward_kernel.arg_names[: len(tensors)]
    types = {}
    for name, tensor, describe in zip(names, tensors, describers(x.dtype, spec), strict=True):
        block = describe(tensor)
        size = ",".join(map(str, block.block_shape))
        dtype = "bf16" if tensor is x else "fp32"
        types[name] = f"tensordesc<{dtype}[{size}],{block.layout!r}>"
    return types


def compile_backward(head_dim: int, spec: BackwardSpec) -> Any:
    """Compile the kernel as its launcher would."""
    kernel = flash_attention_backward_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | POINTERS
    signature |= descriptor_types(head_dim, spec)
    signature |= {"scale": "fp32", "scale_log2": "fp32", "SPEC": "constexpr"}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in POINTERS}
    source = GluonASTSource(kernel, signature, {"SPEC": spec}, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGET, options=options)


def main() -> None:
    """Read the command line, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--rotated", action="store_true")
    options = parser.parse_args()
    q = torch.empty(1, 1, 128, options.head_dim)
    variant = Variant(1.0, right=0 if options.causal else None)
    spec = specify(q, q, variant, is_deterministic=not options.fast)
    spec = replace(spec, IS_ROTATED=options.rotated)
    # of the small kernels around it only that they compile is of interest
    for kernel in (flash_attention_backward_start_kernel, flash_attention_backward_end_kernel):
        compile_one(kernel, spec, BlockConfig(), TARGET, "bf16")
    compiled = compile_backward(options.head_dim, spec)
    report = inspect_cuda(compiled, 90)
    report |= {"triton": triton.__version__, "shared_bytes": compiled.metadata.shared}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
