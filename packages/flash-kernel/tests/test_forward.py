"""The Triton kernels against float64: interpreted on a CPU, compiled on a GPU."""

from functools import partial

import pytest
import torch
import triton
from direct_launches import launch_forward

from flash_kernel import flash_attention
from flash_kernel._triton import launch, launch_decode
from flash_kernel._triton.config import BlockConfig, KernelConfigs, float32_precision
from flash_kernel.testing import assert_matches_reference, make_qkv
from flash_kernel.variant import Variant

TILE = 64
TRITON = partial(flash_attention, impl="triton", return_lse=True)
CONFIGS = [
    BlockConfig(block_m=16, block_n=64),
    BlockConfig(block_m=64, block_n=16),
    BlockConfig(block_m=32, block_n=32),
    BlockConfig(block_m=32, block_n=64, max_width=16),
]


def same_config(config: BlockConfig) -> KernelConfigs:
    return KernelConfigs(config, config, config)


def forward(q, k, v, *, is_causal=False, **options):
    """The kernel on ``[B, H, n, d]`` with options that the public function decides itself."""
    variant = Variant(q.shape[-1] ** -0.5, right=0 if is_causal else None)
    return launch_forward(q, k, v, variant, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(n, n) for n in (1, TILE - 1, TILE, TILE + 1, 131)] + [(1, 97), (33, 97), (97, 33), (3, 1)],
)
def test_kernel_matches_float64(seqlen_q, seqlen_k, is_causal, device):
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 64, dtype=torch.float32, device=device)
    assert_matches_reference(partial(TRITON, is_causal=is_causal), q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [1, 16, 40, 64, 80, 96, 128, 192, 256])
def test_kernel_matches_float64_at_any_head_dim(head_dim, device):
    q, k, v = make_qkv(1, 1, 40, 72, head_dim, dtype=torch.float16, device=device)
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (300, 2), "softcap": 3.0}],
    ids=["full", "causal", "window, softcap"],
)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_few_queries_have_their_keys_split(seqlen_q, options, device, monkeypatch):
    prepared = []
    prepare = launch_decode.prepare_few_queries
    monkeypatch.setattr(
        launch_decode, "prepare_few_queries", lambda *x: prepared.append(x) or prepare(*x)
    )
    q, k, v = make_qkv(2, 4, seqlen_q, 600, 40, dtype=torch.bfloat16, device=device)
    k, v = (x[:, :2].transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    dlse = torch.randn(q.shape[:-1], device=device)
    fn = partial(TRITON, **options)
    assert_matches_reference(fn, q, k, v, dlse=dlse, **{"is_causal": False} | options)
    assert prepared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernel_matches_float64_in_every_dtype(dtype, device):
    q, k, v = make_qkv(2, 2, 100, 100, 32, dtype=dtype, device=device)
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-300, 1e-40, 1.0])
def test_kernel_takes_any_scale(scale, device):
    q, k, v = make_qkv(1, 1, 40, 72, 16, dtype=torch.float32, device=device)
    fn = partial(TRITON, is_causal=True, scale=scale)
    assert_matches_reference(fn, q, k, v, is_causal=True, scale=scale)


def test_non_causal_ragged_length_does_not_attend_to_padding(device):
    """The original was off by 0.28 here: padded keys entered the softmax."""
    q, k, v = make_qkv(1, 1, 65, 65, 64, dtype=torch.float32, device=device)
    errors = assert_matches_reference(partial(TRITON, is_causal=False), q, k, v, is_causal=False)
    assert errors.o.max < 1e-5


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_kernel_takes_any_leading_dimensions(leading, device):
    q, k, v = make_qkv(6, None, 33, 33, 16, dtype=torch.float32, device=device)
    count = max(1, torch.Size(leading).numel())
    q, k, v = (x[:count].reshape(*leading, 33, 16) for x in (q, k, v))
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)


def test_lse_is_the_natural_log_of_the_sum_of_exponentials(device):
    q, k, v = make_qkv(1, 1, 5, 70, 16, dtype=torch.float32, device=device)
    _, lse = TRITON(q, k, v, scale=0.5)
    expected = torch.log(torch.exp(0.5 * q.double() @ k.double().mT).sum(-1))
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-5)


def test_row_that_sees_no_key_is_zero_with_lse_minus_infinity(device):
    q, k, v = make_qkv(1, 1, 70, 3, 16, dtype=torch.float32, device=device)
    o, lse = TRITON(q, k, v, is_causal=True)
    assert (o[..., :67, :] == 0).all()
    assert lse[..., :67].isneginf().all()
    assert lse[..., 67:].isfinite().all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_give_zeros(seqlen_q, seqlen_k, device):
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 16, dtype=torch.float32, device=device)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = TRITON(q, k, v, is_causal=True)
    o.sum().backward()
    assert o.shape == (1, 2, seqlen_q, 16)
    assert (o == 0).all()
    assert lse.isneginf().all()
    assert all((x.grad == 0).all() for x in (q, k, v))


