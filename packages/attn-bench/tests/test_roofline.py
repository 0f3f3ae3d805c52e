import pytest

from attn_bench.case import Case
from attn_bench.roofline import attention_flops, tflops, visible_pairs


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
    assert visible_pairs(seqlen_q, seqlen_k, is_causal=True) == pairs
    assert visible_pairs(seqlen_q, seqlen_k, is_causal=False) == seqlen_q * seqlen_k


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
    assert tflops(case, 1.0) == pytest.approx(4 * 16 * 16384**2 * 128 / 1e-3 / 1e12)
