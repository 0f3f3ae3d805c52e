"""The training step of another program's model, timed beside tiny-llm's.

The model comes from a file that the user names, such as this one for nanoGPT:

    from model import GPT, GPTConfig  # nanoGPT's model.py, beside this file

    class LossOnly(GPT):
        def forward(self, tokens, targets):
            logits, loss = super().forward(tokens, targets)
            return loss

    def make_model(seq_len, vocab_size):
        return LossOnly(GPTConfig(block_size=seq_len, vocab_size=vocab_size, bias=False))

All around the model is the same for both: tokens, autocast, torch.compile, clipping, fused AdamW.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from attn_bench.errors import InputError
from attn_bench.step_shape import StepShape
from attn_bench.train_step import Prepare, Trained, random_tokens
from attn_bench.workload import Workload
from tiny_llm.batches import inputs_and_targets
from tiny_llm.loss import AUTOCAST
from tiny_llm.optimizer import build_optimizer

# of a sequence length and a vocabulary's size: maps tokens and targets [B, T] to their mean loss
MakeModel = Callable[[int, int], nn.Module]


def load_peers(paths: Sequence[Path], backends: Sequence[str]) -> dict[str, Prepare]:
    """Return what prepares each file's model, by the file's name.

    Raises:
        InputError: if a file is no peer, or is called like another one or like a backend.
    """
    peers: dict[str, Prepare] = {}
    for path in paths:
        name, prepare = load_peer(path)
        if name in peers or name in backends:
            msg = f"--peer {path} would share the name {name!r} in the results; rename the file."
            raise InputError(msg)
        peers[name] = prepare
    return peers


def load_peer(path: Path) -> tuple[str, Prepare]:
    """Return the name of the file, and what prepares the model that it makes.

    At its top the file can import what lies beside it.  Python keeps one module of a name: peers
    that each bring their own `model.py` need a run each.

    Raises:
        InputError: if the file cannot be read or defines no `make_model`.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        msg = f"--peer takes a file of Python code, got {path}."
        raise InputError(msg)
    module = importlib.util.module_from_spec(spec)
    with _importable(path.parent):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "make_model", None)):
        msg = f"{path} must define make_model(seq_len, vocab_size)."
        raise InputError(msg)
    return path.stem, partial(prepare_peer, make_model=module.make_model)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let imports find the modules in a folder, first of all, as Python does for a script."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed the path, and that stays
            sys.path.remove(entry)


def prepare_peer(
    shape: StepShape, seqlen: int, device: torch.device, *, make_model: MakeModel
) -> Trained:
    """Return a peer's model, ready to be trained as tiny-llm's is."""
    torch.manual_seed(0)
    model = make_model(seqlen, shape.model.vocab_size).to(device).train()
    settings, losses = shape.training(seqlen), list[float]()
    optimizer = build_optimizer(model, settings)
    dtype = AUTOCAST.get(shape.dtype)
    loss_of = torch.compile(model) if shape.is_compiled else model

    def step(tokens: Tensor | None) -> None:
        if tokens is None:
            raise TypeError("a step needs its tokens")
        inputs, targets = inputs_and_targets(tokens, device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss: Tensor = loss_of(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        losses.append(loss.item())

    return Trained(model, optimizer, Workload(random_tokens(shape, seqlen), step), losses)
