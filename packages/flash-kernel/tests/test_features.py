"""Windows, softcap, biases, masks, ALiBi, sinks, shared heads: one meaning everywhere."""

from functools import partial

import pytest
import torch

from flash_kernel import attention_reference, flash_attention
from flash_kernel.testing import make_qkv

LENGTHS = [(33, 70), (70, 33), (1, 65)]
FEATURES = {
    "shared heads": {"heads": (4, 2)},
    "one key head": {"heads": (4, 1), "is_causal": True},
    "narrow values": {"widths": (32, 8)},
    "wide values": {"widths": (16, 40), "is_causal": True},
    "window": {"window": (20, 7)},
    "window to the left, causal": {"window": (20, None), "is_causal": True},
    "window to the right": {"window": (None, 5)},
    "window of one key": {"window": (0, 0)},
    "window beyond the sequence": {"window": (500, 500)},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "bias": {"tensors": ["bias"]},
    "mask": {"tensors": ["mask"]},
    "alibi": {"tensors": ["alibi_slopes"], "is_causal": True},
    "sinks": {"tensors": ["sinks"], "window": (16, None), "is_causal": True},
    "everything": {
        "heads": (4, 2),
        "widths": (24, 40),
        "window": (30, 3),
        "softcap": 4.0,
        "tensors": ["bias", "mask", "alibi_slopes", "sinks"],
    },
}


def draw(seqlen_q, seqlen_k, device, *, heads=(2, 2), widths=(16, 16), tensors=(), **options):
    """Return q, k, v, the options of a call, and the gradients of o and lse; all float64."""

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    (num_heads, num_heads_kv), (head_dim, head_dim_v) = heads, widths
    q = normal(2, num_heads, seqlen_q, head_dim)
    k = normal(2, num_heads_kv, seqlen_k, head_dim)
    v = normal(2, num_heads_kv, seqlen_k, head_dim_v)
    modifiers = {
        "bias": normal(num_heads, seqlen_q, seqlen_k),
        "mask": torch.rand(2, 1, seqlen_q, seqlen_k) < 0.7,
        "alibi_slopes": torch.rand(2, num_heads, dtype=torch.float64),
        "sinks": normal(num_heads),
    }
    options |= {name: modifiers[name].to(device) for name in tensors}
    do, dlse = normal(2, num_heads, seqlen_q, head_dim_v), normal(2, num_heads, seqlen_q)
    return [x.to(device) for x in (q, k, v)], options, do.to(device), dlse.to(device)


