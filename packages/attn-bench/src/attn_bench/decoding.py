"""``attn-bench generate``: a decoding step of a whole model, by attention and by how it is run.

A step reads every weight, and every key and value of the cache, once: that is nearly all it does at
a small batch, so its figure is GB/s, and its ceiling the copy of the same run.  The weights are
random, which changes no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

from attn_bench.case import DTYPES, Case
from attn_bench.failures import failure_state, one_line
from attn_bench.results import Row
from attn_bench.timing import ROUNDS, Budget, Clock, time_interleaved, wall_milliseconds
from attn_bench.train_step import timed_row
from attn_bench.workload import Workload
from tiny_llm.cache import KVCache
from tiny_llm.config import ModelConfig
from tiny_llm.decoding import DecodingStep, resolve_mode
from tiny_llm.transformer import Transformer

SUITE = "generation"
# of the largest logit: what rounding each sum in another order may change
LOGIT_BOUND = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}


@dataclass(frozen=True)
class DecodingShape:
    """The model that decodes, and how much of it.

    Attributes:
        name: What to call the model.
        model: Its attention and its longest sequence are replaced.
        dtype: Of weights and computation.
        steps: Timed steps.
    """

    name: str
    model: ModelConfig
    dtype: str
    steps: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    def room(self) -> int:
        """Return how many tokens are decoded at most."""
        return max(self.steps, ROUNDS) + 8

    def case(self, batch: int, context: int) -> Case:
        """Return the attention of one layer at the first step."""
        model = self.model
        grouped = model.kv_heads != model.num_heads
        return Case(
            *(self.dtype, batch, model.num_heads, 1, context, model.head_dim),
            is_causal=False,
            mode="fwd",
            num_kv_heads=model.kv_heads if grouped else None,
        )


@dataclass(frozen=True)
class Decoded:
    """One way of decoding at one batch and context."""

    row: Row

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences together; None of what was not timed."""
        if self.row.median_ms is None:
            return None
        return self.row.case.batch / (self.row.median_ms * 1e-3)


def time_decoding(
    shape: DecodingShape,
    batches: Sequence[int],
    contexts: Sequence[int],
    ways: Sequence[tuple[str, str]],
    device: torch.device,
    copy_gb_s: float,
) -> list[Decoded]:
    """Time every (attention, decoding) at every batch and context, after a check of its logits."""
    clock, found = Clock(device, hides_launch=False), []
    with tqdm(total=len(batches) * len(contexts), unit="shape") as progress:
        for batch, context in product(batches, contexts):
            torch.compiler.reset()
            rows = _time_shape(shape, batch, context, ways, clock, device)
            found += [Decoded(_rated(row, shape, copy_gb_s)) for row in rows]
            progress.update()
    return found


def bytes_per_step(shape: DecodingShape, parameters: int, case: Case) -> int:
    """Return what a step must at least read: the weights and the cache, once each.

    Of an embedding that is not the head's only the tokens' own rows are read.
    """
    size = 4 if shape.dtype == "fp32" else 2
    model = shape.model
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
    cache = 2 * case.batch * case.kv_heads * case.seqlen_k * case.head_dim * model.num_layers
    return size * (parameters - looked_up + cache)


def _rated(row: Row, shape: DecodingShape, copy_gb_s: float) -> Row:
    if row.median_ms is None:
        return row
    moved = bytes_per_step(shape, int(row.semantics["parameters"]), row.case)
    rate = moved / (row.median_ms * 1e-3) / 1e9
    return replace(row, gb_s=rate, roofline_share=rate / copy_gb_s)


