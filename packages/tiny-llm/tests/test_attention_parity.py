"""Training with any backend is training with eager: the losses agree, step by step."""

import pytest
import torch

from tiny_llm import attention
from tiny_llm.config import ModelConfig
from tiny_llm.transformer import Transformer

STEPS = 100
# nats, in float64: rounding alone makes a difference of 1e-12 within the 100 steps, a gradient of k
# that is wrong by 1 % one of 5e-5
BOUND = 1e-9


def losses_of(choice):
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        d_ff=48,
        max_seq_len=24,
        attention=choice,
    )
    model = Transformer(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    text = torch.tensor(list(b"The quick brown fox jumps over the lazy dog. " * 3))
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - 25, (4,), generator=generator)
        rows = torch.stack([text[start : start + 25] for start in starts])
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture(scope="module")
def eager_losses():
    return losses_of("eager")


@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash", "sdpa-math", "flash", "flash-mock", "auto"])
def test_losses_are_those_of_eager_within_the_bound(name, eager_losses):
    if name != "auto" and not attention.backend(name).probe().ok:
        pytest.skip(f"{name} is not available here")
    losses = losses_of(name)
    assert eager_losses[-1] < 1.5 < 5 < eager_losses[0]
    assert (losses - eager_losses).abs().max() < BOUND


def test_bound_tells_a_gradient_that_is_wrong_by_one_percent(eager_losses):
    inner = attention.get("eager")

    def slightly_wrong(q, k, v, *, is_causal):
        k = k * 0.99 + k.detach() * 0.01
        return inner(q, k, v, is_causal=is_causal)

    class SlightlyWrong(attention.AttentionBackend):
        """Takes shared heads, as the model has them."""

    attention.register("wrong", SlightlyWrong("wrong", slightly_wrong))
    try:
        losses = losses_of("wrong")
    finally:
        attention.unregister("wrong")
    assert (losses - eager_losses).abs().max() > BOUND
