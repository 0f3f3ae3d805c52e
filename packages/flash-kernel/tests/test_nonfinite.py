"""NaN and infinity go where they are seen, and nowhere else: forward, and both ways backward."""

import itertools
import math

import pytest
import torch

from flash_kernel import flash_attention
from flash_kernel.reference import hidden_pairs
from flash_kernel.variant import Modifiers, Variant

# what a row that holds or sees an infinity computes: inf - inf and overflows, as it should
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEQLEN_Q, SEQLEN_K = 20, 36
DIRTY = [2, 18]  # the second is seen by some rows of a tile and not by others
HIDERS = {
    "causal": {"is_causal": True},
    "window": {"window": (6, 2)},
    "mask": {
        "mask": torch.rand(SEQLEN_Q, SEQLEN_K, generator=torch.Generator().manual_seed(1)) > 0.4
    },
}
HIDERS["bias"] = {
    "bias": torch.zeros(SEQLEN_Q, SEQLEN_K).masked_fill(~HIDERS["mask"]["mask"], -math.inf)
}


def visible_pairs(is_causal=False, window=(None, None), mask=None, bias=None):
    left, right = window
    variant = Variant(1.0, left, 0 if is_causal else right)
    hidden = hidden_pairs(SEQLEN_Q, SEQLEN_K, variant, Modifiers(mask=mask, bias=bias))
    return ~hidden


def results(tensors, options, device):
    q, k, v, do = (x.to(device) for x in tensors.values())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in options.items()}
    o, lse = flash_attention(*leaves, impl="triton", backward="triton", return_lse=True, **options)
    named = dict(zip(("o", "lse"), (o.detach(), lse.detach()), strict=True))
    gradients = torch.autograd.grad(o, leaves, do)
    named |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {name: x.cpu() for name, x in named.items()}


# interpreted, a case takes seconds
INTERPRETED = [("causal", "v", math.nan), ("mask", "v", math.inf), ("window", "do", math.nan),
               ("bias", "k", math.nan), ("causal", "q", math.inf)]  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in INTERPRETED else pytest.mark.gpu)
    for case in itertools.product(HIDERS, ("q", "k", "v", "do"), (math.nan, math.inf))
]


@pytest.mark.parametrize(("hider", "where", "value"), CASES)
def test_what_is_not_finite_reaches_those_who_see_it_and_no_other(hider, where, value, device):
    options = HIDERS[hider]
    lengths = {"q": SEQLEN_Q, "k": SEQLEN_K, "v": SEQLEN_K, "do": SEQLEN_Q}
    clean = {name: torch.randn(1, 1, n, 16) for name, n in lengths.items()}
    dirty = {name: x.clone() for name, x in clean.items()}
    position = DIRTY if where in ("q", "do") else DIRTY[1:]
    dirty[where][..., position, 3] = value

    visible = visible_pairs(**options)
    if where in ("k", "v"):  # rows that see the key, and keys that one of those rows sees
        rows = visible[:, position].any(1)
        assert 0 < rows.sum() < SEQLEN_Q
    else:
        rows = torch.zeros(SEQLEN_Q, dtype=torch.bool).index_fill(0, torch.tensor(DIRTY), True)
    keys = visible[rows].any(0)
    untouched = {"o": ~rows, "lse": ~rows, "dq": ~rows, "dk": ~keys, "dv": ~keys}
    got, expected = results(dirty, options, device), results(clean, options, device)
    for name, index in untouched.items():
        torch.testing.assert_close(
            got[name][:, :, index], expected[name][:, :, index], rtol=1e-4, atol=1e-5, msg=name
        )
    assert not got["dq"][:, :, rows].isfinite().flatten(2).all()  # and it is not hidden
    if where == "v":
        seen = got["o"][:, :, rows]
        assert (seen[..., 3].isnan() if math.isnan(value) else seen[..., 3].isposinf()).all()
        assert seen[..., :3].isfinite().all()  # other columns of the same rows are not touched
    elif where == "k" and math.isnan(value):
        assert got["o"][:, :, rows].isnan().all()
        assert got["lse"][:, :, rows].isnan().all()


@pytest.mark.parametrize("impl", ["reference", "mock", "torch"])
def test_hidden_key_that_is_not_finite_stays_out_of_the_forward_of_dense_products(impl):
    q, k, v = (torch.randn(1, 1, 12, 16) for _ in range(3))
    expected = flash_attention(q, k, v, is_causal=True, impl=impl)
    k[..., -1, 3] = math.nan
    o = flash_attention(q, k, v, is_causal=True, impl=impl)
    torch.testing.assert_close(o[..., :-1, :], expected[..., :-1, :])
    assert o[..., -1, :].isnan().all()
