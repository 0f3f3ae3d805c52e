"""The Hopper forward compiles with no GPU, and the compiler keeps what makes it fast.

Each case is a process of its own, because a process in which Triton interprets cannot compile.
"""

import re

import pytest
from compile_reports import compile_reports

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

SHARED_BYTES = 227 << 10


def compile_forward(*options):
    (report,) = compile_reports("compile_hopper_forward.py", *options)
    assert not report["serialized"], "the compiler ends each product before the next"
    assert report["shared_bytes"] <= SHARED_BYTES
    assert report["opcodes"]["UTMALDG"] > 0, "q, k and v come by TMA"
    assert report["opcodes"]["UTMASTG"] > 0, "o leaves by TMA"
    return report


@pytest.mark.parametrize(
    ("head_dim", "options", "consumers", "registers"),
    [(128, ["--causal"], 2, 168), (64, ["--causal", "--long"], 3, 128)],
    ids=["128", "64 long"],
)
def test_exponentials_lie_under_a_product_and_registers_suffice(
    head_dim, options, consumers, registers
):
    report = compile_forward("--head-dim", str(head_dim), *options)
    scores, product = head_dim // 16, 128 // 16
    first = f"{scores}xHGMMA wait<=0 64xEX2"
    loop = f"{scores + product}xHGMMA wait<=1 64xEX2 wait<=0"
    last = f"{product}xHGMMA wait<=0"
    assert report["order"] == " ".join([first, loop, last] * consumers)
    assert report["registers"] == registers, "what Triton starts each warpgroup with"
    assert report["spilled_bytes"] <= (0 if consumers == 2 else 256), report


def test_marked_tiles_are_redone_by_a_kernel_that_fits():
    report = compile_forward("--head-dim", "256", "--causal", "--window", "--redo")
    assert report["spilled_bytes"] <= 512, report  # in its exact pass
    assert re.search(r"\d+xHGMMA", report["order"])
