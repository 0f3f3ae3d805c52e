"""Saving a checkpoint: never one half written, and never the loss of the one before."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tiny_llm.checkpoint import FORMAT
from tiny_llm.config import TrainingConfig
from tiny_llm.distributed import SINGLE, Parallel
from tiny_llm.errors import ConfigError, FileError
from tiny_llm.files import atomic_write
from tiny_llm.optimizer import state_by_name
from tiny_llm.seal import seal
from tiny_llm.sharded import MODEL, OPTIMIZER, remove_shards, save_shards, weights_of
from tiny_llm.transformer import Transformer


def save_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    training_config: TrainingConfig,
    step: int,
    tokens_checksum: int,
    scaler: GradScaler | None = None,
    attention: Sequence[str] = (),
    parallel: Parallel = SINGLE,
) -> None:
    """Write a checkpoint; until it is whole, the old one stays in place.

    Every process calls this.  The main one writes the file, and under fsdp each its shards.

    Args:
        path: The file to write.
        model: A `Transformer`, or one inside `torch.compile` or DistributedDataParallel.
        optimizer: The optimizer that trains it.
        training_config: The run it is part of.
        step: Number of steps done.
        tokens_checksum: `TokenFile.checksum` of the tokens trained on.
        scaler: The fp16 loss scaler, if there is one.
        attention: The backend that runs in each layer.
        parallel: The processes that train together.

    Raises:
        FileError: The file cannot be written; in the other processes nothing is raised then.
    """
    path = Path(path)
    bare = unwrapped(model)
    content: dict[str, Any] = {
        "format": FORMAT,
        "model_config": asdict(bare.config),
        "training_config": asdict(training_config),
        "step": step,
        "tokens_checksum": tokens_checksum,
        "scaler": scaler.state_dict() if scaler is not None else {},
        "rng": _rng_state(),
        "attention": list(attention),
    }
    if parallel.kind == "fsdp":
        content |= _in_shards(path, step, bare, optimizer, parallel)
    else:
        content["model"] = bare.state_dict()
        content["optimizer"] = state_by_name(bare, optimizer)
    if parallel.is_main:
        folder = content.get("shards")
        try:
            _write(path, content)
        except FileError:
            if folder is not None:  # no checkpoint names it
                shutil.rmtree(path.with_name(folder), ignore_errors=True)
            raise
        remove_shards(path, keep=folder)


def _in_shards(
    path: Path,
    step: int,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    parallel: Parallel,
) -> dict[str, Any]:
    """Write the tensors into a folder; return what the file says of them."""
    state: dict[str, dict[str, Tensor | None]] = {}
    tensors = {MODEL + name: value for name, value in weights_of(model)}
    for name, values in state_by_name(model, optimizer).items():
        # numbers stay in the file
        state[name] = {key: None if each.ndim else each.cpu() for key, each in values.items()}
        tensors |= {f"{OPTIMIZER}{name}.{k}": each for k, each in values.items() if each.ndim}
    folder, checksums = save_shards(path, step, tensors, parallel)
    return {"model": {}, "optimizer": state, "shards": folder, "shard_checksums": checksums}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _write(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch reports a failed write as its own confusion about it; the cause is beneath
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        seal(file)


def unwrapped(model: nn.Module) -> Transformer:
    """Return the model inside its wrappers, whose prefixes no checkpoint shall carry."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    # torch.compile's wrapper class is private, its attribute is documented
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if not isinstance(inner, Transformer):
        message = f"`model` must be a Transformer, got {type(inner).__name__}"
        raise ConfigError(message)
    return inner