def _time_shape(
    shape: DecodingShape,
    batch: int,
    context: int,
    ways: Sequence[tuple[str, str]],
    clock: Clock,
    device: torch.device,
) -> list[Row]:
    torch.manual_seed(0)
    config = replace(shape.model, max_seq_len=context + shape.room(), attention="eager")
    with device:
        model = Transformer(config).to(shape.torch_dtype).eval()
    expected = _Decoding(model, shape, batch, context, "eager", "eager").first_logits()
    semantics = {
        "what": "decoding step of a model",
        "model": shape.name,
        "layers": config.num_layers,
        "parameters": model.num_parameters(),
    }
    rows: dict[str, Row] = {}
    running: dict[str, _Decoding] = {}
    for backend, mode in ways:
        name = f"{backend}, {mode}"
        row = Row(SUITE, name, shape.case(batch, context), "ok", semantics=semantics)
        row = replace(row, is_performance=device.type == "cuda")
        try:
            each = _Decoding(_with_attention(model, backend), shape, batch, context, backend, mode)
            rows[name] = _checked(row, each, expected, shape.dtype)
        except Exception as error:  # a backend may be foreign code, and its failure is a result
            rows[name] = row.failed(failure_state(error), one_line(error))
        if rows[name].state == "ok":
            running[name] = each

    def fail(name: str, error: Exception) -> None:
        rows[name] = rows[name].failed(failure_state(error), one_line(error))

    count = max(shape.steps, ROUNDS)
    workloads = {name: each.workload() for name, each in running.items()}
    timings = time_interleaved(workloads, clock, Budget(seconds=0.0, least=count, most=count), fail)
    return [timed_row(row, timings[name]) if name in timings else row for name, row in rows.items()]


def _with_attention(model: Transformer, backend: str) -> Transformer:
    """Return a model of the same weights, not copied, with another attention."""
    with torch.device("meta"):
        other = Transformer(replace(model.config, attention=backend))
    other.load_state_dict(model.state_dict(), assign=True)
    if model.config.tie_embeddings:
        other.head.weight = other.embedding.weight
    # what is computed and not loaded, the rotary tables, is on the CPU still
    return other.to(model.embedding.weight.device).eval()


def _checked(row: Row, decoding: "_Decoding", expected: Tensor, dtype: str) -> Row:
    """Return the row with its check: the logits of the first step against eager attention's."""
    logits: list[Tensor] = []
    first_ms = wall_milliseconds(
        lambda: logits.append(decoding.first_logits()), decoding.step_device
    )
    size = expected.abs().max().item()
    error = (logits[0].double() - expected.double()).abs().nan_to_num(nan=float("inf")).max().item()
    bound = LOGIT_BOUND[dtype] * size
    row = replace(
        row,
        first_call_ms=first_ms,
        checked="logits of a step against eager attention's",
        errors={"logits": error},
        bounds={"logits": bound},
    )
    if error > bound:
        return row.failed("wrong", f"logits are off by {error:.1e}, allowed {bound:.0e}")
    return row


class _Decoding:
    """A model behind `context` random tokens, and its next steps."""

    def __init__(
        self,
        model: Transformer,
        shape: DecodingShape,
        batch: int,
        context: int,
        backend: str,
        mode: str,
    ) -> None:
        weight = model.embedding.weight
        self.step_device = weight.device
        self._context = context
        if mode != "eager" or backend != "eager":
            resolve_mode(model, mode)
        self._cache = KVCache(
            model.config,
            batch,
            capacity=context + shape.room(),
            device=weight.device,
            dtype=weight.dtype,
        )
        # keys and values as a model's are: the cache's memory is zero, and zeros hide mistakes
        generator = torch.Generator(weight.device).manual_seed(2)
        self._cache.fill_normal(generator)
        self._cache.set_lengths([context] * batch)
        self._step = DecodingStep(model, self._cache, mode)
        self._tokens = torch.arange(batch, device=weight.device) % model.config.vocab_size

    def first_logits(self) -> Tensor:
        """Return the logits ``[B, vocab_size]`` of the first step, and take it back."""
        self._cache.set_lengths([self._context] * self._cache.batch_size)
        logits = self._step(self._tokens).clone()
        self._cache.set_lengths([self._context] * self._cache.batch_size)
        return logits

    def workload(self) -> Workload:
        """Return what decodes one more token."""
        return Workload(lambda: None, lambda _: self._step(self._tokens))
