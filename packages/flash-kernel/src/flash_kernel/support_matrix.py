"""What runs for which call, asked of the code that decides: the tables of the README.

python -m flash_kernel.support_matrix                    prints them
python -m flash_kernel.support_matrix --into README.md   replaces what lies between markers
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flash_kernel.dispatch import BACKWARDS, IMPLS
from flash_kernel.document import replaced
from flash_kernel.explain import Explanation, explain

MARKERS = ("<!-- support-matrix -->", "<!-- /support-matrix -->")
CAPABILITIES = {"CPU": None, "7.5": 75, "8.0, 10.0, 12.0": 80, "9.0": 90}
SHAPE = (2, 16, 4096, 128)  # bfloat16, where a call does not say otherwise


def _wide(head_dim: int) -> dict[str, Any]:
    return {"q_shape": (*SHAPE[:-1], head_dim), "k_shape": (*SHAPE[:-1], head_dim)}


_PACKED = {"q_shape": (8192, 16, 128), "k_shape": (8192, 16, 128), "layout": "packed"}
_CACHE = {"q_shape": (2, 16, 1, 128), "layout": "cache"}
# what distinguishes each call, as arguments of `explain`
CALLS: dict[str, dict[str, Any]] = {
    "causal or not": {},
    "at most 256 rows": {"q_shape": (2, 16, 256, 128), "k_shape": (2, 16, 256, 128)},
    "`head_dim` 64": _wide(64),
    "`head_dim` 80": _wide(80),
    "`head_dim` 96": _wide(96),
    "`head_dim` 192": _wide(192),
    "`head_dim` 256": _wide(256),
    "`head_dim` 320": _wide(320),
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "shared heads": {"k_shape": (2, 4, 4096, 128)},
    "v of another width": {"v_shape": (*SHAPE[:-1], 64)},
    "`window`": {"window": (1024, 0)},
    "`softcap`": {"softcap": 30.0},
    "`mask`": {"modifiers": ("mask",)},
    "`bias`": {"modifiers": ("bias",)},
    "`bias`, trained": {"trained": ("bias",)},
    "`alibi_slopes`": {"modifiers": ("alibi_slopes",)},
    "`alibi_slopes`, trained": {"trained": ("alibi_slopes",)},
    "`sinks`, trained": {"trained": ("sinks",)},
    "`return_lse`": {"return_lse": True},
    "packed sequences": _PACKED,
    "packed, `softcap`": _PACKED | {"softcap": 30.0},
    "a cache": _CACHE,
}


def asked(
    call: str, capability: int | None, impl: str = "auto", backward: str = "auto"
) -> Explanation:
    """Return what `explain` says of a call on a device."""
    arguments = {"q_shape": SHAPE, "k_shape": SHAPE} | CALLS[call]
    return explain(**arguments, capability=capability, impl=impl, backward=backward)


def table_of_choices() -> str:
    """Return what ``"auto"`` runs for each call on each device: forward, backward."""
    rows = []
    for call in CALLS:
        answers = [asked(call, capability) for capability in CAPABILITIES.values()]
        rows.append([call, *(", ".join(filter(None, (x.impl, x.backward))) for x in answers)])
    return _table(["a call with", *CAPABILITIES], rows)


def table_of_refusals(capability: int = 90) -> str:
    """Return which implementation, and which backward, takes each call if it is named."""
    rows = []
    for call, wishes in CALLS.items():
        answers = [asked(call, capability, impl=x) for x in IMPLS[1:]]
        if wishes.get("layout") != "cache":  # which has no gradients
            answers += [asked(call, capability, backward=x) for x in BACKWARDS[1:]]
        rows.append([call, *("–" if x.impl is None else "yes" for x in answers)])
    return _table(["a call with", *IMPLS[1:], *(f"backward {x}" for x in BACKWARDS[1:])], rows)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns)]
    lines += [row + [""] * (len(columns) - len(row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_markdown() -> str:
    """Return both tables, with what they show above them."""
    return f"""\
What `"auto"` runs, by compute capability: forward, backward; "autograd" is torch's own.

{table_of_choices()}

What can be had by name where the compute capability is 9.0: by `impl=` with `backward="auto"`,
then by `backward=` with `impl="auto"`.

{table_of_refusals()}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and print or write the tables."""
    parser = argparse.ArgumentParser(prog="python -m flash_kernel.support_matrix")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT.md", help="default: print them")
    into: Path | None = parser.parse_args(arguments).into
    if into is None:
        print(as_markdown())
    else:
        into.write_text(replaced(into.read_text("utf-8"), as_markdown(), MARKERS), "utf-8")


if __name__ == "__main__":
    main()
