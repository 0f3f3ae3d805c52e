"""What every process of `test_distributed` does: `torchrun distributed_worker.py FOLDER PART`."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.distributed import Parallel, process_group
from tiny_llm.errors import FileError
from tiny_llm.optimizer import build_optimizer
from tiny_llm.saving import save_checkpoint
from tiny_llm.training import Stepper, batch_at, build_scaler, train_steps
from tiny_llm.transformer import Transformer

MODEL = ModelConfig(d_model=32, num_layers=2, num_heads=4, d_ff=48, max_seq_len=24)
# 7 rows on 2 processes in 2 parts: no two parts have equally many tokens
CONFIG = TrainingConfig(
    batch_size=7, seq_len=24, steps=6, warmup_steps=2, learning_rate=3e-3, micro_batches=2
)
TOKENS = np.random.default_rng(0).integers(0, 257, size=2000)
HALF = 3


class Stopped(Exception):
    pass


def new_model(parallel: Parallel) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(MODEL)
    parallel.shard(model)
    return model


def trained(parallel: Parallel, config: TrainingConfig = CONFIG) -> dict:
    model = new_model(parallel)
    losses = train_steps(model, TOKENS, config, device="cpu", parallel=parallel)
    return {"losses": losses, "weights": weights_of(model)}


def weights_of(model: Transformer) -> dict:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def train_half_and_save(parallel: Parallel, path: Path) -> list[float]:
    model = new_model(parallel)
    optimizer = build_optimizer(model, CONFIG)
    losses = []

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if step == HALF - 1:
            save_checkpoint(
                path,
                model=model,
                optimizer=optimizer,
                training_config=CONFIG,
                step=HALF,
                tokens_checksum=0,
                parallel=parallel,
            )
            raise Stopped

    try:
        train_steps(
            model,
            TOKENS,
            CONFIG,
            device="cpu",
            optimizer=optimizer,
            on_step=on_step,
            parallel=parallel,
        )
    except Stopped:
        parallel.agree(True)  # the file is there when all have come here
    return losses


def resume(parallel: Parallel, path: Path) -> dict:
    checkpoint = load_checkpoint(path, parallel)
    model = checkpoint.build_model(device="cpu", parallel=parallel)
    losses = train_steps(
        model,
        TOKENS,
        checkpoint.training_config,
        device="cpu",
        start_step=checkpoint.step,
        optimizer=checkpoint.build_optimizer(model),
        parallel=parallel,
    )
    return {"losses": losses, "weights": weights_of(model)}


def clipped_step(parallel: Parallel) -> dict:
    """Take one plain gradient step of norm 0.01 and return by how much each weight moved."""
    model = new_model(parallel)
    config = replace(CONFIG, grad_clip=0.01)
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = Stepper(model, optimizer, build_scaler(config, "cpu"), config, parallel)
    stepper.backward(*batch_at(0, TOKENS, config))
    stepper.update()
    return {name: before[name] - value for name, value in weights_of(model).items()}


def saved_on_a_disk_full_for_one(parallel: Parallel, path: Path) -> str:
    """Save over `path` while one process cannot write; return what the others hear of it."""
    model = new_model(parallel)
    optimizer = build_optimizer(model, CONFIG)
    train_steps(
        model,
        TOKENS,
        replace(CONFIG, steps=1),
        device="cpu",
        optimizer=optimizer,
        parallel=parallel,
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not parallel.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        save_checkpoint(
            path,
            model=model,
            optimizer=optimizer,
            training_config=CONFIG,
            step=HALF + 1,
            tokens_checksum=0,
            parallel=parallel,
        )
    except FileError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def run(folder: Path, kinds: tuple[str, ...]) -> dict:
    results = {}
    for kind in kinds:
        with connected_group(folder, kind) as parallel:
            path = folder / f"{kind}.pt"
            results[kind] = {
                "trained": trained(parallel),
                "clipped": clipped_step(parallel),
                "first_half": train_half_and_save(parallel, path),
                "resumed": resume(parallel, path),
                # what one process saved, if it did
                "from_one": resume(parallel, folder / "none.pt"),
                "agreed": [parallel.agree(True), parallel.agree(parallel.is_main)],
                "full_disk": saved_on_a_disk_full_for_one(parallel, path) if kind == "fsdp" else "",
            }
    return results


def resume_all(folder: Path, kinds: tuple[str, ...]) -> dict:
    """Go on, sharded, with what other numbers of processes saved."""
    with connected_group(folder, "fsdp") as parallel:
        return {kind: resume(parallel, folder / f"{kind}.pt") for kind in kinds}


@contextmanager
def connected_group(folder: Path, kind: str) -> Iterator[Parallel]:
    connected = folder / f"connected-{os.environ['RANK']}"
    connected.unlink(missing_ok=True)
    with process_group(kind, torch.device("cpu")) as parallel:
        connected.touch()
        yield parallel


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.alarm(120)  # a process left alone by the other ends itself
    target, part = Path(sys.argv[1]), sys.argv[2]
    found = {"run": run, "resume": resume_all}[part](target, ("ddp", "fsdp"))
    if os.environ["RANK"] == "0":
        torch.save(found, target / f"{part}.pt")
