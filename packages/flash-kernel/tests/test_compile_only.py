"""The kernels compile for several GPUs, with no GPU: tensor cores used, shared memory kept to.

Each case is a process of its own, because a process in which Triton interprets cannot compile.
"""

import pytest
from compile_reports import compile_reports

pytest.importorskip("triton", reason="compiling needs Triton")

SHARED_BYTES = {
    75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
    "gfx942": 64 << 10,
}  # fmt: skip


TRAINING = ["forward_kernel", "row_statistics_kernel", "dk_dv_kernel", "dq_kernel"]
DECODING = ["append_kernel", "decode_kernel", "combine_kernel"]


def compile_kernels(*options, kernels=TRAINING):
    reports = compile_reports("compile_kernels.py", *options)
    assert [report["kernel"].removeprefix("flash_attention_") for report in reports] == kernels
    return reports


def with_products(reports):
    return [report for report in reports if "row_statistics" not in report["kernel"]]


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [(80, 64, "fp16"), (80, 256, "bf16"), (86, 128, "bf16"), (90, 64, "bf16"), (90, 128, "bf16"),
     (90, 256, "fp16"), (100, 256, "bf16")],
)  # fmt: skip
def test_half_precision_uses_tensor_cores_within_shared_memory(capability, head_dim, dtype):
    options = ("--capability", str(capability), "--head-dim", str(head_dim), "--dtype", dtype)
    for report in with_products(compile_kernels(*options, "--causal")):
        assert report["tensor_core_ops"] > 0, report
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        # a causal kernel has a second, exact pass for results that are not finite; at 256 it spills
        assert report["spilled_bytes"] <= (1024 if head_dim < 256 else 2560), report
        assert not report["serialized"], report
        if capability == 90:
            assert report["bulk_copies"] > 0, report
            assert report["opcodes"]["HGMMA"] > 0, report


def test_kernels_of_consumer_blackwell_fit_it():
    for report in with_products(compile_kernels("--capability", "120", "--head-dim", "64")):
        assert report["tensor_core_ops"] > 0, report
        assert report["bulk_copies"] > 0, report
        assert report["shared_bytes"] <= SHARED_BYTES[120], report
        assert report["spilled_bytes"] <= 1024, report


def test_kernels_of_amd_use_matrix_cores_and_fit():
    for report in with_products(compile_kernels("--hip", "gfx942", "--head-dim", "64")):
        assert report["tensor_core_ops"] > 0, report
        assert report["shared_bytes"] <= SHARED_BYTES["gfx942"], report


def test_forward_compiles_for_turing_within_its_shared_memory():
    """Triton multiplies there without tensor cores: it runs, slowly."""
    options = ("--capability", "75", "--head-dim", "16", "--dtype", "fp16", "--first")
    (forward,) = compile_kernels(*options, kernels=TRAINING[:1])
    assert forward["shared_bytes"] <= SHARED_BYTES[75], forward
    assert forward["tensor_core_ops"] == 0, "Triton knows Turing's tensor cores: say so"


def test_odd_head_dim_compiles_by_pointers_on_hopper():
    for report in with_products(
        compile_kernels("--capability", "90", "--head-dim", "40", "--dtype", "bf16", "--pointers")
    ):
        assert report["bulk_copies"] == 0
        assert report["tensor_core_ops"] > 0
        assert report["shared_bytes"] <= SHARED_BYTES[90]


@pytest.mark.parametrize(("head_dim", "is_padded"), [(80, False), (96, True)])
def test_forward_of_a_head_dim_between_is_padded_or_leaves_room_for_a_third_program(
    head_dim, is_padded
):
    options = ("--capability", "90", "--head-dim", str(head_dim), "--causal", "--first")
    (forward,) = compile_kernels(*options, kernels=TRAINING[:1])
    assert (forward["bulk_copies"] > 0) == is_padded
    assert forward["spilled_bytes"] == 0, forward
    if not is_padded:
        assert 3 * 128 * forward["registers"] <= 65536, forward
        assert 3 * (forward["shared_bytes"] + 1024) <= 228 << 10, forward


