"""The Triton kernels on a CPU: a slice of the work in Triton's interpreter, in its own process.

Triton reads TRITON_INTERPRET when a kernel is decorated, so a process that has imported the kernels
without it cannot interpret them any more.  Problems and results travel as files of ``torch.save``.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attn_bench.case import Case
from attn_bench.truth import Tensors
from attn_bench.workload import Inputs, gradients

# backwards of the Triton forward that run without a compiler
BACKWARDS = ("triton", "dense")
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Interpreted:
    """What the interpreted kernels returned, or the state and the reason of their row if nothing.

    `tensors` holds one entry per backward of the kernels, each with one entry per problem.
    """

    tensors: dict[str, list[Tensors]]
    state: str = "ok"
    reason: str = ""


def run_interpreted(problems: Sequence[tuple[Case, Inputs]]) -> Interpreted:
    """Run flash-kernel's Triton kernels on CPU problems in an interpreting subprocess."""
    reason = why_not_interpreted()
    if reason is not None:
        return Interpreted({}, "unsupported", reason)
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as folder:
        sent, received = Path(folder, "problems.pt"), Path(folder, "results.pt")
        records = [
            {"inputs": tuple(each.detach() for each in inputs), "is_causal": case.is_causal}
            for case, inputs in problems
        ]
        torch.save(records, sent)
        failure = _run_child(sent, received)
        if failure:
            return Interpreted({}, "error", failure)
        loaded: dict[str, list[tuple[torch.Tensor, ...]]] = torch.load(received, weights_only=True)
    return Interpreted(
        {
            f"flash-triton, {name} backward (interpreted)": [Tensors(*each) for each in results]
            for name, results in loaded.items()
        }
    )


def why_not_interpreted() -> str | None:
    """Return why Triton's interpreter cannot run the kernels here, None if it may."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: install flash-kernel[triton]"
    triton, numpy = _release("triton"), _release("numpy")
    if numpy is None:
        return "Triton's interpreter needs numpy, which is not installed"
    # it takes loop bounds from arrays of one dimension, which numpy 2.4 refuses
    if triton is not None and triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton before 3.7 fails with numpy 2.4 or later: upgrade Triton"
    return None


def _release(distribution: str) -> tuple[int, ...] | None:
    """Return the first two numbers of an installed version, None if it is not installed."""
    try:
        return tuple(int(part) for part in version(distribution).split(".")[:2])
    except PackageNotFoundError:
        return None


def _run_child(sent: Path, received: Path) -> str:
    """Return an empty string, or in one line why the child failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(sent), str(received)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Triton's interpreter took longer than {TIMEOUT_SECONDS} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"Triton's interpreter failed: {lines[-1]}"


def _solve(record: dict[str, Any], backward: str) -> tuple[torch.Tensor, ...]:
    from flash_kernel import flash_attention

    q, k, v, do = record["inputs"]
    inputs = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do)
    o = flash_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        is_causal=record["is_causal"],
        impl="triton",
        backward=backward,
    )
    return (o.detach(), *gradients(o, inputs))


def _child(sent: str, received: str) -> None:
    torch.set_num_threads(1)  # as `attn_bench.environment.one_thread` says
    records = torch.load(sent, weights_only=True)
    results = {each: [_solve(record, each) for record in records] for each in BACKWARDS}
    torch.save(results, received)


if __name__ == "__main__":
    _child(*sys.argv[1:])
