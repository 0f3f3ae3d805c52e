"""A training run: its folder, its start or its going on, and all it reports on the way."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch.amp.grad_scaler import GradScaler

from tiny_llm import __version__, settings_file, tokenizer_files
from tiny_llm.bpe import BPETokenizer
from tiny_llm.checkpoint import FILE_NAME, Checkpoint, load_checkpoint
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.data import Tokens, open_tokens
from tiny_llm.devices import flag_of, require, resolve_device
from tiny_llm.distributed import Parallel, local_device, process_group
from tiny_llm.errors import ConfigError, FileError, TrainingError
from tiny_llm.files import atomic_write, reason_of
from tiny_llm.loss import AUTOCAST
from tiny_llm.metrics import RUN
from tiny_llm.optimizer import build_optimizer
from tiny_llm.options import TrainOptions
from tiny_llm.reporter import Reporter
from tiny_llm.tokenizer import Tokenizer, check_same_tokenizer
from tiny_llm.training import build_scaler, check_fits, check_rows, train_steps
from tiny_llm.transformer import Transformer

# a run's other settings decide its losses, so they cannot change half-way
FREE_ON_RESUME = frozenset(
    {"steps", "attention", "micro_batches", "compile", "activation_checkpointing", "loss_chunk"}
)


@dataclass(frozen=True)
class Run:
    """A training that is about to start or to go on.

    Attributes:
        attention: The backend of each layer: of a run to go on with, the one it had so far, or
            nothing if another one is asked for.
    """

    model: Transformer
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    config: TrainingConfig
    start_step: int
    attention: tuple[str, ...] = ()


def train(options: TrainOptions) -> None:
    """Start a run or go on with one, saving checkpoints into its folder."""
    require(options, "tokens", "out")
    device = resolve_device(local_device(options.device))
    tokens = open_tokens(options.tokens)
    tokenizer = tokenizer_files.tokenizer_of(tokens, options.tokenizer)
    held_out = _open_eval_tokens(options.run.eval_tokens, tokenizer)
    path = Path(options.out) / FILE_NAME
    with process_group(options.run.parallel, device) as parallel, _out_of_memory_explained():
        check_rows(options.training, parallel)
        start = _resumed_run if options.resume else _new_run
        run = start(path, tokens, options, device, parallel)
        if run.start_step >= run.config.steps:
            _say(parallel, f"{path} is at step {run.start_step} already; pass more --steps")
            return
        check_fits(run.model, tokens, run.config)
        run = _with_settled_attention(run, device)
        if parallel.is_main:
            _make_folder(path.parent, options, tokenizer)
            _write_facts(path.with_name(RUN), run, tokens, device)
        reporter = Reporter(run, path, tokens, tokenizer, held_out, options.run, parallel)
        with reporter:
            losses = train_steps(
                run.model,
                tokens,
                run.config,
                device=device,
                start_step=run.start_step,
                optimizer=run.optimizer,
                scaler=run.scaler,
                parallel=parallel,
                on_step=reporter.on_step,
            )
        last = f"step {run.config.steps}: loss {losses[-1]:.4f} nats per token; saved {path}"
        _say(parallel, last)


def _new_run(
    path: Path, tokens: Tokens, options: TrainOptions, device: torch.device, parallel: Parallel
) -> Run:
    if path.exists():
        message = f"{path} exists already: pass --resume to go on with it, or another --out"
        raise ConfigError(message)
    model_config = settings_file.model_config(options, vocab_size=tokens.vocab_size)
    torch.manual_seed(options.training.seed)
    model = Transformer(model_config).to(device)
    parallel.shard(model)
    optimizer = build_optimizer(model, options.training)
    return Run(model, optimizer, build_scaler(options.training, device), options.training, 0)


def _resumed_run(
    path: Path, tokens: Tokens, options: TrainOptions, device: torch.device, parallel: Parallel
) -> Run:
    checkpoint = load_checkpoint(path, parallel)
    if tokens.checksum != checkpoint.tokens_checksum:
        message = f"{tokens.path} is not the token file that {path} was trained on"
        raise ConfigError(message)
    model_config = settings_file.model_config(options, vocab_size=tokens.vocab_size)
    _check_unchanged(checkpoint.model_config, model_config)
    _check_unchanged(checkpoint.training_config, options.training)
    same_choice = model_config.attention == checkpoint.model_config.attention
    checkpoint = _with_settings(checkpoint, model_config, options.training)
    model = checkpoint.build_model(device=device, parallel=parallel)
    checkpoint.restore_rng()
    return Run(
        model,
        checkpoint.build_optimizer(model),
        checkpoint.build_scaler(device),
        options.training,
        checkpoint.step,
        checkpoint.attention if same_choice else (),
    )


def _with_settings(
    checkpoint: Checkpoint, model_config: ModelConfig, training_config: TrainingConfig
) -> Checkpoint:
    return replace(checkpoint, model_config=model_config, training_config=training_config)


def _check_unchanged(
    saved: ModelConfig | TrainingConfig, given: ModelConfig | TrainingConfig
) -> None:
    for item in fields(saved):
        before, now = getattr(saved, item.name), getattr(given, item.name)
        if now != before and item.name not in FREE_ON_RESUME:
            message = f"{flag_of(item.name)} cannot change on --resume: it was {before}, got {now}"
            raise ConfigError(message)


def _open_eval_tokens(path: str, tokenizer: Tokenizer) -> Tokens | None:
    if not path:
        return None
    tokens = open_tokens(path)
    check_same_tokenizer(path, tokens.tokenizer_checksum, tokenizer)
    return tokens


def _with_settled_attention(run: Run, device: torch.device) -> Run:
    """Settle each layer's attention for this run, before the first step can fail over it.

    Raises:
        AttentionUnavailable: A choice cannot serve.
        ConfigError: The same choice comes to another backend than the run had so far.
    """
    dtype = AUTOCAST.get(run.config.precision, torch.float32)
    resolutions = run.model.resolve_attention(
        device=device,
        dtype=dtype,
        seq_len=run.config.seq_len,
        needs_grad=True,
        packed=run.config.within_documents,
    )
    chosen = tuple(each.chosen for each in resolutions)
    if run.attention and run.attention != chosen:
        before, now = (", ".join(dict.fromkeys(names)) for names in (run.attention, chosen))
        message = (
            f"the run had attention {before}, here --attention {run.model.config.attention} comes "
            f"to {now}; name the one to go on with, as --attention {now}"
        )
        raise ConfigError(message)
    return replace(run, attention=chosen)


def _make_folder(folder: Path, options: TrainOptions, tokenizer: Tokenizer) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # found out now, not at the first checkpoint
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into {folder}: {reason_of(error)}"
        raise FileError(message) from error
    settings_file.write_settings(folder / settings_file.FILE_NAME, options)
    if isinstance(tokenizer, BPETokenizer):
        tokenizer.save(folder / tokenizer_files.FILE_NAME)


def _write_facts(path: Path, run: Run, tokens: Tokens, device: torch.device) -> None:
    """Write what the settings do not say."""
    is_gpu = device.type == "cuda"
    facts = {
        "tiny_llm": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "parameters": run.model.num_parameters(),
        "tokens": len(tokens),
        "attention": run.attention,
    }
    with atomic_write(path) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")


def _say(parallel: Parallel, text: str) -> None:
    if parallel.is_main:
        print(text)
        sys.stdout.flush()


@contextmanager
def _out_of_memory_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # on a CPU torch raises a plain RuntimeError
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise TrainingError(
                "out of memory: raise --micro-batches, or lower --batch-size, --seq-len or the "
                "model's size"
            ) from error
        raise