def test_causal_row_ignores_future_keys(device):
    q, k, v = make_qkv(1, 1, 130, 130, 16, dtype=torch.float32, device=device)
    o = flash_attention(q, k, v, is_causal=True, impl="triton")
    k[..., 40:, :], v[..., 40:, :] = 1e4, -1e4
    changed = flash_attention(q, k, v, is_causal=True, impl="triton")
    assert torch.equal(o[..., :40, :], changed[..., :40, :])


def test_causal_tiles_beyond_the_diagonal_are_never_read(device):
    """Work is cut twice: the loop ends at the diagonal, and only tiles on it are masked."""
    q, k, v = make_qkv(1, 1, 128, 128, 16, dtype=torch.float32, device=device)
    configs = same_config(BlockConfig(block_m=32, block_n=32))
    o, _ = forward(q, k, v, is_causal=True, configs=configs)
    # a tile that is visited shows a NaN of its values even where their weights are zero
    v[..., 64:, :] = float("nan")
    changed, _ = forward(q, k, v, is_causal=True, configs=configs)
    assert torch.equal(o[..., :64, :], changed[..., :64, :])
    assert changed[..., 64:, :].isnan().all()


def test_nan_in_a_visible_key_is_not_hidden(device):
    q, k, v = make_qkv(1, 1, 70, 70, 16, dtype=torch.float32, device=device)
    k[..., 30, :] = float("nan")
    o = flash_attention(q, k, v, is_causal=True, impl="triton")
    assert o[..., 30:, :].isnan().all()
    assert o[..., :30, :].isfinite().all()


# the backward exponentiates hidden scores, which may overflow, before it masks them
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_large_scores_do_not_overflow_the_running_softmax(device):
    q, k, v = make_qkv(1, 1, 70, 70, 16, dtype=torch.float32, device=device)
    q, k = 100 * q, 100 * k
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_output_does_not_depend_on_block_size(config, device):
    q, k, v = make_qkv(1, 2, 70, 100, 32, dtype=torch.float32, device=device)
    fn = partial(forward, is_causal=True, configs=same_config(config))
    o, lse = fn(q, k, v)
    expected_o, expected_lse = forward(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected_o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["bnhd", "bhdn", "sliced", "expanded", "reversed_heads"])
def test_every_stride_is_honoured(layout, device):
    def lay_out(x):
        if layout == "bnhd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "bhdn":
            return x.mT.contiguous().mT
        if layout == "sliced":
            return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
        if layout == "expanded":
            return x[:, :1].expand_as(x)
        return x.flip(1)

    inputs = [lay_out(x) for x in make_qkv(2, 3, 40, 70, 32, dtype=torch.float32, device=device)]
    assert_matches_reference(partial(TRITON, is_causal=True), *inputs, is_causal=True)


@pytest.mark.parametrize("use_descriptors", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("head_dim", [24, 64, 72, 96, 160])
def test_pointers_and_descriptors_read_the_same_tiles(use_descriptors, head_dim, device):
    if use_descriptors and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("descriptors are used from compute capability 9.0 on")
    q, k, v = make_qkv(2, 2, 70, 100, head_dim, dtype=torch.float16, device=device)
    o, lse = forward(q, k, v, is_causal=True, use_descriptors=use_descriptors)
    expected_o, expected_lse = forward(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected_o, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "by_forward", "by_backward"),
    [
        (64, True, True),
        (80, False, False),
        (96, True, False),
        (128, True, True),
        (192, False, False),
    ],
)
def test_rows_are_padded_by_descriptors_or_read_in_pieces(
    head_dim, by_forward, by_backward, monkeypatch
):
    monkeypatch.setattr(launch, "is_interpreted", lambda: True)  # as good as a GPU that has them
    rows = torch.zeros(1, 1, 8, head_dim, dtype=torch.float16)
    assert launch.can_use_descriptors(rows, is_forward=True) == by_forward
    assert launch.can_use_descriptors(rows) == by_backward


def test_misaligned_tensors_are_read_by_pointers(device):
    aligned = torch.zeros(1, 1, 8, 32, dtype=torch.float16, device=device)
    assert launch.is_aligned(aligned)
    shifted = torch.zeros(1 + aligned.numel(), dtype=torch.float16, device=device)[1:]
    assert not launch.is_aligned(shifted.view(1, 1, 8, 32))
    assert not launch.is_aligned(aligned[..., :20][..., ::2])
    assert not launch.is_aligned(aligned.new_zeros(1, 1, 8, 20))
    assert not launch.is_aligned(aligned.expand(1, 3, 8, 32))


@pytest.mark.gpu
def test_short_and_long_heads_give_the_same_rows():
    """Short ones are read by pointers, which is no reason for other values."""
    q, k, v = make_qkv(1, 2, launch.SHORT_ROWS, 64, 64, dtype=torch.bfloat16, device="cuda")
    o, lse = forward(q, k, v)
    longer_o, longer_lse = forward(torch.cat([q, q], dim=2), k, v)
    assert torch.equal(o, longer_o[:, :, : launch.SHORT_ROWS])
    assert torch.equal(lse, longer_lse[:, :, : launch.SHORT_ROWS])


