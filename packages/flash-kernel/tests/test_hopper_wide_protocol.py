"""The backward above 128 columns on a CPU: two kernels simulated, the small ones interpreted."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernels are written in Gluon")

from wide_simulator import simulated_dk_dv, simulated_dq

from flash_kernel._hopper import wide_launch
from flash_kernel._triton.prepared import is_interpreted
from flash_kernel.reference import dense_attention
from flash_kernel.variant import PLAIN, Variant

pytestmark = pytest.mark.skipif(
    not is_interpreted(), reason="the small kernels are interpreted, which is off here"
)


@pytest.fixture
def simulator(monkeypatch):
    monkeypatch.setattr(wide_launch, "prepare_dq", simulated_dq)
    monkeypatch.setattr(wide_launch, "prepare_dk_dv", simulated_dk_dv)
    workspace = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(wide_launch, "workspace", lambda _: workspace)


def gradients(q, k, v, do, dlse, variant, exact=None):
    """Return dq, dk and dv of the whole path, from o and lse in float64 of ``exact`` inputs."""
    leaves = [x.double().requires_grad_() for x in exact or (q, k, v)]
    o, lse = dense_attention(*leaves, variant, PLAIN)
    finite = lse.masked_fill(lse.isinf(), 0)
    expected = torch.autograd.grad((o, finite), leaves, (do.double(), dlse.double()))
    o, lse = o.detach().to(q.dtype), lse.detach().float()
    backward = wide_launch.prepare_backward(q, k, v, o, do, variant, has_dlse=True)
    return backward(q, k, v, o, lse, do, dlse)[:3], expected


def make_inputs(heads, lengths, head_dim):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, n, head_dim, dtype=torch.float16)
        for h, n in ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    )
    return q, k, v, torch.randn_like(q), torch.randn(q.shape[:3])


@pytest.mark.parametrize(
    ("head_dim", "heads", "lengths", "variant"),
    [
        (256, (2, 2), (130, 70), Variant(0.0625)),
        (192, (4, 2), (70, 130), Variant(0.07, right=0)),
        (136, (3, 1), (130, 70), Variant(0.1, right=0)),
        (200, (1, 1), (70, 200), Variant(0.1, 60, 3)),
    ],
    ids=str,
)
def test_gradients_are_right(simulator, head_dim, heads, lengths, variant):
    q, k, v, do, dlse = make_inputs(heads, lengths, head_dim)
    do = do.mT.contiguous().mT  # which the copy engine cannot read
    dlse = torch.where(torch.arange(lengths[0]) + lengths[1] < lengths[0], 0, dlse)
    results, expected = gradients(q, k, v, do, dlse, variant)
    for name, x, y in zip(("dq", "dk", "dv"), results, expected, strict=True):
        # p and ds are rounded, o was, and so is the result
        error, bound = (x.double() - y).norm(), 1e-3 * y.norm()
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_nan_reaches_those_who_see_it_and_no_other(simulator, where):
    seqlen, position, variant = 150, 100, Variant(0.08, right=0)
    names = ("q", "k", "v", "do")
    *tensors, dlse = make_inputs((2, 1), (seqlen, seqlen), 136)
    clean = dict(zip(names, tensors, strict=True))
    dirty = {name: x.clone() for name, x in clean.items()}
    dirty[where][..., position, 3] = torch.nan
    visible = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    rows = torch.arange(seqlen) == position if where in ("q", "do") else visible[:, position]
    keys = visible[rows].any(0)
    # o and lse of rows that see it are of no importance here
    got, _ = gradients(*dirty.values(), dlse, variant, exact=list(clean.values())[:3])
    expected, _ = gradients(*clean.values(), dlse, variant)
    for x, y, reached in zip(got, expected, (rows, keys, keys), strict=True):
        torch.testing.assert_close(x[:, :, ~reached], y[:, :, ~reached], rtol=2**-8, atol=2**-8)
    assert not got[0][:, :, rows].isfinite().flatten(2).all()
