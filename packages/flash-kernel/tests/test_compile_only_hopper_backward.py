"""The Hopper backward compiles with no GPU, and the compiler keeps what makes it fast.

Each case is a process of its own, because a process in which Triton interprets cannot compile.
"""

import pytest
from compile_reports import compile_reports

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

SHARED_BYTES = 227 << 10
# s^T and dp^T are in flight; the exponentials lie under dp^T; then dv, dq and dk
STEPS = {
    64: "8xHGMMA wait<=1 64xEX2 wait<=0 24xHGMMA wait<=1 wait<=0",
    128: "16xHGMMA wait<=1 32xEX2 wait<=0 16xHGMMA wait<=1 wait<=0",
}
# s and dp are in flight, of one piece or two; the exponentials lie under dp; then dq
DQ_STEPS = {
    192: "24xHGMMA wait<=2 32xEX2 wait<=0 8xHGMMA wait<=0",
    256: "32xHGMMA wait<=1 32xEX2 wait<=0 4xHGMMA wait<=0",
}
# The first block's scores; a loop of a block's product and the scores of the next, in flight
# together; the last block's product.  {0} is what lies between: exponentials, or none for dk.
DK_DV_STEPS = "16xHGMMA wait<=0{0} 20xHGMMA wait<=1 wait<=0{0} 4xHGMMA wait<=0"


def compile_backward(*options, script="compile_hopper_backward.py"):
    (report,) = compile_reports(script, *options)
    return report


@pytest.mark.parametrize(
    ("head_dim", "options", "loops"),
    [
        (64, ["--causal", "--rotated"], 2),
        (128, ["--causal"], 2),
        (128, ["--causal", "--rotated"], 2),
        (128, ["--fast"], 1),
    ],
    ids=["64 rotated", "128 causal", "128 rotated", "128 full, fast"],
)
def test_exponentials_lie_under_a_product_and_registers_suffice(head_dim, options, loops):
    report = compile_backward("--head-dim", str(head_dim), *options)
    assert not report["serialized"], "the compiler ends each product before the next"
    # a loop, masked or not, in each of two warpgroups
    assert report["order"] == " ".join([STEPS[head_dim]] * 2 * loops)
    # addresses and bounds of loops; by Triton 3.9 and at 128 columns also what marks a tile's keys
    assert report["spilled_bytes"] <= (160 if head_dim == 128 else 96), report
    assert report["registers"] == 168, "Triton starts 3 warpgroups with 168 registers each"
    assert report["shared_bytes"] <= SHARED_BYTES
    assert report["opcodes"]["UTMALDG"] > 0, "q, k, v and do come by TMA"
    assert report["opcodes"]["UTMASTG"] > 0, "dk and dv leave by TMA"
    # dq is added by the copy engine, or straight from the registers
    assert ("UTMAREDG" in report["opcodes"]) == ("--fast" not in options)
    assert report["opcodes"]["REDG"] > 0


@pytest.mark.parametrize(
    ("head_dim", "options", "steps"),
    [(256, [], 2), (256, ["--causal"], 2), (256, ["--window"], 3), (192, ["--causal"], 2)],
    ids=["256 full", "256 causal", "256 window", "192 causal"],
)
def test_exponentials_of_dq_lie_under_a_product_and_registers_suffice(head_dim, options, steps):
    report = compile_backward(
        "--kernel", "dq", "--head-dim", str(head_dim), *options, script="compile_hopper_wide.py"
    )
    assert not report["serialized"], "the compiler ends each product before the next"
    # the first block, and a loop, masked or not, in each of two warpgroups
    assert report["order"] == " ".join([DQ_STEPS[head_dim]] * 2 * steps)
    assert report["spilled_bytes"] <= 96, report  # addresses and bounds of loops
    assert report["registers"] == 168, "Triton starts 3 warpgroups with 168 registers each"
    assert report["shared_bytes"] <= SHARED_BYTES
    assert report["opcodes"]["UTMALDG"] > 0, "q, k, v and do come by TMA"
    assert report["opcodes"]["UTMASTG"] > 0, "dq leaves by TMA"


@pytest.mark.parametrize("options", [[], ["--causal", "--window"]], ids=["full", "window"])
def test_products_of_dk_and_dv_are_in_flight_together_and_registers_suffice(options):
    report = compile_backward("--kernel", "dk_dv", *options, script="compile_hopper_wide.py")
    assert not report["serialized"], "the compiler ends each product before the next"
    dv, dk = (DK_DV_STEPS.format(between) for between in (" 32xEX2", ""))
    assert report["order"] in (f"{dv} {dk}", f"{dk} {dv}")  # as the version of Triton has it
    assert report["spilled_bytes"] <= 32, report  # of the producers, outside their loops
    assert report["registers"] == 168, "Triton starts 3 warpgroups with 168 registers each"
    assert report["shared_bytes"] <= SHARED_BYTES
    assert report["opcodes"]["UTMALDG"] > 0, "k, v, q, do and the statistics come by TMA"
    assert report["opcodes"]["UTMASTG"] > 0, "dk and dv leave by TMA"


@pytest.mark.parametrize(("kernel", "head_dim"), [("dq", 128), ("dq", 192), ("dk_dv", 192)])
def test_marked_tiles_of_gradients_are_redone_by_kernels_that_fit(kernel, head_dim):
    options = ("--kernel", kernel, "--head-dim", str(head_dim), "--causal", "--redo")
    report = compile_backward(*options, script="compile_hopper_wide.py")
    assert not report["serialized"], "the compiler ends each product before the next"
    assert report["shared_bytes"] <= SHARED_BYTES
    assert report["opcodes"]["HGMMA"] > 0


def test_kernels_of_one_call_are_compiled_in_threads_and_found_at_the_launch():
    (report,) = compile_reports("compile_together.py")
    assert report["in_main_thread"] == [False, False]
    assert report["compiled_again"] == 0
