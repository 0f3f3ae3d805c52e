"""Compile every kernel for one GPU architecture, with no GPU; print what came out as JSON lines.

    python compile_kernels.py --capability 90 --dtype bf16 --head-dim 128 [--causal]

A script of its own, because a process in which Triton interprets cannot compile.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton
from machine_code import disassemble, lost_operands
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_kernel._triton.backward import (
    flash_attention_dk_dv_kernel,
    flash_attention_dq_kernel,
)
from flash_kernel._triton.config import (
    BlockConfig,
    KernelSpec,
    configs_for,
    decode_config,
    float32_precision,
    padded_head_dim,
    takes_pieces,
)
from flash_kernel._triton.decode import (
    flash_attention_append_kernel,
    flash_attention_combine_kernel,
    flash_attention_decode_kernel,
)
from flash_kernel._triton.forward import flash_attention_forward_kernel
from flash_kernel._triton.row_statistics import flash_attention_row_statistics_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "k_cache", "v_cache")
KEYS = ("k", "v", "dk", "dv")  # tensors whose rows are keys
VALUES = ("v", "o", "do", "dv")  # tensors as wide as v
FLOATS = ("scale", "scale_log2", "softcap")
# others are float32; None: the dtype of q
POINTERS = {"mask_ptr": "*i1", "bias_ptr": None, "o_parts": "*fp32"}
POINTERS |= dict.fromkeys(
    (
        *("cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqlens_ptr", "pages_ptr", "counters_ptr"),
        "marks_ptr",
    ),
    "*i32",
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONSTANTS = {"HAS_DLSE": True, "SPLITS": 32}  # others are the specification
SASS_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)

# products, exponentials, and waits for all products but some number
STEP = re.compile(r"(HGMMA)|MUFU\.(EX2)|WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")


def order_of_steps(sass: str) -> str:
    """Return the products, exponentials and waits in the order of the instructions."""
    names = ["".join(found) for found in STEP.findall(sass)]
    runs = ((name, len(list(same))) for name, same in groupby(names))
    return " ".join(f"wait<={name}" if name.isdigit() else f"{n}x{name}" for name, n in runs)


def argument_types(kernel: Any, spec: KernelSpec, dtype: str) -> tuple[dict[str, Any], dict, dict]:
    """Return signature, constants and alignment hints as a launch on aligned tensors has them."""
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    aligned = [["tt.divisibility", 16]]
    for index, name in enumerate(kernel.arg_names):
        if name in TENSORS and spec.USE_DESCRIPTORS:
            rows = spec.BLOCK_N if name in KEYS else spec.BLOCK_M
            width = spec.BLOCK_DV if name in VALUES else spec.BLOCK_D
            ones = "1, 1, 1" if spec.IS_PACKED else "1, 1"
            signature[name] = f"tensordesc<{dtype}[{ones}, {rows}, {width}]>"
        elif name in TENSORS or name == "o_parts" or name.endswith("_ptr"):
            own = f"*{dtype}" if name in TENSORS else "*fp32"
            signature[name] = POINTERS.get(name, own) or f"*{dtype}"
            hints[(index,)] = aligned
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32", "constexpr")
            constants[index, 3] = 1
            hints |= {(index, axis): aligned for axis in range(3)}
        elif name.isupper():
            signature[name] = "constexpr"
            constants[name] = CONSTANTS.get(name, spec)
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
            if name in ("padded_q", "o_split_stride"):
                hints[(index,)] = aligned
    return signature, constants, hints


def compile_one(
    kernel: Any, spec: KernelSpec, config: BlockConfig, target: GPUTarget, dtype: str
) -> Any:
    """Compile one kernel as its launcher would."""
    source = ASTSource(kernel, *argument_types(kernel, spec, dtype))
    return triton.compile(source, target=target, options=config.options)


def inspect_cuda(compiled: Any, capability: int) -> dict[str, Any]:
    """Return registers, spills and instructions of a kernel compiled for an NVIDIA GPU."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(ptx)]
        log = subprocess.run(
            [*command, "-o", f"{ptx}.cubin"], capture_output=True, text=True, check=True
        ).stderr
    sass = disassemble(compiled.asm["cubin"], TOOLS)
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "serialized": "serializ" in log,
        "lost_operands": lost_operands(sass),
        "order": order_of_steps(sass),
        "opcodes": dict(Counter(SASS_OPCODE.findall(sass))),
        "tensor_core_ops": len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma",
                                          compiled.asm["ptx"])),
        "split_factors": compiled.asm["ptx"].count("cvt.rna.tf32"),
        "bulk_copies": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
    }  # fmt: skip


