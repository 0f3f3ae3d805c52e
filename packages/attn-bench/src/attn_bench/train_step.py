"""``attn-bench train-step``: what an attention backend makes of a whole training step.

The step is tiny-llm's own: autocast, the loss in chunks if asked for, clipping, fused AdamW.  The
step of the first backend and the times of the attentions alone predict the step of every other one
(Amdahl): what is not attention stays.  The difference is what the kernel's figures do not say.
Another program's model can be timed in the same run, see `attn_bench.peer_step`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from attn_bench.case import DTYPES
from attn_bench.failures import failure_state, one_line
from attn_bench.results import Row
from attn_bench.stability import with_stability, with_times
from attn_bench.step_shape import StepShape
from attn_bench.timing import (
    MIB,
    ROUNDS,
    Budget,
    Clock,
    Timing,
    time_interleaved,
    wall_milliseconds,
)
from attn_bench.training import LOSS_BOUND_PER_STEP
from attn_bench.workload import Workload, make_inputs, make_workload
from tiny_llm import attention
from tiny_llm.batches import inputs_and_targets
from tiny_llm.optimizer import build_optimizer
from tiny_llm.throughput import device_peak, flops_per_token
from tiny_llm.training import Stepper, build_scaler
from tiny_llm.transformer import Transformer

SUITE = "train_step"
# nats that a loss may differ where activations are rounded to 8 or 11 bits
HALF_LOSS_BOUND = 0.02


@dataclass(frozen=True)
class Step:
    """One backend at one length: its row, the attentions' share, and the losses.

    Attributes:
        attention_ms: Of one layer's attention alone; None of a peer, whose attention is not ours.
        mfu: Share of the device's peak, by tiny-llm's convention; None if the peak is not known.
    """

    row: Row
    attention_ms: float | None
    losses: tuple[float, ...]
    mfu: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on in a second, None of a step that was not timed."""
        if self.row.median_ms is None:
            return None
        return self.row.case.batch * self.row.case.seqlen_q / (self.row.median_ms * 1e-3)


@dataclass(frozen=True)
class Trained:
    """A model in training: its step, its attention alone if known, and the losses so far."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Workload
    losses: list[float]
    attention: Workload | None = None


# makes the model of a shape and a sequence length ready to be trained on a device
Prepare = Callable[[StepShape, int, torch.device], Trained]


def time_training(
    shape: StepShape,
    seqlens: Sequence[int],
    backends: Sequence[str],
    device: torch.device,
    peers: Mapping[str, Prepare] | None = None,
) -> list[Step]:
    """Time every backend and peer at every length; the first backend predicts the others.

    Raises:
        UnknownAttentionError, MissingExtraError: There is no such backend, or not here.
    """
    for name in backends:
        attention.get(name)  # a name that is not known is a mistake and no row
    clock = Clock(device, hides_launch=False)
    found: list[Step] = []
    prepares = {name: partial(_prepare, backend=name) for name in backends} | dict(peers or {})
    with tqdm(total=len(seqlens), unit="length") as progress:
        for seqlen in seqlens:
            # the compiled code of one length is no use to the next, and counts against a limit
            torch.compiler.reset()
            steps = _time_length(shape, seqlen, prepares, clock, device)
            found += [predicted(step, steps[0], shape) for step in steps]
            if device.type == "cuda":
                torch.cuda.empty_cache()
            progress.update()
    return found


def predicted(step: Step, first: Step, shape: StepShape) -> Step:
    """Return the step with its prediction, and ``wrong`` if its losses are not the first one's."""
    if first.row.median_ms is None or step.row.median_ms is None:
        return step
    if first.attention_ms is None or step.attention_ms is None:
        return step
    layers = shape.model.num_layers
    rest = first.row.median_ms - layers * first.attention_ms
    expected = rest + layers * step.attention_ms
    differences = [abs(a - b) for a, b in zip(step.losses, first.losses, strict=True)]
    difference = max(each if each == each else float("inf") for each in differences)
    bound = LOSS_BOUND_PER_STEP * len(step.losses) if shape.dtype == "fp32" else HALF_LOSS_BOUND
    row = replace(
        step.row, predicted_ms=expected, errors={"loss": difference}, bounds={"loss": bound}
    )
    row = replace(row, checked=f"the losses of every step against {first.row.provider}'s")
    if difference > bound:
        detail = (
            f"losses differ from {first.row.provider}'s by {difference:.1e}, allowed {bound:.0e}"
        )
        row = row.failed("wrong", detail)
    return replace(step, row=row)