def results(fn, inputs, options, do, dlse):
    """Return o, lse and the gradients of q, k, v and sinks."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if "sinks" in options:
        options = options | {"sinks": options["sinks"].detach().requires_grad_()}
        leaves.append(options["sinks"])
    o, lse = fn(*leaves[:3], **options)
    loss = (o * do).sum() + lse.where(lse.isfinite(), 0.0).mul(dlse).sum()
    return [o, lse, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def in_float32(inputs, options, *gradients):
    def convert(x):
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    converted = {name: convert(value) for name, value in options.items()}
    return [convert(x) for x in inputs], converted, *map(convert, gradients)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("impl", "backward"), [("triton", "triton"), ("reference", "dense")])
def test_implementation_matches_float64(feature, impl, backward, device):
    fn = partial(flash_attention, return_lse=True, impl=impl, backward=backward)
    for lengths in LENGTHS:
        problem = draw(*lengths, device, **FEATURES[feature])
        expected = results(attention_reference, *problem)
        got = results(fn, *in_float32(*problem))
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("feature", [x for x in FEATURES if x not in ("softcap", "everything")])
def test_torch_attention_matches_or_refuses(feature, device):
    inputs, options, do, _ = draw(33, 70, device, **FEATURES[feature])
    fn = partial(flash_attention, impl="torch")
    if {"alibi_slopes", "sinks"} & set(options):
        with pytest.raises(ValueError, match=r"impl='torch' has no `(alibi_slopes|sinks)`"):
            fn(*inputs, **options)
        return
    leaves = [x.requires_grad_() for x in inputs]
    o, expected = fn(*leaves, **options), attention_reference(*leaves, **options)[0]
    torch.testing.assert_close(o, expected)
    gradients = (torch.autograd.grad((x * do).sum(), leaves) for x in (o, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backward", ["triton", "dense"])
def test_sink_that_is_switched_off_has_no_gradient_from_rows_that_see_nothing(backward, device):
    q, k, v = (torch.randn(1, 2, rows, 8, device=device) for rows in (5, 3, 3))  # 2 empty rows
    sinks = torch.tensor([-torch.inf, 0.5], device=device, requires_grad=True)
    o = flash_attention(q, k, v, sinks=sinks, is_causal=True, impl="triton", backward=backward)
    (dsinks,) = torch.autograd.grad(o.sum(), sinks)
    expected = attention_reference(q.double(), k.double(), v.double(), sinks=sinks, is_causal=True)
    (exact,) = torch.autograd.grad(expected[0].sum(), sinks)
    assert dsinks[0] == 0
    torch.testing.assert_close(dsinks[1], exact[1], rtol=1e-5, atol=1e-5)


def test_bias_is_learnable(device):
    inputs, options, do, _ = in_float32(*draw(20, 33, device, tensors=["bias"]))
    bias = options["bias"].requires_grad_()
    expected = torch.autograd.grad((attention_reference(*inputs, bias=bias)[0] * do).sum(), bias)
    for wish in ({"impl": "auto"}, {"impl": "triton"}, {"impl": "reference", "backward": "dense"}):
        o = flash_attention(*inputs, bias=bias, **wish)
        gradient = torch.autograd.grad((o * do).sum(), bias)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="backward='triton' has no gradient of `bias`"):
        flash_attention(*inputs, bias=bias, impl="triton", backward="triton")


def test_gradient_of_slopes_is_honoured_or_refused_never_dropped(device):
    inputs, options, do, _ = in_float32(*draw(20, 33, device, tensors=["alibi_slopes"]))
    slopes = options["alibi_slopes"].requires_grad_()
    gradient = torch.autograd.grad(
        (flash_attention(*inputs, alibi_slopes=slopes) * do).sum(), slopes
    )
    assert gradient[0].abs().max() > 0
    with pytest.raises(ValueError, match="gradient of `alibi_slopes` needs impl='reference'"):
        flash_attention(*inputs, alibi_slopes=slopes, impl="triton")


def test_bias_of_minus_infinity_hides_a_pair_as_a_mask_does(device):
    inputs, options, do, dlse = in_float32(*draw(33, 40, device, tensors=["mask"]))
    mask = options["mask"].clone()
    mask[..., 5, :] = False
    bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, float("-inf"))
    for impl in ("triton", "reference"):
        fn = partial(flash_attention, return_lse=True, impl=impl)
        by_mask = results(fn, inputs, {"mask": mask}, do, dlse)
        by_bias = results(fn, inputs, {"bias": bias}, do, dlse)
        torch.testing.assert_close(by_bias, by_mask, rtol=1e-5, atol=1e-5)


def test_window_visits_the_keys_it_says(device):
    """Row i of M sees the keys from i + N - M - left to i + N - M + right."""
    q, k = torch.zeros(1, 4, 8, device=device), torch.zeros(1, 7, 8, device=device)
    v = torch.eye(7, 8, device=device)[None]
    for impl in ("triton", "torch", "reference"):
        o = flash_attention(q, k, v, window=(2, 1), impl=impl)
        seen = [row.nonzero().flatten().tolist() for row in o[0]]
        assert seen == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6]], impl


def test_keys_outside_the_window_are_never_read(device):
    q, k, v = (torch.randn(1, 1, 256, 16, device=device) for _ in range(3))
    o = flash_attention(q, k, v, window=(10, 0), impl="triton")
    v[..., :96, :] = float("nan")  # tiles of 64 from row 192 on start at key 128
    changed = flash_attention(q, k, v, window=(10, 0), impl="triton")
    assert torch.equal(o[..., 192:, :], changed[..., 192:, :])


def test_modifiers_broadcast_by_strides(device):
    inputs, options, *_ = in_float32(*draw(20, 33, device, tensors=["bias", "mask"]))
    bias, mask = options["bias"][:1, :1], options["mask"][:1, :, :, :1] | True
    o = flash_attention(*inputs, bias=bias, mask=mask, impl="triton")
    expected = flash_attention(
        *inputs,
        bias=bias.expand(2, 2, 20, 33).contiguous(),
        mask=mask.expand(2, 2, 20, 33).contiguous(),
        impl="triton",
    )
    # not bitwise: a stride of zero compiles another kernel, which may contract products otherwise
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 5}, TypeError, r"`window` must be None or \(left, right\), got 5"),
        ({"window": (-1, 0)}, ValueError, r"None, for unbounded, or an integer .* got \(-1, 0\)"),
        ({"softcap": 0.0}, ValueError, "`softcap` must be above 0, got 0.0. Pass None for none"),
        ({"bias": torch.zeros(3, 4)}, ValueError, r"`bias` must broadcast to the scores .* \[3, 4"),
        ({"mask": torch.zeros(8, 8)}, TypeError, "`mask` must be boolean, True where"),
        ({"bias": torch.zeros(8, 8).bool()}, TypeError, "`bias` must be of a float dtype"),
        ({"sinks": torch.zeros(3)}, ValueError, r"`sinks` must have shape \[H\].* got \[3\]"),
        ({"sinks": 1.0}, TypeError, "`sinks` must be a torch.Tensor or None, got float"),
        ({"softcap": 1.0, "impl": "mock"}, ValueError, "shows the plain algorithm"),
        ({"softcap": 1.0, "impl": "torch"}, ValueError, "impl='torch' has no `softcap`"),
    ],
)
def test_bad_option_is_refused_in_one_line(options, error, message):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(error, match=message) as caught:
        flash_attention(q, q, q, **options)
    assert "\n" not in str(caught.value)


def test_key_heads_must_divide_query_heads():
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 3, 8, 16)
    with pytest.raises(ValueError, match="must divide the 4 heads of `q`, got 3"):
        flash_attention(q, k, k)


def test_sinks_of_any_stride_are_those_of_their_heads(device):
    q, k, v = make_qkv(1, 4, 9, 9, 16, dtype=torch.float32, device=device)
    numbers = torch.randn(8, device=device)
    for sinks in (numbers[::2], numbers[:1].expand(4)):
        o = flash_attention(q, k, v, sinks=sinks, impl="triton")
        torch.testing.assert_close(o, attention_reference(q, k, v, sinks=sinks.contiguous())[0])
