"""Checkpoints: all that a run needs to go on, whole or absent.

A checkpoint is a file: a `torch.save` archive of numbers, strings and tensors, so that loading it
runs no code, and twelve more bytes, a mark and the CRC-32 of the archive, because `torch.load` does
not notice a flipped bit.  It appears, in the place of the one before, once all of it is written.

Of a model that is sharded over processes (fsdp) the file holds everything but the tensors.  It
names the folder beside it that has them, written before it and with checksums of its own (see
`tiny_llm.sharded`).  Either kind loads on any number of processes, sharded or not.

Weights and optimizer state are under the parameters' names.  The data position is the step (see
`tiny_llm.training`).  A run draws no random numbers, but a custom attention may: the state of
torch's generators is kept too.
"""

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW

from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.distributed import SINGLE, Parallel
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import reason_of
from tiny_llm.optimizer import (
    NamedState,
    build_optimizer,
    load_state_by_name,
)
from tiny_llm.seal import verify_seal
from tiny_llm.sharded import (
    MODEL,
    OPTIMIZER,
    Checksums,
    load_shards,
    verify_shards,
    weights_of,
)
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
        model_state: Weights by name, or none if they are in `shards`.
        optimizer_state: What `optimizer.state_by_name` gave, with None for what is in `shards`.
        scaler_state: What the fp16 loss scaler's `state_dict` gave.
        rng_state: The state of torch's generators, by device.
        attention: The backend that ran in each layer, if that was recorded.
        shards: The folder of the tensors, if they are not in the file.
        shard_checksums: The CRC-32 of each file in `shards`.
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
    shards: Path | None = None
    shard_checksums: Checksums = field(default_factory=dict)

    def build_model(
        self,
        *,
        device: str | torch.device,
        attention: str | dict[str, str] | None = None,
        parallel: Parallel = SINGLE,
    ) -> Transformer:
        """Return the model on `device`, sharded if `parallel` does that.

        Args:
            device: Where it shall be.
            attention: Another attention backend than the run's.
            parallel: The processes that will train it together.

        Raises:
            FormatError: A weight is missing, unexpected or of another shape.
        """
        config = self.model_config
        if attention is not None:
            config = replace(config, attention=attention)
        model = Transformer(config).to(device)
        if self.shards is not None:
            parallel.shard(model)
            load_shards(self.shards, {MODEL + name: value for name, value in weights_of(model)})
            return model
        try:
            model.load_state_dict(self.model_state, strict=True)
        except (RuntimeError, AttributeError, TypeError) as error:
            message = f"checkpoint {self.path} does not fit its own configuration: {error}"
            raise FormatError(message) from error
        parallel.shard(model)
        return model

    def build_optimizer(self, model: Transformer) -> AdamW:
        """Return the optimizer of `model`, in the state it was saved in.

        Raises:
            FormatError: The state does not belong to this model.
        """
        optimizer = build_optimizer(model, self.training_config)
        try:
            load_state_by_name(model, optimizer, self._optimizer_state_of(model))
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"checkpoint {self.path} has an optimizer state that does not fit: {error}"
            raise FormatError(message) from error
        return optimizer

    def _optimizer_state_of(self, model: Transformer) -> NamedState:
        if self.shards is None:
            return self.optimizer_state
        state = {name: dict(values) for name, values in self.optimizer_state.items()}
        read: dict[str, Tensor] = {}
        for name, weight in weights_of(model):
            for key, value in state[name].items():
                if value is None:
                    read[f"{OPTIMIZER}{name}.{key}"] = state[name][key] = torch.zeros_like(weight)
        load_shards(self.shards, read)
        return state

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


def load_checkpoint(run: str | Path, parallel: Parallel = SINGLE) -> Checkpoint:
    """Read and verify a checkpoint, given the file or its run folder; tensors stay on the CPU.

    Args:
        run: The file or the folder.
        parallel: The processes that load it together; each then verifies some of its shards.

    Raises:
        FileError: There is none, or it or a shard cannot be read.
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
    checkpoint = _parse(path, content)
    if checkpoint.shards is not None:
        verify_shards(checkpoint.shards, checkpoint.shard_checksums, parallel)
    return checkpoint


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
            shards=path.with_name(content["shards"]) if "shards" in content else None,
            shard_checksums=dict(content["shard_checksums"]) if "shards" in content else {},
        )
    except (KeyError, TypeError, ValueError) as error:  # a ConfigError is a ValueError
        message = f"checkpoint {path} is not complete: {error}"
        raise FormatError(message) from error
