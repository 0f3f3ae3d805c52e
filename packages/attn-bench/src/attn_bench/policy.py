"""``attn-bench policy``: which of tiny-llm's backends was the fastest, per class of shapes.

tiny-llm's choice ``policy:FILE`` takes it.  The file is JSON: ``{"kind": "attention-policy",
"schema": 1, "device": ..., "device_type": ..., "classes": [...]}``.  A class holds dtype, head_dim,
is_causal and max_seqlen, and under ``prefer`` the backends from the fastest on; it is meant for
lengths up to max_seqlen that no earlier class covers.
"""

from collections.abc import Iterable
from typing import Any

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.results import Results, Row

# provider -> the backend of tiny-llm that runs the same code
BACKENDS = {
    "layer-eager": "eager",
    "sdpa": "sdpa",
    "sdpa-flash": "sdpa-flash",
    "sdpa-cudnn": "sdpa-cudnn",
    "sdpa-efficient": "sdpa-efficient",
    "sdpa-math": "sdpa-math",
    "flash-auto": "flash",
    "flash-triton": "flash",
    "flex": "flex",
}
# what a training step spends on attention; a file may have the parts or the whole
PARTS = (("fwd+bwd",), ("fwd", "bwd"), ("fwd",))
KEPT = ("device", "device_type", "torch", "triton", "commit", "date")

Class = tuple[str, int, bool, int]


def policy_of(results: Results) -> dict[str, Any]:
    """Return the policy that a result file supports.

    Raises:
        InputError: if no class of shapes has the times of two backends.
    """
    times: dict[Class, dict[str, list[float]]] = {}
    for case, backend, milliseconds in _attention_times(results.rows):
        key = (case.dtype, case.head_dim, case.is_causal, case.seqlen_k)
        times.setdefault(key, {}).setdefault(backend, []).append(milliseconds)
    classes = [
        _entry(key, {name: min(values) for name, values in backends.items()})
        for key, backends in sorted(times.items())
        if len(backends) > 1
    ]
    if not classes:
        msg = f"no case has times of two backends; tiny-llm has those of {', '.join(BACKENDS)}."
        raise InputError(msg)
    kept = {name: results.environment.get(name) for name in KEPT}
    return {"kind": "attention-policy", "schema": 1, **kept, "classes": classes}


def _attention_times(rows: Iterable[Row]) -> Iterable[tuple[Case, str, float]]:
    """Yield (shape, backend, milliseconds) for each shape and provider with a complete time."""
    modes: dict[tuple[Case, str], dict[str, float]] = {}
    for row in rows:
        if row.provider in BACKENDS and row.median_ms is not None and row.suite != "train_step":
            modes.setdefault((row.case.shape, row.provider), {})[row.case.mode] = row.median_ms
    for (case, provider), had in modes.items():
        parts = next((each for each in PARTS if all(mode in had for mode in each)), ())
        if parts:
            yield case, BACKENDS[provider], sum(had[mode] for mode in parts)


def _entry(key: Class, backends: dict[str, float]) -> dict[str, Any]:
    dtype, head_dim, is_causal, seqlen = key
    order = sorted(backends, key=lambda name: backends[name])
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "is_causal": is_causal,
        "max_seqlen": seqlen,
        "prefer": order,
        "milliseconds": {name: round(backends[name], 4) for name in order},
    }