def _time_length(
    shape: StepShape,
    seqlen: int,
    prepares: Mapping[str, Prepare],
    clock: Clock,
    device: torch.device,
) -> list[Step]:
    """Time all backends at one length, interleaved, so that a drift of the clock hits all alike."""
    # the exception itself would keep alive what its frames hold: all that the others need
    failures: dict[str, tuple[str, str]] = {}

    def fail(name: str, error: Exception) -> None:
        failures[name] = failure_state(error), one_line(error)

    models: dict[str, Trained] = {}
    for name, prepare in prepares.items():
        try:
            models[name] = prepare(shape, seqlen, device)
        except Exception as error:  # a peer is foreign code, and its failure is a result
            fail(name, error)
    first_ms = {name: _warm_up(name, each, device, fail) for name, each in models.items()}
    count = max(shape.steps, ROUNDS)
    budget = Budget(seconds=0.0, least=count, most=count)

    def timed(workloads: dict[str, Workload]) -> dict[str, Timing]:
        working = {name: each for name, each in workloads.items() if name not in failures}
        return time_interleaved(working, clock, budget, fail)

    attentions = timed({name: each.attention for name, each in models.items() if each.attention})
    # what compiles anew while it is timed is no training step
    with torch.compiler.set_stance("fail_on_recompile" if shape.is_compiled else "default"):
        timings = timed({name: each.step for name, each in models.items()})
    steps = []
    for name in prepares:
        row = Row(SUITE, name, shape.case(seqlen), "ok", is_performance=device.type == "cuda")
        each = models.get(name)
        if each:
            row = replace(row, semantics=_semantics(shape, each), first_call_ms=first_ms[name])
        if each and name not in failures:
            try:
                row = replace(timed_row(row, timings[name]), peak_mib=_peak_mib(each, device))
            except Exception as error:
                fail(name, error)
        if not each or name in failures:
            steps.append(Step(row.failed(*failures[name]), None, ()))
            continue
        attention_ms = attentions[name].median_ms if name in attentions else None
        step = Step(row, attention_ms, tuple(each.losses))
        steps.append(replace(step, mfu=_mfu(step, shape, each, device)))
    return steps


def _warm_up(
    name: str, trained: Trained, device: torch.device, fail: Callable[[str, Exception], None]
) -> float | None:
    """Take two steps; return the wall time of the first in ms, with compiling, None if one failed.

    The second sees what the first has made, such as the optimizer's state, and may compile anew.
    """
    step = trained.step
    try:
        first_ms = wall_milliseconds(partial(step.run, step.prepare()), device)
        step.run(step.prepare())
    except Exception as error:  # a backend may be foreign code, and its failure is a result
        fail(name, error)
        return None
    return first_ms


def timed_row(row: Row, timing: Timing) -> Row:
    """Return the row with its times, ``unstable`` if they drifted; no gauge is read meanwhile."""
    return with_times(with_stability(row, timing.drift, None), timing)


def _semantics(shape: StepShape, trained: Trained) -> dict[str, str | int | bool]:
    return {
        "what": "training step; peak_mib is all it holds, weights and optimizer too",
        "model": shape.name if trained.attention else "a peer's",
        "layers": shape.model.num_layers,
        "d_model": shape.model.d_model,
        "vocabulary": shape.model.vocab_size,
        "parameters": sum(each.numel() for each in trained.model.parameters()),
        "compiled": shape.is_compiled,
        "loss_chunk": shape.loss_chunk if trained.attention else 0,
    }


def _peak_mib(trained: Trained, device: torch.device) -> float | None:
    """Return the most memory that one step holds, with weights and optimizer; None on a CPU.

    What the other models hold meanwhile is left out.
    """
    if device.type != "cuda":
        return None
    model, optimizer = trained.model, trained.optimizer
    optimizer.zero_grad(set_to_none=True)
    state = [value for each in optimizer.state.values() for value in each.values()]
    own: int = sum(each.nbytes for each in [*model.parameters(), *state] if each.is_cuda)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trained.step.run(trained.step.prepare())
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before + own
    optimizer.zero_grad(set_to_none=True)
    return peak / MIB


def _mfu(step: Step, shape: StepShape, trained: Trained, device: torch.device) -> float | None:
    peak, rate = device_peak(device, shape.dtype), step.tokens_per_second
    model = trained.model
    if peak is None or rate is None or not isinstance(model, Transformer):
        return None
    return (
        rate * flops_per_token(model.config, model.num_parameters(), step.row.case.seqlen_q) / peak
    )


def _prepare(shape: StepShape, seqlen: int, device: torch.device, *, backend: str) -> Trained:
    torch.manual_seed(0)
    config, settings = shape.config(seqlen, backend), shape.training(seqlen)
    with device:  # drawing a large model's weights on a CPU takes longer than timing it
        model = Transformer(config).train()
    dtype: torch.dtype = getattr(torch, DTYPES[shape.dtype])
    model.resolve_attention(device=device, dtype=dtype, seq_len=seqlen, needs_grad=True)
    optimizer = build_optimizer(model, settings)
    stepper = Stepper(model, optimizer, build_scaler(settings, device), settings)
    losses: list[float] = []

    def step(tokens: Tensor | None) -> None:
        if tokens is None:
            raise TypeError("a step needs its tokens")
        losses.append(stepper.backward(*inputs_and_targets(tokens, device)))
        stepper.update()

    case, function = shape.case(seqlen), attention.get(backend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, is_causal=True)

    alone = make_workload(case.mode, attend, make_inputs(case, device))
    workload = Workload(random_tokens(shape, seqlen), step)
    return Trained(model, optimizer, workload, losses, alone)


def random_tokens(shape: StepShape, seqlen: int) -> Callable[[], Tensor]:
    """Return what draws the tokens of the next step ``[batch, seqlen + 1]``, the same for all."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch(seqlen), seqlen + 1)

    def draw() -> Tensor:
        return torch.randint(shape.model.vocab_size, size, generator=generator)

    return draw