def test_all_features_at_once_compile_within_shared_memory():
    for report in with_products(
        compile_kernels("--capability", "90", "--dtype", "bf16", "--all-features")
    ):
        assert report["tensor_core_ops"] > 0
        assert report["shared_bytes"] <= SHARED_BYTES[90]
        assert report["spilled_bytes"] <= 2048, report


@pytest.mark.parametrize("capability", [80, 90])
def test_packed_sequences_compile_within_shared_memory(capability):
    options = ("--capability", str(capability), "--dtype", "bf16", "--causal", "--packed")
    for report in with_products(compile_kernels(*options)):
        assert report["tensor_core_ops"] > 0
        assert report["shared_bytes"] <= SHARED_BYTES[capability]
        assert report["spilled_bytes"] <= 1024, report
        # the end of a sequence is the end of a descriptor: no tile is read by pointers
        assert (report["bulk_copies"] > 0) == (capability == 90), report


@pytest.mark.parametrize(
    ("capability", "options"),
    [(86, ()), (90, ()), (90, ("--page-size", "16")),
     (90, ("--decode-rows", "64", "--causal", "--all-features"))],
)  # fmt: skip
def test_decoding_compiles_with_the_cache_on_its_way_in_advance(capability, options):
    of_device = ("--capability", str(capability), "--dtype", "bf16", "--decode")
    append, decode, combine = compile_kernels(*of_device, *options, kernels=DECODING)
    assert decode["tensor_core_ops"] > 0
    assert 64 << 10 <= decode["shared_bytes"] <= SHARED_BYTES[capability], decode
    assert decode["opcodes"]["LDGSTS"] > 0, decode  # asynchronous copies
    # with every feature, in the exact pass for results that are not finite
    assert decode["spilled_bytes"] <= (2048 if "--all-features" in options else 0), decode
    assert append["spilled_bytes"] == combine["spilled_bytes"] == 0


@pytest.mark.parametrize(("capability", "head_dim"), [(80, 128), (86, 256), (90, 64), (100, 64)])
def test_float32_is_three_products_of_tf32_within_registers_and_shared_memory(capability, head_dim):
    options = ("--capability", str(capability), "--head-dim", str(head_dim), "--dtype", "fp32")
    for report in with_products(compile_kernels(*options)):
        assert report["split_factors"] > 0, report
        assert report["tensor_core_ops"] % 3 == 0 < report["tensor_core_ops"], report
        # of a warp, not of a warpgroup: see SPLIT_WIDTH
        assert report["opcodes"].get("HMMA", 0) == report["tensor_core_ops"], report
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        assert report["spilled_bytes"] <= (32 if head_dim < 256 else 512), report


def test_float32_is_multiplied_without_tensor_cores_where_they_have_no_tf32():
    options = ("--capability", "75", "--head-dim", "64", "--dtype", "fp32", "--first")
    (forward,) = compile_kernels(*options, kernels=TRAINING[:1])
    assert forward["tensor_core_ops"] == forward["split_factors"] == 0, forward
    assert forward["shared_bytes"] <= SHARED_BYTES[75], forward


@pytest.mark.parametrize("capability", [86, 90])
def test_float32_decoding_is_three_products_of_tf32_as_well(capability):
    of_device = ("--capability", str(capability), "--dtype", "fp32")
    options = (*of_device, "--decode", "--decode-rows", "64", "--head-dim", "256")
    _, decode, _ = compile_kernels(*options, kernels=DECODING)
    assert decode["split_factors"] > 0, decode
    assert decode["opcodes"].get("HMMA", 0) == decode["tensor_core_ops"] > 0, decode
    assert decode["shared_bytes"] <= SHARED_BYTES[capability], decode
    assert decode["spilled_bytes"] <= 16, decode
