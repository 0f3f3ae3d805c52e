"""What `tiny-llm prepare`, `train` and `generate` do, given their parsed arguments."""

import argparse
import codecs
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tiny_llm import generation
from tiny_llm.checkpoint import FILE_NAME, load_checkpoint, save_checkpoint
from tiny_llm.cli import flag_of
from tiny_llm.config import MAX_SEED, ModelConfig, TrainingConfig
from tiny_llm.data import TokenFile, prepare_tokens, stdlib_sources
from tiny_llm.errors import ConfigError, FileError, TrainingError
from tiny_llm.files import reason_of
from tiny_llm.optimizer import build_optimizer
from tiny_llm.tokenizer import ByteTokenizer
from tiny_llm.training import check_fits, train_steps
from tiny_llm.transformer import Transformer

# a run's other settings decide its losses, so they cannot change half-way
FREE_ON_RESUME = frozenset({"steps", "attention"})


@dataclass(frozen=True)
class Run:
    """A training that is about to start or to go on."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    start_step: int


def prepare(arguments: argparse.Namespace) -> None:
    """Write a token file from the named files, or from the standard library's sources."""
    if arguments.sources and arguments.max_bytes is not None:
        raise ConfigError("--max-bytes is for the standard library's sources, not for named files")
    if arguments.max_bytes is not None and arguments.max_bytes < 1:
        message = f"--max-bytes must be at least 1, got {arguments.max_bytes}"
        raise ConfigError(message)
    sources = arguments.sources or stdlib_sources(arguments.max_bytes)
    tokens = prepare_tokens(sources, arguments.out, ByteTokenizer(), progress=True)
    print(f"{tokens.path}: {len(tokens):,} tokens from {len(sources)} files")


def train(arguments: argparse.Namespace) -> None:
    """Start a run or go on with one, saving checkpoints into its folder."""
    every = arguments.checkpoint_every
    if every < 1:
        message = f"--checkpoint-every must be at least 1, got {every}"
        raise ConfigError(message)
    device = resolve_device(arguments.device)
    tokens = TokenFile.open(arguments.tokens)
    path = Path(arguments.out) / FILE_NAME
    with _out_of_memory_explained():
        start = _resumed_run if arguments.resume else _new_run
        run = start(path, tokens, _given_settings(arguments), device)
        if run.start_step >= run.config.steps:
            print(f"{path} is at step {run.start_step} already; pass more --steps to go on")
            return
        check_fits(run.model, tokens, run.config)
        _make_writable_folder(path.parent)
        loss = _train_with_checkpoints(run, tokens, path, device, every)
    print(f"step {run.config.steps}: loss {loss:.4f} nats per token; saved {path}")


def generate(arguments: argparse.Namespace) -> None:
    """Print the prompt and its continuation, token by token."""
    device = resolve_device(arguments.device)
    checkpoint = load_checkpoint(arguments.checkpoint)
    tokenizer = ByteTokenizer()
    if checkpoint.model_config.vocab_size != tokenizer.vocab_size:
        message = (
            f"checkpoint {checkpoint.path} has a vocabulary of "
            f"{checkpoint.model_config.vocab_size}, the byte tokenizer {tokenizer.vocab_size}"
        )
        raise ConfigError(message)
    model = checkpoint.build_model(device=device, attention=arguments.attention)
    prompt = tokenizer.encode(arguments.prompt)
    new_tokens = generation.generate(
        model,
        # a text begins where another has ended
        prompt or [tokenizer.end_of_text],
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        generator=_seeded_generator(arguments.seed),
        stop_token=tokenizer.end_of_text,
    )
    # a character of several bytes is printed when its last byte has come
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    _write(decoder.decode(bytes(prompt)))
    for token in new_tokens:
        _write(decoder.decode(tokenizer.decode_bytes([token])))
    _write(decoder.decode(b"", final=True) + "\n")


def _write(text: str) -> None:
    """Print at once; what the terminal's encoding does not have becomes a question mark."""
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": torch.backends.mps.is_available()}
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.index or 0) >= known.get(device.type, 0):
        available = ", ".join(kind for kind, count in known.items() if count)
        message = f"--device {name} is not available here; there is: {available}"
        raise ConfigError(message)
    return device


def _given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model's and the training's settings that the command line names."""
    names = {item.name for config in (ModelConfig, TrainingConfig) for item in fields(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    model_names = {item.name for item in fields(ModelConfig)}
    return (
        {name: value for name, value in settings.items() if name in model_names},
        {name: value for name, value in settings.items() if name not in model_names},
    )


def _new_run(path: Path, tokens: TokenFile, given: dict[str, Any], device: torch.device) -> Run:
    if path.exists():
        message = f"{path} exists already: pass --resume to go on with that run, or another --out"
        raise FileError(message)
    model_settings, training_settings = _split(given)
    config = TrainingConfig(**training_settings)
    model_config = ModelConfig(
        vocab_size=tokens.vocab_size, max_seq_len=config.seq_len, **model_settings
    )
    torch.manual_seed(config.seed)
    model = Transformer(model_config).to(device)
    return Run(model, build_optimizer(model, config), config, start_step=0)


def _resumed_run(path: Path, tokens: TokenFile, given: dict[str, Any], device: torch.device) -> Run:
    checkpoint = load_checkpoint(path)
    if checkpoint.tokens_checksum != tokens.checksum:
        message = f"{tokens.path} is not the token file that {path} was trained on"
        raise ConfigError(message)
    model_settings, training_settings = _split(given)
    for config, settings in (
        (checkpoint.model_config, model_settings),
        (checkpoint.training_config, training_settings),
    ):
        for name, value in settings.items():
            saved = getattr(config, name)
            if value != saved and name not in FREE_ON_RESUME:
                message = f"{flag_of(name)} cannot change on --resume: it was {saved}, got {value}"
                raise ConfigError(message)
    model = checkpoint.build_model(device=device, attention=given.get("attention"))
    config = replace(checkpoint.training_config, **training_settings)
    return Run(model, checkpoint.build_optimizer(model), config, checkpoint.step)


def _train_with_checkpoints(
    run: Run, tokens: TokenFile, path: Path, device: torch.device, every: int
) -> float:
    """Train to the end and return the last loss."""
    config = run.config
    with tqdm(total=config.steps, initial=run.start_step, desc="train", unit="step") as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            done = step + 1
            if done % every == 0 or done == config.steps:
                save_checkpoint(
                    path,
                    model=run.model,
                    optimizer=run.optimizer,
                    training_config=config,
                    step=done,
                    tokens_checksum=tokens.checksum,
                )

        losses = train_steps(
            run.model,
            tokens,
            config,
            device=device,
            start_step=run.start_step,
            optimizer=run.optimizer,
            on_step=on_step,
        )
    return losses[-1]


def _make_writable_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # found out now, not at the first checkpoint
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into {folder}: {reason_of(error)}"
        raise FileError(message) from error


def _seeded_generator(seed: int) -> torch.Generator:
    if not 0 <= seed <= MAX_SEED:
        message = f"--seed must be 0 to {MAX_SEED}, got {seed}"
        raise ConfigError(message)
    return torch.Generator().manual_seed(seed)


@contextmanager
def _out_of_memory_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # on a CPU torch raises a plain RuntimeError
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise TrainingError(
                "out of memory: lower --batch-size, --seq-len or the model's size"
            ) from error
        raise
