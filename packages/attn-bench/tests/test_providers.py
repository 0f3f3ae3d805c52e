import importlib.util

import pytest
import torch

from attn_bench.case import Case
from attn_bench.environment import pick_device
from attn_bench.errors import InputError
from attn_bench.providers import FLASH_PROVIDERS, MOCK_MAX_SEQLEN, Provider, pick_providers
from attn_bench.suites import ATTENTION_LAYER
from attn_bench.workload import make_inputs

CPU = torch.device("cpu")
AVAILABLE = [
    each
    for each in (*FLASH_PROVIDERS.values(), ATTENTION_LAYER.providers["layer-eager"])
    if each.why_unavailable(CPU) is None
]


@pytest.mark.parametrize("provider", AVAILABLE, ids=lambda each: each.name)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_provider_has_the_mask_of_the_case(
    provider: Provider, seqlen_q: int, seqlen_k: int, is_causal: bool
) -> None:
    """Changing key j changes exactly the rows that see it: i >= j - (N - M) if causal, else all."""
    case = Case("fp32", 1, 2, seqlen_q, seqlen_k, 16, is_causal, "fwd")
    if provider.why_unsupported(case):
        pytest.skip(str(provider.why_unsupported(case)))
    q, k, v, _ = (each.detach() for each in make_inputs(case, CPU))
    attention = provider.build(case, CPU)
    changed = seqlen_k - 2
    other = k.clone()
    other[:, :, changed] += 1.0
    difference = (attention(q, other, v) - attention(q, k, v)).abs().amax(dim=(0, 1, 3))
    sees = torch.arange(seqlen_q) >= changed - (seqlen_k - seqlen_q) if is_causal else True
    assert torch.equal(difference > 1e-4, torch.as_tensor(sees).expand(seqlen_q))


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
    assert "sdpa-cudnn" not in names
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
