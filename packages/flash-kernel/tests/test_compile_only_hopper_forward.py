"""The Hopper forward compiles with no GPU, and the compiler keeps what makes it fast.

Each case is a process of its own, because a process in which Triton interprets cannot compile.
"""

import re

import pytest
from compile_reports import compile_reports

from flash_kernel._hopper.config import forward_config, widths_of

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
    [(64, ["--causal", "--long"], 3, 128), (96, ["--causal"], 2, 168), (128, ["--causal"], 2, 168),
     (192, ["--causal"], 2, 168)],
    ids=["64 long", "96", "128", "192"],
)  # fmt: skip
def test_exponentials_lie_under_a_product_and_registers_suffice(
    head_dim, options, consumers, registers
):
    report = compile_forward("--head-dim", str(head_dim), *options)
    pieces, block_n = len(widths_of(head_dim)), forward_config(head_dim, 1024).block_n
    scores, product, exponentials = head_dim // 16, pieces * block_n // 16, block_n // 2
    first = f"{scores}xHGMMA wait<=0 {exponentials}xEX2"
    loop = f"{scores + product}xHGMMA wait<={pieces} {exponentials}xEX2 wait<=0"
    last = f"{product}xHGMMA wait<=0"
    assert report["order"] == " ".join([first, loop, last] * consumers)
    assert report["registers"] == registers, "what Triton starts each warpgroup with"
    assert report["spilled_bytes"] <= (0 if consumers == 2 else 256), report


@pytest.mark.parametrize("options", [["--softcap"], ["--packed"]])
def test_features_compile_without_spills_worth_the_name(options):
    report = compile_forward("--head-dim", "128", "--causal", *options)
    assert report["spilled_bytes"] <= 64, report


def test_marked_tiles_are_redone_by_a_kernel_that_fits():
    report = compile_forward("--head-dim", "256", "--causal", "--packed", "--redo")
    assert report["spilled_bytes"] <= 512, report  # in its exact pass
    assert re.search(r"\d+xHGMMA", report["order"])
