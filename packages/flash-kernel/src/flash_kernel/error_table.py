"""The largest errors against float64, measured here: a table for people.

    python -m flash_kernel.error_table                         prints it
    python -m flash_kernel.error_table --into docs/numerics.md replaces what lies between markers

Each case is one of `cases`, forward and backward, on standard normal inputs.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import flash_kernel
from flash_kernel.api import flash_attention
from flash_kernel.document import replaced
from flash_kernel.reference import attention_reference
from flash_kernel.testing import AttentionErrors, AttentionImpl, expect, make_qkv

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TENSORS = ("o", "lse", "dq", "dk", "dv")
HEAD_DIMS = (64, 80, 128, 256)
LENGTHS = ((1, 2048), (1000, 1777), (2048, 2048), (2049, 515))
MARKERS = ("<!-- error-table -->", "<!-- /error-table -->")


class Worst(NamedTuple):
    """Of one dtype, by tensor: our largest error, dense attention's, and ours by its bound."""

    ours: dict[str, float]
    dense: dict[str, float]
    of_bound: dict[str, float]


def cases(
    head_dims: Sequence[int], lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, bool]]:
    """Yield head_dim, seqlen_q, seqlen_k and is_causal of every case."""
    for (seqlen_q, seqlen_k), head_dim in itertools.product(lengths, head_dims):
        yield from ((head_dim, seqlen_q, seqlen_k, is_causal) for is_causal in (False, True))


def measure(
    dtype: torch.dtype,
    device: str,
    impl: str,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> Worst:
    """Return the largest errors over all cases of one dtype."""
    worst = Worst(*(dict.fromkeys(TENSORS, 0.0) for _ in Worst._fields))
    for seed, (head_dim, seqlen_q, seqlen_k, is_causal) in enumerate(cases(head_dims, lengths)):
        q, k, v = make_qkv(
            1, 4, seqlen_q, seqlen_k, head_dim, dtype=dtype, device=device, seed=seed
        )
        expected = expect(q, k, v, is_causal=is_causal)
        ours: AttentionImpl = partial(
            flash_attention, is_causal=is_causal, return_lse=True, impl=impl
        )
        dense: AttentionImpl = partial(attention_reference, is_causal=is_causal)
        errors = expected.errors_of(ours)
        _keep(worst.ours, errors)
        _keep(worst.dense, expected.errors_of(dense))
        bounds = dict(expected.bounds.items())
        for name, error in errors.items():
            worst.of_bound[name] = max(worst.of_bound[name], error.max / bounds[name].max)
    return worst


def _keep(largest: dict[str, float], errors: AttentionErrors) -> None:
    for name, error in errors.items():
        largest[name] = max(largest[name], error.max)


def as_markdown(measured: dict[torch.dtype, Worst], environment: str) -> str:
    """Return the table, and below it where it comes from."""
    lines = [
        "| dtype | largest error of | " + " | ".join(f"`{name}`" for name in TENSORS) + " |",
        "| --- | --- |" + " --- |" * len(TENSORS),
    ]
    for dtype, worst in measured.items():
        name = str(dtype).removeprefix("torch.")
        for what, values, form in (
            ("the kernels", worst.ours, "{:.1e}"),
            ("dense attention in that dtype", worst.dense, "{:.1e}"),
            ("the kernels, as a share of the bound", worst.of_bound, "{:.0%}"),
        ):
            cells = " | ".join(form.format(values[x]) for x in TENSORS)
            lines.append(f"| {name} | {what} | {cells} |")
            name = ""
    return "\n".join([*lines, "", environment])


def describe_environment(device: str, impl: str) -> str:
    """Return in one line what was measured, and on what."""
    is_cuda = torch.device(device).type == "cuda"
    parts = [
        torch.cuda.get_device_name() if is_cuda else f"{platform.machine()} CPU",
        f"impl={impl!r}",
        f"flash-kernel {flash_kernel.__version__}",
        f"torch {torch.__version__}",
    ]
    if importlib.util.find_spec("triton") is not None:
        parts.append(f"Triton {importlib.metadata.version('triton')}")
    return f"{', '.join(parts)}, {datetime.now(UTC):%Y-%m-%d}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m flash_kernel.error_table")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--impl", default="triton", help="default: triton")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT.md", help="default: print it")
    options = parser.parse_args(arguments)
    measured = {dtype: measure(dtype, options.device, options.impl) for dtype in DTYPES}
    table = as_markdown(measured, describe_environment(options.device, options.impl))
    if options.into is None:
        print(table)
    else:
        options.into.write_text(replaced(options.into.read_text("utf-8"), table, MARKERS), "utf-8")


if __name__ == "__main__":
    main()
