"""Compile the Hopper backward above 128 columns for sm_90a, with no GPU; print a line of JSON.

    python compile_hopper_wide.py --kernel dq|dk_dv [--head-dim 256] [--causal] [--window] [--redo]

With --redo it is the portable kernel that does marked tiles again.  A script of its own, because a
process in which Triton interprets cannot compile.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from compile_kernels import compile_one, inspect_cuda
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flash_kernel._hopper.config import ForwardSpec
from flash_kernel._hopper.forward_spec import Sizes
from flash_kernel._hopper.launch import OPTIONS
from flash_kernel._hopper.wide_config import KeysSpec
from flash_kernel._hopper.wide_dk_dv import flash_attention_wide_dk_dv_kernel
from flash_kernel._hopper.wide_dk_dv_launch import describers as dk_dv_describers
from flash_kernel._hopper.wide_dk_dv_launch import specify
from flash_kernel._hopper.wide_dq import flash_attention_wide_dq_kernel
from flash_kernel._hopper.wide_dq_launch import dq_describers, dq_spec
from flash_kernel._triton.config import (
    KernelSpec,
    configs_for,
    padded_head_dim,
    takes_pieces,
)
from flash_kernel._triton.launch_backward import MARKED_ROWS
from flash_kernel._triton.prepared import Describe
from flash_kernel._triton.redo_backward import (
    flash_attention_dk_dv_redo_kernel,
    flash_attention_dq_redo_kernel,
)
from flash_kernel.variant import Variant

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"statistics_ptr": "*fp32", "marks_ptr": "*i32", "workspace_ptr": "*i32"}


def descriptor_types(
    kernel: Any, describers: Sequence[Describe | None], x: torch.Tensor
) -> dict[str, str]:
    """Return the types of the kernel's first arguments as its launch makes them."""
    types = {}
    for name, describe in zip(kernel.arg_names, describers, strict=False):
        types[name] = "*bf16"
        if describe is not None:
            block = describe(torch.empty(4, 128) if name == "statistics" else x)
            shape = ",".join(map(str, block.block_shape))
            dtype = "fp32" if name == "statistics" else "bf16"
            types[name] = f"tensordesc<{dtype}[{shape}],{block.layout!r}>"
    return types


def compile_gluon(
    kernel: Any, describers: Sequence[Describe | None], spec: ForwardSpec | KeysSpec
) -> Any:
    """Compile a kernel as its launcher would."""
    x = torch.empty(1, 1, 128, sum(spec.WIDTHS), dtype=torch.bfloat16)
    pointers = {name: kind for name, kind in POINTERS.items() if name in kernel.arg_names}
    types = descriptor_types(kernel, describers, x) | pointers
    signature = dict.fromkeys(kernel.arg_names, "i32") | types
    signature |= {"scale": "fp32", "scale_log2": "fp32", "SPEC": "constexpr"}
    addresses = [name for name, kind in types.items() if kind.startswith("*")]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in addresses}
    source = GluonASTSource(kernel, signature, {"SPEC": spec}, aligned)
    return triton.compile(source, target=TARGET, options=OPTIONS)


def compile_hopper(name: str, head_dim: int, variant: Variant) -> Any:
    """Compile dq, or dk and dv."""
    q = torch.empty(1, 1, 1024, head_dim, dtype=torch.bfloat16)
    if name == "dq":
        _, spec, _ = dq_spec(q, q, variant, q.dtype)
        return compile_gluon(flash_attention_wide_dq_kernel, dq_describers(spec, q.dtype), spec)
    spec = specify(Sizes(1, 1, 1, 1024, 1024, head_dim), variant)
    describers = dk_dv_describers(q.dtype, spec)
    return compile_gluon(flash_attention_wide_dk_dv_kernel, describers, spec)


def compile_redo(name: str, head_dim: int, variant: Variant) -> Any:
    """Compile the portable kernel that follows."""
    configs = configs_for(head_dim, torch.bfloat16, 90)
    # tiles of as many rows, or keys, as share a mark
    kernel, config = flash_attention_dq_redo_kernel, replace(configs.dq, block_m=MARKED_ROWS)
    if name == "dk_dv":
        kernel = flash_attention_dk_dv_redo_kernel
        config = replace(configs.dk_dv, block_n=MARKED_ROWS)
    in_pieces = takes_pieces(head_dim, is_forward=False)
    spec = KernelSpec(
        *[head_dim] * 2,
        *[padded_head_dim(head_dim)] * 2,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION="ieee",
        USE_DESCRIPTORS=not in_pieces,
        IN_PIECES=in_pieces,
        HAS_RIGHT=variant.right is not None,
        HAS_LEFT=variant.left is not None,
    )
    return compile_one(kernel, spec, config, TARGET, "bf16")


def main() -> None:
    """Read the command line, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=("dq", "dk_dv"), required=True)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", action="store_true")
    parser.add_argument("--redo", action="store_true")
    options = parser.parse_args()
    variant = Variant(1.0, 100 if options.window else None, 0 if options.causal else None)
    compile_kernel = compile_redo if options.redo else compile_hopper
    compiled = compile_kernel(options.kernel, options.head_dim, variant)
    report = inspect_cuda(compiled, 90)
    report |= {"triton": triton.__version__, "shared_bytes": compiled.metadata.shared}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
