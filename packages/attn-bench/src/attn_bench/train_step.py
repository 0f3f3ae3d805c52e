"""``attn-bench train-step``: what an attention backend makes of a whole training step.

The step of the first backend and the times of the attentions alone predict the step of every other
one (Amdahl): what is not attention stays.  The difference is what the kernel's figures do not say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from attn_bench.case import DTYPES, Case
from attn_bench.failures import failure_state, one_line
from attn_bench.results import Row
from attn_bench.runner import STEADY
from attn_bench.timing import ROUNDS, Budget, Clock, Timing, time_interleaved
from attn_bench.training import LOSS_BOUND_PER_STEP
from attn_bench.workload import Workload, make_inputs, make_workload
from tiny_llm import attention
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.optimizer import build_optimizer
from tiny_llm.transformer import Transformer

SUITE = "train_step"
# nats that a loss may differ where weights and activations are rounded to 8 or 11 bits
HALF_LOSS_BOUND = 0.02


@dataclass(frozen=True)
class StepShape:
    """The model that is trained, on random tokens, and for how many timed steps."""

    d_model: int
    num_layers: int
    num_heads: int
    batch_size: int
    steps: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"model: {self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads, "
            f"batch {self.batch_size}, {self.dtype}; {self.steps} timed steps"
        )

    def config(self, seqlen: int, backend: str) -> ModelConfig:
        """Return the model's configuration."""
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=3 * self.d_model,
            max_seq_len=seqlen,
            attention=backend,
        )

    def case(self, seqlen: int) -> Case:
        """Return the attention of one layer."""
        head_dim = self.d_model // self.num_heads
        return Case(
            *(self.dtype, self.batch_size, self.num_heads, seqlen, seqlen, head_dim),
            is_causal=True,
            mode="fwd+bwd",
        )


@dataclass(frozen=True)
class Step:
    """One backend at one length: its row, the attentions' share, and the losses."""

    row: Row
    attention_ms: float
    losses: tuple[float, ...]
    loss_difference: float = 0.0


def time_training(
    shape: StepShape, seqlens: Sequence[int], backends: Sequence[str], device: torch.device
) -> list[Step]:
    """Time every backend at every length; the first one is what the others are predicted from."""
    clock = Clock(device)
    found: list[Step] = []
    with tqdm(total=len(seqlens), unit="length") as progress:
        for seqlen in seqlens:
            steps = _time_length(shape, seqlen, list(dict.fromkeys(backends)), clock, device)
            found += [predicted(step, steps[0], shape) for step in steps]
            progress.update()
    return found


def predicted(step: Step, first: Step, shape: StepShape) -> Step:
    """Return the step with its prediction, and ``wrong`` if its losses are not the first one's."""
    if first.row.median_ms is None or step.row.median_ms is None:
        return step
    rest = first.row.median_ms - shape.num_layers * first.attention_ms
    expected = rest + shape.num_layers * step.attention_ms
    differences = [abs(a - b) for a, b in zip(step.losses, first.losses, strict=True)]
    difference = max(each if each == each else float("inf") for each in differences)
    bound = LOSS_BOUND_PER_STEP * len(step.losses) if shape.dtype == "fp32" else HALF_LOSS_BOUND
    row = replace(step.row, predicted_ms=expected)
    if difference > bound:
        detail = (
            f"losses differ from {first.row.provider}'s by {difference:.1e}, allowed {bound:.0e}"
        )
        row = row.failed("wrong", detail)
    return replace(step, row=row, loss_difference=difference)


@dataclass(frozen=True)
class _Trained:
    """A model of one backend: what a step and its attention alone do, and the losses so far."""

    step: Workload
    attention: Workload
    losses: list[Tensor]


def _time_length(
    shape: StepShape, seqlen: int, backends: Sequence[str], clock: Clock, device: torch.device
) -> list[Step]:
    """Time all backends at one length, interleaved, so that a drift of the clock hits all alike."""
    failures: dict[str, Exception] = {}
    models = {name: _prepare(shape, seqlen, name, device) for name in backends}
    count = max(shape.steps, ROUNDS)
    attentions = time_interleaved(
        {name: each.attention for name, each in models.items()},
        clock,
        Budget(seconds=0.0, least=count, most=count),
        failures.__setitem__,
    )
    timings = time_interleaved(
        {name: models[name].step for name in attentions},
        clock,
        Budget(seconds=0.0, least=count, most=count),
        failures.__setitem__,
    )
    semantics = {"what": "training step", "layers": shape.num_layers, "d_model": shape.d_model}
    steps = []
    for name, each in models.items():
        is_cuda = device.type == "cuda"
        row = Row(SUITE, name, shape.case(seqlen), "ok", is_performance=is_cuda)
        row = replace(row, semantics=semantics)
        if name in failures:
            error = failures[name]
            steps.append(Step(row.failed(failure_state(error), one_line(error)), 0.0, ()))
            continue
        losses = tuple(loss.item() for loss in each.losses)
        steps.append(Step(with_times(row, timings[name]), attentions[name].median_ms, losses))
    return steps


def with_times(row: Row, timing: Timing) -> Row:
    """Return the row with its times."""
    return replace(
        row,
        state="unstable" if row.is_performance and timing.drift > STEADY else "ok",
        median_ms=timing.median_ms,
        p20_ms=timing.p20_ms,
        p80_ms=timing.p80_ms,
        repetitions=timing.repetitions,
        samples_ms=timing.samples,
    )


def _prepare(shape: StepShape, seqlen: int, backend: str, device: torch.device) -> _Trained:
    torch.manual_seed(0)
    config = shape.config(seqlen, backend)
    model = Transformer(config).to(device=device, dtype=getattr(torch, DTYPES[shape.dtype]))
    model.train()
    settings = TrainingConfig(batch_size=shape.batch_size, seq_len=seqlen, steps=shape.steps)
    optimizer = build_optimizer(model, settings)
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch_size, seqlen + 1)
    losses: list[Tensor] = []

    def step(tokens: Tensor | None) -> None:
        if tokens is None:
            raise TypeError("a step needs its tokens")
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.detach())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()

    def draw() -> Tensor:
        return torch.randint(config.vocab_size, size, generator=generator).to(device)

    case, function = shape.case(seqlen), attention.get(backend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, is_causal=True)

    alone = make_workload(case.mode, attend, make_inputs(case, device))
    return _Trained(Workload(draw, step), alone, losses)


def step_table(steps: Sequence[Step]) -> str:
    """Return a line per length and backend: measured, predicted, the difference, and the losses."""
    body = []
    for each in steps:
        row, measured = each.row, each.row.median_ms
        expected = row.predicted_ms or 0.0
        times = ["", "", ""]
        if measured is not None:
            share = measured / expected - 1 if expected > 0 else float("nan")
            times = [f"{measured:.2f}", f"{expected:.2f}", f"{share:+.1%}"]
        loss = f"{each.loss_difference:.1e}"
        cells = [str(row.case.seqlen_q), row.provider, *times, f"{each.attention_ms:.3f}", loss]
        body.append([*cells, row.detail or row.state])
    headers = [
        *("n", "attention", "step ms", "predicted ms", "difference"),
        *("attention ms per layer", "loss difference", "verdict"),
    ]
    return tabulate(body, headers, disable_numparse=True)
