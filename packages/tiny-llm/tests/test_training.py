"""The loop learns, clips, refuses what does not fit, and always sees the same batches."""

import math
from dataclasses import replace

import pytest
import torch

from tiny_llm.attention.sdpa import sdpa_attention
from tiny_llm.config import TrainingConfig
from tiny_llm.errors import ConfigError, TrainingError
from tiny_llm.optimizer import build_optimizer
from tiny_llm.training import batch_at, next_token_loss, train_steps, update
from tiny_llm.transformer import Transformer


def test_one_batch_is_learned_by_heart(model_config, random_tokens):
    model = Transformer(model_config)
    config = TrainingConfig(batch_size=2, seq_len=16, steps=150, learning_rate=1e-2)
    only_window = random_tokens[:17]
    losses = train_steps(model, only_window, config, device="cpu")
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert losses[-1] < 0.02


def test_losses_are_those_of_the_batches_before_each_update(
    model_config, training_config, random_tokens
):
    model = Transformer(model_config)
    inputs, targets = batch_at(0, random_tokens, training_config)
    logits = model(inputs)
    log_probability = logits.log_softmax(-1).gather(-1, targets[..., None])
    (loss, *_) = train_steps(model, random_tokens, training_config, device="cpu")
    assert loss == pytest.approx(-log_probability.mean().item(), rel=1e-6)


def test_same_seed_gives_the_same_losses_and_another_seed_others(
    model_config, training_config, random_tokens
):
    def losses(config):
        torch.manual_seed(0)
        return train_steps(Transformer(model_config), random_tokens, config, device="cpu")

    assert losses(training_config) == losses(training_config)
    assert losses(training_config) != losses(replace(training_config, seed=1))


def test_batches_are_the_same_whatever_the_attention(model_config, training_config, random_tokens):
    batches = {}
    for name in ("eager", "sdpa"):
        model = Transformer(replace(model_config, attention=name))
        seen = batches[name] = []
        model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        train_steps(model, random_tokens, training_config, device="cpu")
    assert len(batches["eager"]) == training_config.steps
    assert all(map(torch.equal, batches["eager"], batches["sdpa"]))
    assert not torch.equal(batches["eager"][0], batches["eager"][1])


@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_training_with_another_attention_gives_the_losses_of_eager(
    name, model_config, training_config, random_tokens
):
    if name == "flash":
        pytest.importorskip("flash_kernel", reason="flash-kernel is not installed")
    losses = {}
    for backend in ("eager", name):
        torch.manual_seed(0)
        model = Transformer(replace(model_config, attention=backend))
        losses[backend] = train_steps(model, random_tokens, training_config, device="cpu")
    assert losses[name] == pytest.approx(losses["eager"], rel=1e-4)


def test_gradient_is_cut_to_the_given_norm(model_config, training_config, random_tokens):
    model = Transformer(model_config)
    inputs, targets = batch_at(0, random_tokens, training_config)
    next_token_loss(model, inputs, targets).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in whole.values()]).norm()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(model, optimizer, next_token_loss(model, inputs, targets), grad_clip=0.01)
    for name, parameter in model.named_parameters():
        step = before[name] - parameter
        torch.testing.assert_close(step, whole[name] * 0.01 / norm, rtol=1e-3, atol=1e-6)


def test_on_step_hears_every_step_and_loss(model_config, training_config, random_tokens):
    heard = []
    losses = train_steps(
        Transformer(model_config),
        random_tokens,
        training_config,
        device="cpu",
        start_step=3,
        on_step=lambda step, loss: heard.append((step, loss)),
    )
    assert heard == list(zip(range(3, 8), losses, strict=True))


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(
    model_config, training_config, random_tokens
):
    model = Transformer(model_config)
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match="loss is nan at step 0; lower the learning rate"):
        train_steps(model, random_tokens, training_config, device="cpu")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_the_model_is_refused_before_the_first_step(
    model_config, training_config, token_file
):
    too_long = replace(training_config, seq_len=25)
    with pytest.raises(ConfigError, match="at most the model's max_seq_len=24, got 25"):
        train_steps(Transformer(model_config), token_file, too_long, device="cpu")
    small = Transformer(replace(model_config, vocab_size=256))
    with pytest.raises(ConfigError, match="has a vocabulary of 257, the model only 256"):
        train_steps(small, token_file, training_config, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_training_gives_the_losses_of_the_cpu(model_config, training_config, random_tokens):
    losses = {}
    for device, name in (("cpu", "eager"), ("cuda", "eager"), ("cuda", "sdpa")):
        torch.manual_seed(0)
        model = Transformer(replace(model_config, attention=name))
        config = training_config
        losses[device, name] = train_steps(model, random_tokens, config, device=device)
    assert losses["cuda", "eager"] == pytest.approx(losses["cpu", "eager"], rel=1e-3)
    assert losses["cuda", "sdpa"] == pytest.approx(losses["cpu", "eager"], rel=1e-3)


def test_custom_attention_runs_in_every_layer_of_every_step(
    model_config, training_config, random_tokens
):
    calls = []

    def counting(q, k, v, *, is_causal):
        calls.append(is_causal)
        return sdpa_attention(q, k, v, is_causal=is_causal)

    model = Transformer(model_config)
    for block in model.blocks:
        block.attention.attention_fn = counting
    optimizer = build_optimizer(model, training_config)
    train_steps(model, random_tokens, training_config, device="cpu", optimizer=optimizer)
    assert calls == [True] * training_config.steps * model_config.num_layers