def compile_all(options: argparse.Namespace) -> None:
    """Compile the kernels and print one line for each."""
    arch: int | str = options.capability or options.hip
    target = GPUTarget(
        *(("hip", arch, 64) if options.hip else ("cuda", arch, 32)),
    )
    configs = configs_for(options.head_dim, DTYPES[options.dtype], options.capability)
    kernels = [
        (flash_attention_forward_kernel, configs.forward, True),
        (flash_attention_row_statistics_kernel, BlockConfig(block_m=32), False),
        (flash_attention_dk_dv_kernel, configs.dk_dv, True),
        (flash_attention_dq_kernel, configs.dq, True),
    ]
    if options.decode:
        rows = options.decode_rows
        config = decode_config(
            options.head_dim, DTYPES[options.dtype], options.capability, rows,
            is_paged=options.page_size > 0,
        )  # fmt: skip
        kernels = [
            (flash_attention_append_kernel, BlockConfig(block_n=16), False),
            (flash_attention_decode_kernel, config, False),
            (flash_attention_combine_kernel, BlockConfig(), False),
        ]
    for kernel, config, reads_tiles in kernels[:1] if options.first else kernels:
        is_forward = kernel is flash_attention_forward_kernel
        in_pieces = options.pointers or takes_pieces(options.head_dim, is_forward=is_forward)
        in_pieces |= config.max_width is not None
        use_descriptors = reads_tiles and options.capability >= 90 and not in_pieces
        spec = KernelSpec(
            HEAD_DIM=options.head_dim,
            HEAD_DIM_V=options.head_dim,
            BLOCK_D=padded_head_dim(options.head_dim),
            BLOCK_DV=padded_head_dim(options.head_dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            PRECISION=float32_precision(DTYPES[options.dtype], options.capability),
            MAX_WIDTH=config.max_width,
            HAS_RIGHT=options.causal or options.all_features,
            PRESCALED=options.all_features,
            HAS_LEFT=options.all_features,
            HAS_SOFTCAP=options.all_features,
            HAS_ALIBI=options.all_features,
            HAS_BIAS=options.all_features,
            HAS_MASK=options.all_features,
            HAS_SINKS=options.all_features,
            PAGE_SIZE=options.page_size,
            IS_PACKED=options.packed,
            USE_DESCRIPTORS=use_descriptors,
            IN_PIECES=(reads_tiles and not use_descriptors) or config.max_width is not None,
        )
        compiled = compile_one(kernel, spec, config, target, options.dtype)
        report: dict[str, Any] = {
            "kernel": compiled.metadata.name,
            "triton": triton.__version__,
            "shared_bytes": compiled.metadata.shared,
        }
        if options.hip:
            report["tensor_core_ops"] = compiled.asm["amdgcn"].count("v_mfma")
        else:
            report |= inspect_cuda(compiled, options.capability)
        print(json.dumps(report), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=0)
    parser.add_argument("--hip", default="")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--pointers", action="store_true")
    parser.add_argument("--first", action="store_true", help="the first kernel alone")
    parser.add_argument("--all-features", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--decode", action="store_true", help="the kernels of a cache instead")
    parser.add_argument("--decode-rows", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=0)
    compile_all(parser.parse_args())


if __name__ == "__main__":
    main()
