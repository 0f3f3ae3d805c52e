"""The tiny LLM on real text: trained with two attentions, and its q, k and v captured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from attn_bench.workload import Inputs
from tiny_llm.attention import AttentionFn
from tiny_llm.batches import sample_batch
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.data import TokenFile, prepare_tokens, stdlib_sources
from tiny_llm.tokenizer import ByteTokenizer
from tiny_llm.training import train_steps
from tiny_llm.transformer import Block, Transformer

# In exact arithmetic the attentions are the same function.  Rounding makes the first losses differ
# by 5e-7 nats, which the optimizer amplifies: 1e-5 was seen within 40 steps, 1e-4 within 300.
# A gradient of q that is wrong by 1 % makes a difference of 1.5e-4 within 40 steps.
LOSS_BOUND_PER_STEP = 2e-6
TEXT_BYTES = 2_000_000


@dataclass(frozen=True)
class Plan:
    """A model and its training, small enough for this machine."""

    model: ModelConfig
    training: TrainingConfig


@dataclass(frozen=True)
class Parity:
    """Losses in nats of the same training with two attentions."""

    eager: list[float]
    flash: list[float]

    @property
    def difference(self) -> float:
        """The largest difference of the two losses over all steps; inf if one is not a number."""
        differences = [abs(a - b) for a, b in zip(self.eager, self.flash, strict=True)]
        return max((each if each == each else float("inf") for each in differences), default=0.0)

    @property
    def agrees(self) -> bool:
        """True if no step's losses differ by more than `bound`."""
        return self.difference <= self.bound

    @property
    def bound(self) -> float:
        """The difference allowed."""
        return LOSS_BOUND_PER_STEP * len(self.eager)


def make_plan(device: torch.device, steps: int) -> Plan:
    """Return a plan of seconds on two CPU cores, and a larger one for a GPU."""
    is_cuda = device.type == "cuda"
    width, seq_len = (512, 512) if is_cuda else (128, 128)
    model = ModelConfig(
        d_model=width,
        num_layers=4 if is_cuda else 2,
        num_heads=width // 64,
        d_ff=3 * width,
        max_seq_len=seq_len,
    )
    training = TrainingConfig(batch_size=16, seq_len=seq_len, steps=steps)
    return Plan(model, training)


def prepare_text(folder: Path) -> TokenFile:
    """Return the tokens of the standard library's own sources, as a file in `folder`."""
    path = folder / "stdlib.tokens"
    prepare_tokens(stdlib_sources(max_bytes=TEXT_BYTES), path, ByteTokenizer())
    return TokenFile.open(path)


def train(
    plan: Plan,
    attention: str,
    tokens: TokenFile,
    device: torch.device,
    on_step: Callable[[], object],
) -> tuple[Transformer, list[float]]:
    """Train from the plan's seed with `attention`; return the model and the loss of each step."""
    torch.manual_seed(plan.training.seed)
    model = Transformer(replace(plan.model, attention=attention)).to(device)

    def after_step(_step: int, _loss: float) -> None:
        on_step()

    losses = train_steps(model, tokens, plan.training, device=device, on_step=after_step)
    return model, losses


class _Recorder:
    """An AttentionFn that keeps the q, k and v it is called with."""

    def __init__(self, inner: AttentionFn) -> None:
        self.inner = inner
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        self.seen = (q.detach().clone(), k.detach().clone(), v.detach().clone())
        return self.inner(q, k, v, is_causal=is_causal)


def capture(model: Transformer, tokens: TokenFile, plan: Plan) -> Inputs:
    """Return the q, k, v of all layers on one batch of 2, and a random gradient of o.

    They are ``[2 * layers, H, T, D]``: the layers lie behind each other in the batch.
    """
    generator = torch.Generator().manual_seed(plan.training.seed + 1)
    batch, _ = sample_batch(tokens, 2, plan.training.seq_len, generator)
    device = next(model.parameters()).device
    attentions = [cast("Block", block).attention for block in model.blocks]
    recorders = [_Recorder(attention.attention_fn) for attention in attentions]
    for attention, recorder in zip(attentions, recorders, strict=True):
        attention.attention_fn = recorder
    with torch.no_grad():
        model(batch.to(device))
    for attention, recorder in zip(attentions, recorders, strict=True):
        attention.attention_fn = recorder.inner
    seen = [recorder.seen for recorder in recorders if recorder.seen is not None]
    return with_gradient([torch.cat(layers) for layers in zip(*seen, strict=True)])


def with_gradient(seen: Sequence[Tensor], seed: int = 2) -> Inputs:
    """Return q, k and v as leaves that require gradients, with a normal gradient of o."""
    q, k, v = (each.detach().clone().requires_grad_() for each in seen)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(q.shape, generator=generator).to(device=q.device, dtype=q.dtype)
    return Inputs(q, k, v, do)
