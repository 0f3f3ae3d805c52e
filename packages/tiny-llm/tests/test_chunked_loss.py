"""The loss in chunks is the loss at once, and so are its gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from tiny_llm.chunked_loss import IGNORED, chunked_cross_entropy
from tiny_llm.config import TrainingConfig
from tiny_llm.errors import ConfigError
from tiny_llm.loss import LanguageModelLoss
from tiny_llm.training import train_steps
from tiny_llm.transformer import Transformer

TOKENS, WIDTH, VOCAB = 13, 8, 29


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[[0, 7]] = IGNORED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def dense(hidden, weight, targets):
    return cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk_tokens):
    hidden, weight, targets = inputs()
    expected = dense(hidden, weight, targets)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    # scaled, as gradient accumulation does
    found = torch.autograd.grad(loss * 0.3, (hidden, weight))
    for got, gradient in zip(
        found, torch.autograd.grad(expected * 0.3, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-12)


def test_ignored_tokens_alone_have_no_loss_and_no_gradient():
    hidden, weight, targets = inputs()
    loss = chunked_cross_entropy(hidden, weight, targets.fill_(IGNORED), chunk_tokens=4)
    assert loss == 0
    assert all(not each.any() for each in torch.autograd.grad(loss, (hidden, weight)))


def test_under_autocast_the_error_is_that_of_the_dense_loss():
    hidden, weight, targets = inputs(torch.float32)
    exact = dense(*(x.double() for x in (hidden, weight)), targets)
    true = torch.autograd.grad(exact, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = dense(hidden, weight, targets)
        loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    assert loss.dtype == torch.float32
    assert (loss - exact).abs() <= 2 * (rounded - exact).abs() + 1e-2
    usual = torch.autograd.grad(rounded, (hidden, weight))
    for got, plain, gradient in zip(
        torch.autograd.grad(loss, (hidden, weight)), usual, true, strict=True
    ):
        assert got.dtype == torch.float32
        floor = 4 * torch.finfo(torch.bfloat16).eps * gradient.abs().max()
        assert (got - gradient).abs().max() <= 2 * (plain - gradient).abs().max() + floor


def test_logits_of_all_tokens_are_never_there():
    tokens, vocab = 512, 1000
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(vocab, WIDTH, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    with Sizes():
        chunked_cross_entropy(hidden, weight, targets, chunk_tokens=64).backward()
    assert max(largest) == 64 * vocab


def test_training_in_chunks_has_the_losses_of_training_at_once(
    model_config, training_config, random_tokens
):
    losses = {}
    for chunk in (0, 17):
        torch.manual_seed(0)
        config = replace(training_config, loss_chunk=chunk, micro_batches=2)
        losses[chunk] = train_steps(Transformer(model_config), random_tokens, config, device="cpu")
    assert losses[17] == pytest.approx(losses[0], rel=1e-5)


def test_chunks_compile_into_one_graph(model_config):
    graphs = []

    def count(module, example):
        graphs.append(module)
        return module.forward

    model = Transformer(model_config)
    tokens = torch.randint(257, (2, 25))
    batch = tokens[:, :-1], tokens[:, 1:]
    loss = LanguageModelLoss(model, chunk_tokens=20)
    expected = torch.autograd.grad(loss(*batch), model.head.weight)[0]
    compiled = torch.compile(loss, fullgraph=True, backend=count)
    got = torch.autograd.grad(compiled(*batch), model.head.weight)[0]
    torch.testing.assert_close(got, expected)
    assert len(graphs) == 1


def test_half_precision_with_a_scaler_is_refused():
    with pytest.raises(ConfigError, match="`loss_chunk` is not for precision 'fp16'"):
        TrainingConfig(loss_chunk=64, precision="fp16")
