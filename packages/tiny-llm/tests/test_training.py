"""The loop learns, clips, refuses what does not fit, and always sees the same batches."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from tiny_llm import attention
from tiny_llm.attention.sdpa import sdpa_attention
from tiny_llm.config import TrainingConfig
from tiny_llm.errors import ConfigError, TrainingError
from tiny_llm.loss import IGNORED, LanguageModelLoss, next_token_loss
from tiny_llm.optimizer import build_optimizer
from tiny_llm.training import Stepper, batch_at, build_scaler, train_steps
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
    config = replace(training_config, grad_clip=0.01)
    stepper = Stepper(model, optimizer, build_scaler(config, "cpu"), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper.backward(inputs, targets)
    stepper.update()
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


def gradients(model, batch, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = Stepper(model, optimizer, build_scaler(config, "cpu"), config).backward(*batch)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [2, 3, 7])
def test_accumulated_gradient_equals_that_of_the_full_batch_when_parts_have_unequal_tokens(
    model_config, random_tokens, micro_batches
):
    model = Transformer(model_config).double()
    config = TrainingConfig(batch_size=7, seq_len=20)
    inputs, targets = (each.clone() for each in batch_at(0, random_tokens, config))
    # a padded row and a half padded one: the parts differ in tokens, not only in rows
    targets[2] = IGNORED
    targets[5, :10] = IGNORED
    expected_loss, expected = gradients(model, (inputs, targets), config)
    parts = replace(config, micro_batches=micro_batches)
    loss, found = gradients(model, (inputs, targets), parts)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_activation_checkpointing_changes_neither_numbers_nor_names(
    model_config, training_config, random_tokens
):
    losses, names = [], []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = Transformer(model_config)
        config = replace(training_config, activation_checkpointing=enabled)
        losses.append(train_steps(model, random_tokens, config, device="cpu"))
        names.append(list(model.state_dict()))
    assert losses[0] == losses[1]
    assert names[0] == names[1]


def test_activation_checkpointing_computes_each_block_twice(model_config, random_tokens):
    calls = []
    model = Transformer(model_config)
    for block in model.blocks:
        block.feed_forward.register_forward_pre_hook(lambda *_: calls.append(1))
    config = TrainingConfig(batch_size=1, seq_len=8, steps=1, activation_checkpointing=True)
    train_steps(model, random_tokens, config, device="cpu")
    assert len(calls) == 2 * model_config.num_layers


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_learns_and_keeps_float32_weights(
    model_config, training_config, random_tokens, precision
):
    losses = {}
    for each in ("fp32", precision):
        torch.manual_seed(0)
        model = Transformer(model_config)
        config = replace(training_config, precision=each)
        losses[each] = train_steps(model, random_tokens, config, device="cpu")
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert losses[precision] != losses["fp32"]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.01)


def test_fp16_step_whose_gradient_overflows_is_passed_over_and_lowers_the_scale(
    model_config, training_config, random_tokens
):
    model = Transformer(model_config)
    config = replace(training_config, precision="fp16", steps=1)
    scaler = build_scaler(config, "cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**120})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_steps(model, random_tokens, config, device="cpu", scaler=scaler)
    assert scaler.get_scale() == 2.0**119
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_compiled_training_gives_the_losses_of_eager_training(
    model_config, training_config, random_tokens, monkeypatch
):
    graphs = []

    def count_graphs(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    # Dynamo traces model and loss as it does before Inductor, which would take a minute here
    monkeypatch.setattr(
        LanguageModelLoss, "compile", lambda self: nn.Module.compile(self, backend=count_graphs)
    )
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Transformer(model_config)
        config = replace(training_config, compile=compiled)
        losses.append(train_steps(model, random_tokens, config, device="cpu"))
    assert len(graphs) == 1, "one whole graph, compiled once"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_batch_without_a_row_for_each_micro_batch_is_refused(training_config):
    with pytest.raises(ConfigError, match="`micro_batches` must be at most `batch_size`, got 5"):
        replace(training_config, micro_batches=5)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_gpu_training_is_compiled_once(name, model_config, training_config, random_tokens):
    if not attention.backend(name).probe().ok:
        pytest.skip(f"{name} is not available here")
    config = replace(training_config, compile=True, precision="bf16", loss_chunk=40)
    losses = []
    for each in (replace(config, compile=False), config):
        torch.manual_seed(0)
        model = Transformer(replace(model_config, attention=name))

        def no_more(step, _loss):
            # what compiles anew after the first step raises
            if step == 0:
                torch.compiler.set_stance("fail_on_recompile")

        try:
            losses.append(train_steps(model, random_tokens, each, device="cuda", on_step=no_more))
        finally:
            torch.compiler.set_stance("default")
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("within_documents", [False, True])
def test_gpu_step_waits_for_the_gpu_only_for_its_loss(
    model_config, training_config, token_file, within_documents
):
    model = Transformer(replace(model_config, attention="sdpa")).to("cuda")
    config = replace(training_config, micro_batches=2, within_documents=within_documents)
    train_steps(model, token_file, replace(config, steps=1), device="cuda")  # makes what stays
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_steps(model, token_file, replace(config, steps=3), device="cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    assert len(waits) == 3


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
