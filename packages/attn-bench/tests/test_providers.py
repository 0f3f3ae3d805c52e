import importlib.util
from dataclasses import replace

import pytest
import torch

from attn_bench.case import Case
from attn_bench.environment import pick_device
from attn_bench.errors import InputError
from attn_bench.providers import (
    DECODE_PROVIDERS,
    FLASH_PROVIDERS,
    MOCK_MAX_SEQLEN,
    Provider,
    others,
    pick_providers,
)
from attn_bench.suites import FLASH_ATTENTION
from attn_bench.workload import make_inputs
from flash_kernel.dispatch import IMPLS

CPU = torch.device("cpu")
AVAILABLE = [
    each
    for each in DECODE_PROVIDERS.values()
    if each.why_unavailable(CPU) is None and not each.compiles
]


@pytest.mark.parametrize("provider", AVAILABLE, ids=lambda each: each.name)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "window"), [(None, None), (1, None), (None, 2), (1, 2)])
def test_every_provider_has_the_mask_and_the_heads_of_the_case(
    provider: Provider,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    kv_heads: int | None,
    window: int | None,
) -> None:
    """Changing key j changes exactly the rows that see it, of every head that shares it."""
    case = Case("fp32", 1, 2, seqlen_q, seqlen_k, 16, is_causal, "fwd", kv_heads, window)
    if provider.why_unsupported(case):
        pytest.skip(str(provider.why_unsupported(case)))
    q, k, v, _ = (each.detach() for each in make_inputs(case, CPU))
    attention = provider.build(case, CPU)
    changed = seqlen_k - 2
    other = k.clone()
    other[:, :, changed] += 1.0
    difference = (attention(q, other, v) - attention(q, k, v)).abs().amax(dim=(0, 3))
    distance = changed - (seqlen_k - seqlen_q) - torch.arange(seqlen_q)
    sees = torch.ones(seqlen_q, dtype=torch.bool)
    if is_causal:
        sees &= distance <= 0
    if window is not None:
        sees &= distance.abs() <= window
    alone = torch.arange(seqlen_k) - (seqlen_k - seqlen_q) - torch.arange(seqlen_q)[:, None]
    shown = torch.ones_like(alone, dtype=torch.bool)
    if is_causal:
        shown &= alone <= 0
    if window is not None:
        shown &= alone.abs() <= window
    # the only visible key has weight 1 whatever its score
    sees &= shown.sum(-1) > 1
    assert torch.equal(difference > 1e-4, sees.expand(case.num_heads, seqlen_q))


def test_the_hopper_kernels_are_asked_for_by_name_and_refused_with_flash_kernels_reason() -> None:
    provider = FLASH_PROVIDERS["flash-hopper"]
    reason = str(provider.why_unavailable(CPU))
    if "hopper" not in IMPLS:
        assert reason == "this version of flash-kernel has no kernels for Hopper"
        return
    assert reason == "it needs a CUDA device of compute capability 9.0"
    case = Case("bf16", 1, 4, 256, 256, 64, True, "fwd")
    assert provider.why_unsupported(case) is None
    assert "float32" in str(provider.why_unsupported(replace(case, dtype="fp32")))
    x = torch.zeros(1, 1, 1, 64)
    with pytest.raises(RuntimeError, match="hopper"):
        provider.build(case, CPU)(x, x, x)


def test_what_a_provider_cannot_do_is_a_reason() -> None:
    shared = Case("bf16", 1, 4, 8, 8, 16, True, "fwd", num_kv_heads=2)
    windowed = Case("bf16", 1, 4, 8, 8, 16, True, "fwd", window=4)
    layer, mock = FLASH_PROVIDERS["layer-eager"], FLASH_PROVIDERS["flash-mock"]
    assert "as many heads of k and v" in str(layer.why_unsupported(shared))
    assert "no sliding window" in str(mock.why_unsupported(windowed))
    assert "no sliding window" in str(FLASH_PROVIDERS["sdpa-flash"].why_unsupported(windowed))
    fp32 = Case("fp32", 2, 4, 8, 8, 16, True, "fwd")
    assert FLASH_PROVIDERS["flash-attn-4"].why_unsupported(fp32) == "it takes fp16 and bf16 only"
    assert "batch of 1" in str(FLASH_PROVIDERS["flashinfer"].why_unsupported(fp32))


