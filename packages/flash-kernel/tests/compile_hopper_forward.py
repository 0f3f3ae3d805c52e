"""Compile the Hopper forward for sm_90a, with no GPU; print what came out as a JSON line.

    python compile_hopper_forward.py --head-dim 128 [--causal] [--window] [--softcap] [--packed]
        [--long] [--redo]

With --redo it is the portable kernel that does marked tiles again.  A script of its own, because a
process in which Triton interprets cannot compile.
"""

import argparse
import json
import time
from typing import Any

import torch
import triton
from compile_kernels import compile_one, inspect_cuda
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flash_kernel._hopper.config import LONG, ForwardSpec, forward_config
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._hopper.forward_spec import Sizes, forward_spec
from flash_kernel._hopper.launch import OPTIONS, describers
from flash_kernel._triton.config import HALF_PRECISION, KernelSpec
from flash_kernel._triton.forward import flash_attention_redo_kernel
from flash_kernel._triton.launch import redo_config
from flash_kernel.variant import Variant

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "lse_ptr": "*fp32",
    "workspace_ptr": "*i32",
    "cu_seqlens_q_ptr": "*i32",
    "cu_seqlens_k_ptr": "*i32",
}


def tensor_types(spec: ForwardSpec) -> dict[str, str]:
    """Return the types of the kernel's tensors as its launch makes them."""
    x = torch.empty(1, 1, 128, sum(spec.WIDTHS), dtype=torch.bfloat16)
    names = flash_attention_hopper_forward_kernel.arg_names[:8]
    types = {}
    for name, describe in zip(names, describers(spec, x.dtype), strict=True):
        types[name] = "*bf16"
        if describe is not None:
            block = describe(x)
            shape = ",".join(map(str, block.block_shape))
            types[name] = f"tensordesc<bf16[{shape}],{block.layout!r}>"
    return types | POINTERS


def compile_forward(head_dim: int, seqlen: int, variant: Variant, num_sequences: int | None) -> Any:
    """Compile the kernel as its launcher would."""
    kernel = flash_attention_hopper_forward_kernel
    config = forward_config(head_dim, seqlen)
    sizes = Sizes(1, 1, 1, seqlen, seqlen, head_dim, num_sequences)
    spec = forward_spec(config, torch.bfloat16, sizes, variant)
    types = tensor_types(spec)
    signature = dict.fromkeys(kernel.arg_names, "i32") | types
    signature |= dict.fromkeys(("scale_log2", "cap_log2"), "fp32") | {"SPEC": "constexpr"}
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(kernel, signature, {"SPEC": spec}, aligned)
    return triton.compile(source, target=TARGET, options=OPTIONS)


def compile_redo(head_dim: int, variant: Variant, *, is_packed: bool) -> Any:
    """Compile the portable kernel that follows."""
    config = redo_config(HALF_PRECISION["hopper"][head_dim].forward)
    spec = KernelSpec(
        *[head_dim] * 4,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION="ieee",
        USE_DESCRIPTORS=True,
        HAS_RIGHT=variant.right is not None,
        HAS_LEFT=variant.left is not None,
        IS_PACKED=is_packed,
    )
    return compile_one(flash_attention_redo_kernel, spec, config, TARGET, "bf16")


def main() -> None:
    """Read the command line, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", action="store_true")
    parser.add_argument("--softcap", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--redo", action="store_true")
    options = parser.parse_args()
    left = 100 if options.window else None
    softcap = 30.0 if options.softcap else None
    variant = Variant(1.0, left, right=0 if options.causal else None, softcap=softcap)
    num_sequences = 2 if options.packed else None
    start = time.perf_counter()
    if options.redo:
        compiled = compile_redo(options.head_dim, variant, is_packed=options.packed)
    else:
        seqlen = LONG if options.long else 1024
        compiled = compile_forward(options.head_dim, seqlen, variant, num_sequences)
    seconds = round(time.perf_counter() - start, 1)
    report = inspect_cuda(compiled, 90)
    report |= {"triton": triton.__version__, "shared_bytes": compiled.metadata.shared}
    report["seconds"] = seconds
    print(json.dumps(report))


if __name__ == "__main__":
    main()
