"""Checkpoints: all that a run needs to go on, in one file that is whole or absent.

The file is a `torch.save` archive of numbers, strings and tensors, so that loading it runs no code,
and twelve more bytes: a mark and the CRC-32 of the archive, because `torch.load` does not notice a
flipped bit.

Weights and optimizer state are whole and under the parameters' names, however many processes they
were sharded over: so a checkpoint loads on any number of processes.  The data position is the step
(see `tiny_llm.training`).  A run draws no random numbers, but a custom attention may: the state of
torch's generators is kept too.
"""

import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW

from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import atomic_write, reason_of
from tiny_llm.optimizer import (
    NamedState,
    build_optimizer,
    load_state_by_name,
    state_by_name,
    whole,
)
from tiny_llm.seal import seal, verify_seal
from tiny_llm.training import build_scaler
from tiny_llm.transformer import Transformer

FILE_NAME = "checkpoint.pt"
FORMAT = "tiny-llm checkpoint 2"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after `step` steps.

    Attributes:
        path: Where it was read from.
        model_config: Shape of the model.
        training_config: The run it is part of.
        step: Number of steps done.
        tokens_checksum: Checksum of the token file trained on.
        model_state: Weights by name.
        optimizer_state: What `optimizer.state_by_name` gave.
        scaler_state: What the fp16 loss scaler's `state_dict` gave.
        rng_state: The state of torch's generators, by device.
        attention: The backend that ran in each layer, if that was recorded.
    """

    path: Path
    model_config: ModelConfig
    training_config: TrainingConfig
    step: int
    tokens_checksum: int
    model_state: dict[str, Any]
    optimizer_state: NamedState
    scaler_state: dict[str, Any]
    rng_state: dict[str, Tensor]
    attention: tuple[str, ...]

    def build_model(
        self, *, device: str | torch.device, attention: str | dict[str, str] | None = None
    ) -> Transformer:
        """Return the model on `device`, if asked with another attention backend than the run's.

        Raises:
            FormatError: A weight is missing, unexpected or of another shape.
        """
        config = self.model_config
        if attention is not None:
            config = replace(config, attention=attention)
        model = Transformer(config)
        try:
            model.load_state_dict(self.model_state, strict=True)
        except (RuntimeError, AttributeError, TypeError) as error:
            message = f"checkpoint {self.path} does not fit its own configuration: {error}"
            raise FormatError(message) from error
        return model.to(device)

    def build_optimizer(self, model: Transformer) -> AdamW:
        """Return the optimizer of `model`, in the state it was saved in.

        Raises:
            FormatError: The state does not belong to this model.
        """
        optimizer = build_optimizer(model, self.training_config)
        try:
            load_state_by_name(model, optimizer, self.optimizer_state)
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"checkpoint {self.path} has an optimizer state that does not fit: {error}"
            raise FormatError(message) from error
        return optimizer

    def build_scaler(self, device: torch.device) -> GradScaler:
        """Return the fp16 loss scaler in the state it was saved in."""
        scaler = build_scaler(self.training_config, device)
        if self.scaler_state and scaler.is_enabled():
            scaler.load_state_dict(self.scaler_state)
        return scaler

    def restore_rng(self) -> None:
        """Set torch's generators to where the run had left them."""
        for name, state in self.rng_state.items():
            if name == "cpu":
                torch.set_rng_state(state)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(state)


def checkpoint_path(run: str | Path) -> Path:
    """Return the checkpoint of a run folder; the path of a file is returned as it is."""
    run = Path(run)
    return run / FILE_NAME if run.is_dir() else run


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
    is_main: bool = True,
) -> None:
    """Write a checkpoint; until it is whole, the old one stays in place.

    Args:
        path: The file to write.
        model: A `Transformer`, or one inside `torch.compile` or DistributedDataParallel.
        optimizer: The optimizer that trains it.
        training_config: The run it is part of.
        step: Number of steps done.
        tokens_checksum: `TokenFile.checksum` of the tokens trained on.
        scaler: The fp16 loss scaler, if there is one.
        attention: The backend that runs in each layer.
        is_main: False only gathers this process's shards for the one that writes.

    Raises:
        FileError: The file cannot be written.
    """
    path = Path(path)
    bare = unwrapped(model)
    content = {
        "format": FORMAT,
        "model_config": asdict(bare.config),
        "training_config": asdict(training_config),
        "step": step,
        "tokens_checksum": tokens_checksum,
        "model": {name: whole(value) for name, value in bare.state_dict().items()},
        "optimizer": state_by_name(bare, optimizer),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "rng": _rng_state(),
        "attention": list(attention),
    }
    if is_main:
        _write(path, content)


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


def load_checkpoint(run: str | Path) -> Checkpoint:
    """Read and verify a checkpoint, given the file or its run folder; tensors stay on the CPU.

    Raises:
        FileError: There is none, or it cannot be read.
        FormatError: It is foreign or damaged.
    """
    path = checkpoint_path(run)
    try:
        verify_seal(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        message = f"checkpoint {path} does not exist; make it with tiny-llm train"
        raise FileError(message) from None
    except OSError as error:
        message = f"cannot read checkpoint {path}: {reason_of(error)}"
        raise FileError(message) from error
    except (RuntimeError, pickle.UnpicklingError) as error:
        message = f"checkpoint {path} holds no archive of plain tensors"
        raise FormatError(message) from error
    return _parse(path, content)


def _parse(path: Path, content: Any) -> Checkpoint:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        message = f"{path} is not a {FORMAT}; it was made by another version"
        raise FormatError(message)
    try:
        return Checkpoint(
            path=path,
            model_config=ModelConfig(**content["model_config"]),
            training_config=TrainingConfig(**content["training_config"]),
            step=content["step"],
            tokens_checksum=content["tokens_checksum"],
            model_state=content["model"],
            optimizer_state=content["optimizer"],
            scaler_state=content["scaler"],
            rng_state=content["rng"],
            attention=tuple(content["attention"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        message = f"checkpoint {path} is not complete: {error}"
        raise FormatError(message) from error