@pytest.mark.parametrize(
    "name", ["flash-attn-2", "flash-attn-4", "flash-attn-4-deterministic", "xformers", "flashinfer"]
)
def test_a_library_that_is_absent_or_broken_is_unavailable_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    provider = FLASH_PROVIDERS[name]
    assert str(provider.why_unavailable(CPU)).endswith("needs a CUDA device")
    others._import_or_reason.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert str(provider.why_unavailable(gpu)).endswith(" is not installed")

    def broken(_: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10\nmore")

    others._import_or_reason.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("importlib.import_module", broken)
    reason = str(provider.why_unavailable(gpu))
    assert reason.endswith("cannot be imported: undefined symbol: _ZN3c10")
    others._import_or_reason.cache_clear()


def plugins(monkeypatch: pytest.MonkeyPatch, **targets: object) -> dict[str, Provider]:
    class Point:
        def __init__(self, name: str, target: object) -> None:
            self.name, self.value, self._target = name, f"some_package:{name}", target

        def load(self) -> object:
            if isinstance(self._target, Exception):
                raise self._target
            return self._target

    points = [Point(name, target) for name, target in targets.items()]
    monkeypatch.setattr("attn_bench.providers.plugins.entry_points", lambda group: points)
    return FLASH_ATTENTION.providers


def test_an_entry_point_adds_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(FLASH_PROVIDERS["sdpa"], name="mine")
    assert plugins(monkeypatch, one=mine)["mine"] is mine
    assert plugins(monkeypatch, some=lambda: [mine])["mine"] is mine


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (ImportError("no module\nmore"), "cannot be loaded: ImportError: no module"),
        (FLASH_PROVIDERS["sdpa"], "'sdpa' has a name that is taken"),
        (lambda: 3, "is no Provider: int"),
        (lambda: [3], "must return Providers only"),
    ],
)
def test_a_bad_entry_point_is_unavailable_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, target: object, reason: str
) -> None:
    table = plugins(monkeypatch, bad=target)
    assert reason in str(table["plugin:bad"].why_unavailable(CPU))
    assert "plugin:bad" not in [each.name for each in pick_providers(table, None, CPU)]
    assert table["sdpa"] is FLASH_PROVIDERS["sdpa"]


def test_a_backend_without_masks_refuses_causal_of_different_lengths() -> None:
    reason = FLASH_PROVIDERS["sdpa-flash"].why_unsupported
    assert "top-left" in str(reason(Case("fp32", 1, 1, 5, 9, 16, True, "fwd")))
    assert reason(Case("fp32", 1, 1, 5, 9, 16, False, "fwd")) is None
    assert reason(Case("fp32", 1, 1, 9, 9, 16, True, "fwd")) is None


def test_the_mock_is_not_run_on_long_sequences() -> None:
    reason = FLASH_PROVIDERS["flash-mock"].why_unsupported
    n = MOCK_MAX_SEQLEN
    assert reason(Case("fp32", 1, 1, n, n, 16, True, "fwd")) is None
    assert "Python loop" in str(reason(Case("fp32", 1, 1, n, n + 1, 16, True, "fwd")))


def test_default_providers_are_the_available_ones_and_a_named_one_is_kept() -> None:
    names = [each.name for each in pick_providers(FLASH_PROVIDERS, None, CPU)]
    assert not {"sdpa-cudnn", "dense-compiled"} & set(names)
    assert {"dense-eager", "sdpa", "flash-auto"} <= set(names)
    assert ("flash-mock" in names) == (importlib.util.find_spec("einx") is not None)
    (named,) = pick_providers(FLASH_PROVIDERS, ["sdpa-cudnn", "sdpa-cudnn"], CPU)
    assert named.why_unavailable(CPU) == "cuDNN needs a CUDA device"


def test_an_unknown_provider_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"unknown provider 'falsh'; choose from 'dense-eager', "):
        pick_providers(FLASH_PROVIDERS, ["falsh"], CPU)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"device '{name}'"):
        pick_device(name)
