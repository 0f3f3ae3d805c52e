from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.checks import LIMITS, Check, Limits, Oracle
from attn_bench.providers import FLASH_PROVIDERS, Attention, Provider
from attn_bench.runner import first_call
from attn_bench.truth import Tensors
from attn_bench.workload import Inputs, make_inputs
from flash_kernel import attention_reference

CPU = torch.device("cpu")
SLABS = Limits(work=2e10, scores=32 * 32)


def judge(case: Case, attention: Attention, limits: Limits = LIMITS["cpu"]) -> Check:
    inputs = make_inputs(case, CPU)
    oracle = Oracle(case, inputs, limits)
    return oracle.check(
        first_call(attention, inputs)[0], lambda _, other: first_call(attention, other)[0]
    )


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, is_causal=True)[0]


def forgets_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, is_causal=False)[0]


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, is_causal=True, scale=0.26)[0]


def detached_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k.detach() + 0 * k, v, is_causal=True)[0]


def nan_in_the_last_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = causal(q, k, v)
    hole = torch.zeros_like(o)
    hole[..., -1, :] = float("nan")
    return o + hole


def one_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k, v)[..., :1].expand_as(q)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_dense_reference_is_right_in_every_dtype(dtype: str) -> None:
    check = judge(Case(dtype, 2, 2, 17, 23, 16, True, "fwd"), causal)
    assert check.is_right, check.violations
    assert set(check.errors) == {"o", "dq", "dk", "dv"}
    assert check.scope == "all heads"


@pytest.mark.parametrize("limits", [LIMITS["cpu"], SLABS], ids=["whole", "slabs"])
@pytest.mark.parametrize(
    ("attention", "names"),
    [
        (forgets_the_mask, ("o", "dq", "dk", "dv")),
        (scaled, ("o", "dq", "dk", "dv")),
        (detached_keys, ("dk",)),
        (nan_in_the_last_row, ("o",)),
        (one_column, ("o",)),
    ],
)
def test_a_wrong_result_is_found(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], names: tuple[str, ...], limits: Limits
) -> None:
    check = judge(Case("fp32", 1, 2, 40, 40, 16, True, "fwd"), attention, limits)
    assert not check.is_right
    found = " ".join(check.violations)
    assert all(f"`{name}`" in found for name in names)
    assert all(check.errors[name] > check.bounds[name] for name in names)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (150, 300), (300, 150)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_slabs_of_rows_say_the_same_as_the_whole(
    seqlen_q: int, seqlen_k: int, is_causal: bool
) -> None:
    attention = causal if is_causal else forgets_the_mask
    case = Case("fp32", 1, 2, seqlen_q, seqlen_k, 16, is_causal, "fwd")
    check = judge(case, attention, SLABS)
    assert check.is_right, check.violations
    assert check.scope == "o and dq in 3 x 64 rows of 1 of 2 heads, everything at n = 32 x 32"


def test_some_heads_stand_for_all_where_float64_is_slow() -> None:
    case = Case("fp32", 2, 4, 16, 16, 16, True, "fwd")
    check = judge(case, causal, Limits(work=3 * 14 * 16 * 16 * 16, scores=256))
    assert check.is_right
    assert check.scope == "3 of 8 heads"


def test_some_heads_stand_for_all_where_a_cache_does_not_fit_in_float64() -> None:
    case = Case("fp32", 4, 4, 1, 100, 16, False, "fwd", num_kv_heads=2)
    inputs = make_inputs(case, CPU)
    tensors = first_call(FLASH_PROVIDERS["sdpa"].build(case, CPU), inputs)[0]
    check = Oracle(case, inputs, replace(LIMITS["cpu"], entries=3 * 100 * 16)).check(tensors)
    assert check.is_right
    assert check.scope == "3 of 8 heads"


def summed_in_order(inputs: Inputs, drift: float) -> Tensor:
    """Return attention that adds one key after the other, its float32 sums drifting by `drift`."""
    q, k, v = (each.detach() for each in inputs[:3])
    p = torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, dim=-1).float()
    acc = torch.zeros_like(q)
    for key in range(k.shape[-2]):
        acc = (acc * (1 + drift)).addcmul(p[..., key : key + 1], v[..., key : key + 1, :])
    return acc


def test_slabs_leave_room_for_sums_in_order_but_not_for_a_drift_of_them() -> None:
    case = Case("fp32", 1, 1, 64, 65_536, 16, False, "fwd")
    inputs = make_inputs(case, CPU)
    oracle = Oracle(case, inputs, SLABS)
    right = oracle.check(Tensors(summed_in_order(inputs, 0.0), None, None, None))
    assert right.is_right, right.violations
    assert right.scope == "o and dq in 1 x 64 rows of 1 of 1 heads"
    # a 1 that comes out as 1 + 2^-20 at each of 65536 keys
    assert not oracle.check(Tensors(summed_in_order(inputs, 2**-20), None, None, None)).is_right


@pytest.mark.parametrize("limits", [LIMITS["cpu"], SLABS], ids=["whole", "slabs"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (True, 5), (False, 5)])
def test_shared_heads_and_windows_are_checked_like_the_rest(
    dtype: str, is_causal: bool, window: int | None, limits: Limits
) -> None:
    case = Case(dtype, 2, 4, 150, 200, 16, is_causal, "fwd", num_kv_heads=2, window=window)
    for name in ("dense-eager", "sdpa"):
        provider = FLASH_PROVIDERS[name]
        check = judge_in_case(case, provider, limits)
        assert check.is_right, check.violations
        assert set(check.errors) == {"o", "dq", "dk", "dv"}


@pytest.mark.parametrize("limits", [LIMITS["cpu"], SLABS], ids=["whole", "slabs"])
def test_a_window_that_is_off_by_one_is_found(limits: Limits) -> None:
    case = Case("fp32", 1, 4, 80, 80, 16, True, "fwd", num_kv_heads=2, window=5)
    wrong = FLASH_PROVIDERS["sdpa"].build(replace(case, window=6), CPU)
    inputs = make_inputs(case, CPU)
    check = Oracle(case, inputs, limits).check(
        first_call(wrong, inputs)[0], lambda _, other: first_call(other_window(_), other)[0]
    )
    assert "`o`" in " ".join(check.violations)


def other_window(case: Case) -> Attention:
    return FLASH_PROVIDERS["sdpa"].build(replace(case, window=6), CPU)


def test_heads_shared_the_wrong_way_are_found() -> None:
    case = Case("fp32", 1, 4, 20, 20, 16, True, "fwd", num_kv_heads=2)

    def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
        return attention_reference(q, k, v, is_causal=True)[0]

    check = judge(case, interleaved)
    assert all(f"`{name}`" in " ".join(check.violations) for name in ("o", "dq", "dk", "dv"))


def judge_in_case(case: Case, provider: Provider, limits: Limits) -> Check:
    inputs = make_inputs(case, CPU)
    return Oracle(case, inputs, limits).check(
        first_call(provider.build(case, CPU), inputs)[0],
        lambda short, other: first_call(provider.build(short, CPU), other)[0],
    )