def test_grid_has_one_program_per_batch_head_and_query_tile(device, monkeypatch):
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **_: grids.append((arguments[-1].BLOCK_M,))

    monkeypatch.setattr(launch, "flash_attention_forward_kernel", Recorder())
    q, k, v = make_qkv(2, 3, 130, 70, 16, dtype=torch.float32, device=device)
    forward(q, k, v)
    grid, (block_m,) = grids
    assert grid == (2 * 3, triton.cdiv(130, block_m), 1)
    assert BlockConfig() == BlockConfig(block_m=64, block_n=64)


def test_forward_is_bitwise_repeatable(device):
    q, k, v = make_qkv(2, 2, 131, 131, 64, dtype=torch.float16, device=device)
    first_o, first_lse = TRITON(q, k, v, is_causal=True)
    for _ in range(50 if device == "cuda" else 2):
        o, lse = TRITON(q, k, v, is_causal=True)
        assert torch.equal(o, first_o)
        assert torch.equal(lse, first_lse)


def test_result_does_not_depend_on_batch_neighbours(device):
    q, k, v = make_qkv(3, 2, 70, 70, 32, dtype=torch.float16, device=device)
    together = TRITON(q, k, v, is_causal=True)[0]
    alone = TRITON(q[1:2], k[1:2], v[1:2], is_causal=True)[0]
    assert torch.equal(together[1:2], alone)


MATMUL = torch.backends.cuda.matmul
SWITCHES = {
    "fp32_precision": (partial(setattr, MATMUL, "fp32_precision"), "tf32", "ieee"),
    "fp32_precision of CUDA": (
        partial(setattr, torch.backends.cudnn, "fp32_precision"),
        "tf32",
        "ieee",
    ),
    "fp32_precision of all": (partial(setattr, torch.backends, "fp32_precision"), "tf32", "ieee"),
    "allow_tf32": (partial(setattr, MATMUL, "allow_tf32"), True, False),
    "matmul_precision high": (torch.set_float32_matmul_precision, "high", "highest"),
    "matmul_precision medium": (torch.set_float32_matmul_precision, "medium", "highest"),
}


@pytest.fixture
def restored_precision():
    places = (torch.backends, torch.backends.cudnn, MATMUL)
    before = [place.fp32_precision for place in places]
    yield
    torch.set_float32_matmul_precision("highest")
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.usefixtures("restored_precision")
def test_every_switch_of_torch_for_tf32_is_obeyed(switch):
    turn, on, off = SWITCHES[switch]
    assert float32_precision(torch.float32, 90) == "tf32x3"
    turn(on)
    assert float32_precision(torch.float32, 90) == "tf32"
    assert float32_precision(torch.float16, 90) == "ieee"
    turn(off)
    assert float32_precision(torch.float32, 90) == "tf32x3"


@pytest.mark.parametrize(
    ("capability", "precision"), [(0, "ieee"), (75, "ieee"), (80, "tf32x3"), (120, "tf32x3")]
)
def test_float32_is_multiplied_on_tensor_cores_where_they_have_tf32(capability, precision):
    assert float32_precision(torch.float32, capability) == precision


def test_float32_is_exact_by_default(device):
    """The original ran float32 as TF32, behind a tolerance of 1e-2."""
    q, k, v = make_qkv(1, 2, 130, 130, 64, dtype=torch.float32, device=device)
    errors = assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)
    assert errors.o.max < 5e-6  # TF32 is off by about 1e-3


@pytest.mark.gpu
def test_tf32_is_used_where_torch_allows_it():
    precision = torch.backends.cuda.matmul.fp32_precision
    q, k, v = make_qkv(1, 2, 130, 130, 64, dtype=torch.float32, device="cuda")
    exact = TRITON(q, k, v)[0]
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        rounded = TRITON(q, k, v)[0]
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
    assert 1e-5 < (exact - rounded).abs().max().item() < 1e-2


@pytest.mark.gpu
@pytest.mark.slow
def test_views_beyond_2_31_elements_are_addressed_right():
    """The original computed offsets in 32 bits."""
    heads, seqlen, head_dim = 2, 600, 64
    rows_apart = 2**31 // (seqlen // 2)  # the second half of one head lies beyond 2^31 elements
    storage = torch.zeros(rows_apart * seqlen + head_dim, dtype=torch.float16, device="cuda")
    small = make_qkv(1, heads, seqlen, seqlen, head_dim, dtype=torch.float16, device="cuda")
    wide = storage.as_strided((1, heads, seqlen, head_dim), (0, head_dim, rows_apart, 1))
    for name, contiguous in zip("qkv", small, strict=True):
        wide.copy_(contiguous)
        inputs = {x: wide if x == name else y for x, y in zip("qkv", small, strict=True)}
        o, _ = TRITON(**inputs, is_causal=True)
        assert torch.equal(o, TRITON(*small, is_causal=True)[0])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernel_runs_on_the_device_of_its_tensors():
    q, k, v = make_qkv(1, 2, 70, 70, 64, dtype=torch.float16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, v, is_causal=True)
