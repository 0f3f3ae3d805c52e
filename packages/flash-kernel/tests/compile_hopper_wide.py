"""Compile the Hopper backward above 128 columns for sm_90a, with no GPU; print a line of JSON.

    python compile_hopper_wide.py --kernel dq|dk_dv [--head-dim 256] [--causal] [--window]

A script of its own, because a process in which Triton interprets cannot compile.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import triton
from compile_kernels import inspect_cuda, order_of_steps
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
from flash_kernel._triton.prepared import Describe
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


def main() -> None:
    """Read the command line, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=("dq", "dk_dv"), required=True)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", action="store_true")
    options = parser.parse_args()
    variant = Variant(1.0, 100 if options.window else None, 0 if options.causal else None)
    q = torch.empty(1, 1, 1024, options.head_dim, dtype=torch.bfloat16)
    if options.kernel == "dq":
        _, spec, _ = dq_spec(q, q, variant, q.dtype)
        kernel, describers = flash_attention_wide_dq_kernel, dq_describers(spec, q.dtype)
    else:
        spec = specify(Sizes(1, 1, 1, 1024, 1024, options.head_dim), variant)
        kernel, describers = flash_attention_wide_dk_dv_kernel, dk_dv_describers(q.dtype, spec)
    compiled = compile_gluon(kernel, describers, spec)
    report = inspect_cuda(compiled, 90)
    report |= {"triton": triton.__version__, "shared_bytes": compiled.metadata.shared}
    report["order"] = order_of_steps(compiled.asm["cubin"])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
