from dataclasses import replace

import pytest
import torch

from attn_bench.case import Case
from attn_bench.mask import visible
from attn_bench.roofline import (
    Ceilings,
    attention_bytes,
    attention_flops,
    measure_ceilings,
    tflops,
    unmasked_flops,
    visible_pairs,
)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "pairs"),
    [
        (4, 4, 1 + 2 + 3 + 4),
        (2, 5, 4 + 5),  # bottom-right: the last query sees all keys
        (5, 2, 0 + 0 + 0 + 1 + 2),  # the first queries see nothing
        (1, 7, 7),
        (7, 1, 1),
    ],
)
def test_causal_pairs_match_a_count_by_hand(seqlen_q: int, seqlen_k: int, pairs: int) -> None:
    case = Case("fp32", 1, 1, seqlen_q, seqlen_k, 8, True, "fwd")
    assert visible_pairs(case) == pairs
    assert visible_pairs(replace(case, is_causal=False)) == seqlen_q * seqlen_k


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal", "window", "pairs"),
    [
        (4, 4, True, 1, 1 + 2 + 2 + 2),
        (4, 4, False, 1, 2 + 3 + 3 + 2),
        (2, 5, True, 2, 3 + 3),
        (4, 4, True, 0, 4),
        (5, 2, False, 1, 0 + 0 + 1 + 2 + 2),
    ],
)
def test_windowed_pairs_match_a_count_by_hand_and_the_mask(
    seqlen_q: int, seqlen_k: int, is_causal: bool, window: int, pairs: int
) -> None:
    case = Case("fp32", 1, 1, seqlen_q, seqlen_k, 8, is_causal, "fwd", window=window)
    assert visible_pairs(case) == pairs
    assert visible(case).sum().item() == pairs


def test_flops_match_a_count_by_hand() -> None:
    full = Case("fp32", 2, 3, 4, 4, 8, False, "fwd")
    causal = Case("fp32", 2, 3, 2, 5, 8, True, "fwd")
    assert attention_flops(full) == 2 * 3 * (2 * 4 * 4 * 8 + 2 * 4 * 4 * 8)
    assert attention_flops(causal) == 4 * 2 * 3 * 9 * 8


@pytest.mark.parametrize(("mode", "factor"), [("fwd", 1.0), ("bwd", 2.5), ("fwd+bwd", 3.5)])
def test_backward_counts_five_matmuls_to_the_forward_two(mode: str, factor: float) -> None:
    forward = Case("fp32", 1, 1, 4, 4, 8, False, "fwd")
    assert attention_flops(Case("fp32", 1, 1, 4, 4, 8, False, mode)) == factor * 4 * 16 * 8
    assert attention_flops(forward) == 4 * 16 * 8


def test_tflops_takes_milliseconds() -> None:
    case = Case("bf16", 1, 16, 16384, 16384, 128, False, "fwd")
    assert tflops(attention_flops(case), 1.0) == pytest.approx(
        4 * 16 * 16384**2 * 128 / 1e-3 / 1e12
    )


def test_the_other_convention_counts_hidden_pairs() -> None:
    causal = Case("fp32", 2, 3, 4, 4, 8, True, "bwd", window=1)
    assert unmasked_flops(causal) == 2.5 * 4 * 2 * 3 * 16 * 8


@pytest.mark.parametrize(("mode", "queries"), [("fwd", 2), ("bwd", 4), ("fwd+bwd", 6)])
def test_bytes_match_a_count_by_hand(mode: str, queries: int) -> None:
    case = Case("bf16", 2, 8, 3, 5, 16, True, mode, num_kv_heads=2)
    q, k = 2 * 8 * 3 * 16 * 2, 2 * 2 * 5 * 16 * 2
    assert attention_bytes(case) == queries * (q + k)


def test_the_roofline_is_the_slower_of_arithmetic_and_traffic() -> None:
    ceilings = Ceilings({"bf16": 1.0}, copy_gb_s=1.0)
    long = Case("bf16", 1, 1, 4096, 4096, 64, False, "fwd")
    assert ceilings.least_milliseconds(long) == pytest.approx(4 * 4096**2 * 64 / 1e12 * 1e3)
    decode = Case("bf16", 1, 1, 1, 4096, 64, False, "fwd")
    assert ceilings.least_milliseconds(decode) == pytest.approx(2 * 2 * (1 + 4096) * 64 / 1e9 * 1e3)


def test_ceilings_are_measured_per_dtype() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), ["fp32", "fp32"])
    assert set(ceilings.matmul_tflops) == {"fp32"}
    assert 1e-4 < ceilings.matmul_tflops["fp32"] < 1e3
    assert 1e-2 < ceilings.copy_gb_s < 1e5
