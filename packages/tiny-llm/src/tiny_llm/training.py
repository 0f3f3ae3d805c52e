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
from torch.amp.grad_scaler import GradScaler

from tiny_llm.batches import (
    check_long_enough,
    draw_starts,
    positions_in_documents,
    sample_batch,
)
from tiny_llm.config import TrainingConfig
from tiny_llm.data import TokenArray, Tokens
from tiny_llm.distributed import SINGLE, Parallel
from tiny_llm.errors import ConfigError, TrainingError
from tiny_llm.loss import LanguageModelLoss, checkpoint_activations, count_targets
from tiny_llm.optimizer import build_optimizer, learning_rate_at
from tiny_llm.packing import Packing
from tiny_llm.transformer import Transformer


def train_steps(
    model: Transformer,
    tokens: Tokens | TokenArray,
    config: TrainingConfig,
    *,
    device: str | torch.device,
    start_step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: Callable[[int, float], None] | None = None,
    scaler: GradScaler | None = None,
    parallel: Parallel = SINGLE,
) -> list[float]:
    """Train from `start_step` to `config.steps`; returns the loss of each step, in nats per token.

    Args:
        model: Trained in place, and moved to `device`.
        tokens: A token file, shards, or an array of ids ``[count]``.
        config: The whole run, of which this may be the rest.
        device: Where to compute.
        start_step: Number of steps already done; their batches are passed over.
        optimizer: The one that did those steps; by default a new one.
        on_step: Called with (step, loss) after each step, for progress bars and checkpoints.
        scaler: The fp16 loss scaler of those steps; by default a new one.
        parallel: The processes that train together.

    Raises:
        ConfigError: The tokens or the sequence length do not fit the model, or the batch has too
            few rows for the processes.
        TrainingError: The loss is not finite; the weights are then those before that step.
    """
    check_fits(model, tokens, config)
    check_rows(config, parallel)
    model.to(device).train()
    optimizer = optimizer or build_optimizer(model, config)
    scaler = scaler or build_scaler(config, device)
    stepper = Stepper(model, optimizer, scaler, config, parallel)
    losses = []
    for step in range(start_step, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        positions = positions_at(step, tokens, config) if config.within_documents else None
        losses.append(stepper.backward(*batch_at(step, tokens, config, device), positions))
        if not math.isfinite(losses[-1]):
            message = f"the loss is {losses[-1]} at step {step}; lower the learning rate"
            raise TrainingError(message)
        stepper.update()
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


class Stepper:
    """One step in two halves: `backward` fills the gradients, `update` uses them up."""

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        config: TrainingConfig,
        parallel: Parallel = SINGLE,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.config, self.parallel = config, parallel
        self.device = next(model.parameters()).device
        checkpoint_activations(model, enabled=config.activation_checkpointing)
        loss = LanguageModelLoss(model, config.precision, config.loss_chunk)
        if config.compile:
            loss.compile()
        self.loss = parallel.replicate(loss)

    def backward(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> float:
        """Return the mean loss of a whole batch ``[B, T]``, and leave its gradient in the model.

        The batch is where the model is, and nothing is read back from there but the loss, at the
        end: until then a GPU always has its next work before it.  With `positions`, on the CPU,
        that restart at 0 no token sees what is before its own restart.

        Each micro-batch adds the *sum* of its losses, divided by the number of targets in the
        whole batch: so every token weighs the same, however the batch is cut.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_targets = count_targets(targets)
        parts = self.config.micro_batches
        whole = (inputs, targets) if positions is None else (inputs, targets, positions)
        batches = [each.tensor_split(parts) for each in map(self.parallel.rows, whole)]
        total = torch.zeros((), device=self.device)
        for part, (ids, labels, *documents) in enumerate(zip(*batches, strict=True)):
            # on the CPU: how many documents there are must be known to both sides
            packing = [Packing.from_positions(each).to(self.device) for each in documents]
            last = part == parts - 1
            with self.parallel.accumulating(self.loss, self.model, last=last):
                loss = self.loss(ids, labels, *packing)
                # the processes' gradients are averaged, and ours are to be added
                share = loss * self.parallel.world_size / num_targets
                self.scaler.scale(share).backward()
            total += loss.detach()
        return (self.parallel.total(total) / num_targets).item()

    def update(self) -> None:
        """Cut the gradient, by now that of all processes, to its norm, and step down."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        # an fp16 gradient that overflowed is passed over, and the scale lowered
        self.scaler.step(self.optimizer)
        self.scaler.update()


def build_scaler(config: TrainingConfig, device: str | torch.device) -> GradScaler:
    """Return the loss scaler of a run; it does nothing unless the precision is fp16."""
    return GradScaler(torch.device(device).type, enabled=config.precision == "fp16")


def batch_at(
    step: int,
    tokens: Tokens | TokenArray,
    config: TrainingConfig,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets ``[batch_size, seq_len]`` of one step of the run, on a device."""
    generator = _generator_of(step, config)
    return sample_batch(tokens, config.batch_size, config.seq_len, generator, device)


def positions_at(step: int, tokens: Tokens | TokenArray, config: TrainingConfig) -> Tensor:
    """Return the inputs' positions in their documents ``[batch_size, seq_len]``, of one step.

    Raises:
        ConfigError: `tokens` is a bare array, which knows no documents.
    """
    starts = draw_starts(tokens, config.batch_size, config.seq_len, _generator_of(step, config))
    return positions_in_documents(tokens, starts, config.seq_len)


def _generator_of(step: int, config: TrainingConfig) -> torch.Generator:
    # SeedSequence mixes the two: seed 0 at step 1 and seed 1 at step 0 have nothing in common
    (mixed,) = np.random.SeedSequence([config.seed, step]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed))


def check_rows(config: TrainingConfig, parallel: Parallel) -> None:
    """Refuse a batch that leaves a process or a micro-batch without a row.

    Raises:
        ConfigError: It does, or the precision is not for this kind of parallelism.
    """
    needed = parallel.world_size * config.micro_batches
    if config.batch_size < needed:
        message = (
            f"`batch_size` must be at least processes * micro_batches = {parallel.world_size} * "
            f"{config.micro_batches}, got {config.batch_size}"
        )
        raise ConfigError(message)
    if parallel.kind == "fsdp" and config.precision == "fp16":
        raise ConfigError("precision 'fp16' is not for fsdp; choose bf16 or --parallel ddp")


def check_fits(model: Transformer, tokens: Tokens | TokenArray, config: TrainingConfig) -> None:
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
    if isinstance(tokens, np.ndarray):
        return
    if tokens.vocab_size > model.config.vocab_size:
        message = (
            f"token file {tokens.path} has a vocabulary of {tokens.vocab_size}, "
            f"the model only {model.config.vocab_size}"
        )
        raise ConfigError(message)
