"""The training loop.

Nothing but (seed, step) decides a batch, and the model draws no random numbers.  So a run that is
stopped after any step and continued from its checkpoint sees what it would have seen anyway: on a
CPU its losses are the same bit for bit.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tiny_llm.config import TrainingConfig
from tiny_llm.data import TokenArray, TokenFile, check_long_enough, sample_batch
from tiny_llm.errors import ConfigError, TrainingError
from tiny_llm.optimizer import build_optimizer, learning_rate_at
from tiny_llm.transformer import Transformer


def train_steps(
    model: Transformer,
    tokens: TokenFile | TokenArray,
    config: TrainingConfig,
    *,
    device: str | torch.device,
    start_step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train from `start_step` to `config.steps`; returns the loss of each step, in nats per token.

    Args:
        model: Trained in place, and moved to `device`.
        tokens: A token file, or an array of ids ``[count]``.
        config: The whole run, of which this may be the rest.
        device: Where to compute.
        start_step: Number of steps already done; their batches are passed over.
        optimizer: The one that did those steps; by default a new one.
        on_step: Called with (step, loss) after each step, for progress bars and checkpoints.

    Raises:
        ConfigError: The tokens or the sequence length do not fit the model.
        TrainingError: The loss is not finite; the weights are then those before that step.
    """
    check_fits(model, tokens, config)
    model.to(device).train()
    optimizer = optimizer or build_optimizer(model, config)
    losses = []
    for step in range(start_step, config.steps):
        inputs, targets = batch_at(step, tokens, config)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        loss = next_token_loss(model, inputs.to(device), targets.to(device))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            message = f"the loss is {losses[-1]} at step {step}; lower the learning rate"
            raise TrainingError(message)
        update(model, optimizer, loss, config.grad_clip)
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


def batch_at(
    step: int, tokens: TokenFile | TokenArray, config: TrainingConfig
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets ``[batch_size, seq_len]`` of one step of the run."""
    # SeedSequence mixes the two: seed 0 at step 1 and seed 1 at step 0 have nothing in common
    (mixed,) = np.random.SeedSequence([config.seed, step]).generate_state(1)
    generator = torch.Generator().manual_seed(int(mixed))
    return sample_batch(tokens, config.batch_size, config.seq_len, generator)


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of tokens and their successors [B, T]."""
    logits = model(inputs)  # [B, T, vocab_size]
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, grad_clip: float
) -> None:
    """Take one optimizer step down the gradient, which is first cut to norm `grad_clip`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()


def check_fits(model: Transformer, tokens: TokenFile | TokenArray, config: TrainingConfig) -> None:
    """Refuse tokens or lengths that the model cannot take, before the first step.

    Raises:
        ConfigError: `seq_len` is over the model's `max_seq_len`, there are too few tokens for it,
            or the token file was made with a larger vocabulary than the model's.
    """
    check_long_enough(tokens, config.seq_len)
    limit = model.config.max_seq_len
    if config.seq_len > limit:
        message = f"`seq_len` must be at most the model's max_seq_len={limit}, got {config.seq_len}"
        raise ConfigError(message)
    if isinstance(tokens, TokenFile) and tokens.vocab_size > model.config.vocab_size:
        message = (
            f"token file {tokens.path} has a vocabulary of {tokens.vocab_size}, "
            f"the model only {model.config.vocab_size}"
        )
        raise ConfigError(message)
