"""What a model is and how it is trained: frozen records, checked when they are made.

Each field carries its own help text, which is also what `tiny-llm train --help` prints.
"""

from dataclasses import dataclass

from tiny_llm.errors import ConfigError
from tiny_llm.model_config import PRESETS, ModelConfig, preset
from tiny_llm.settings import check_positive_finite, check_range, check_types, setting

__all__ = ["MAX_SEED", "PRESETS", "ModelConfig", "RunConfig", "TrainingConfig", "preset"]

MAX_SEED = 2**63 - 1  # what torch.manual_seed takes
PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("cosine", "wsd")
PARALLELS = ("auto", "none", "ddp", "fsdp")


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.

    Raises:
        ConfigError: A field is out of range.
    """

    batch_size: int = setting(16, "sequences per step, over all micro-batches and processes")
    seq_len: int = setting(128, "tokens per sequence")
    steps: int = setting(200, "optimizer steps of the whole run")
    learning_rate: float = setting(2e-3, "peak learning rate, reached after the warm-up")
    final_lr_fraction: float = setting(0.1, "share of the peak at which the schedule ends")
    warmup_steps: int = setting(10, "steps over which the learning rate rises to its peak")
    weight_decay: float = setting(0.1, "decay of the weight matrices (norms are exempt)")
    grad_clip: float = setting(1.0, "largest norm of the whole gradient (inf: no clipping)")
    seed: int = setting(0, "decides the initial weights and every batch")
    micro_batches: int = setting(
        1, "parts a process's share of the batch is computed in; more take less memory"
    )
    precision: str = setting(
        "fp32", "fp32, or autocast to bf16 or fp16 (with a loss scaler); weights stay float32"
    )
    schedule: str = setting(
        "cosine", "after the warm-up: cosine, or wsd (constant, then a linear decay)"
    )
    decay_fraction: float = setting(0.2, "share of the steps in which wsd decays")
    compile: bool = setting(False, "compile model and loss with torch.compile")
    within_documents: bool = setting(
        False, "let tokens attend within their own document only; positions restart with each"
    )
    loss_chunk: int = setting(
        0, "tokens whose logits are held at a time, which saves memory (0: those of all)"
    )
    activation_checkpointing: bool = setting(
        False, "compute each block again in the backward pass instead of keeping its activations"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("batch_size", "seq_len", "steps", "micro_batches"):
            check_range(self, name, minimum=1)
        for name in ("warmup_steps", "weight_decay", "loss_chunk"):
            check_range(self, name, minimum=0)
        check_range(self, "seed", minimum=0, maximum=MAX_SEED)
        for name in ("final_lr_fraction", "decay_fraction"):
            check_range(self, name, minimum=0, maximum=1)
        check_positive_finite(self, "learning_rate")
        _check_choice(self, "precision", PRECISIONS)
        _check_choice(self, "schedule", SCHEDULES)
        if self.loss_chunk and self.precision == "fp16":
            raise ConfigError("`loss_chunk` is not for precision 'fp16': use bf16 or fp32")
        if not self.grad_clip > 0:
            message = f"`grad_clip` must be above 0, got {self.grad_clip}"
            raise ConfigError(message)
        if self.micro_batches > self.batch_size:
            message = (
                f"`micro_batches` must be at most `batch_size`, "
                f"got {self.micro_batches} and {self.batch_size}"
            )
            raise ConfigError(message)


@dataclass(frozen=True)
class RunConfig:
    """What a run reports and keeps; none of it changes the losses.

    Raises:
        ConfigError: A field is out of range.
    """

    checkpoint_every: int = setting(
        100, "steps between checkpoints; there is always one at the end"
    )
    eval_tokens: str = setting("", "token file to evaluate on (default: none)")
    eval_every: int = setting(100, "steps between evaluations; there is always one at the end")
    eval_batches: int = setting(20, "batches of an evaluation")
    sample_every: int = setting(0, "steps between sample texts (0: none)")
    sample_prompt: str = setting("", "what the sample texts begin with")
    tensorboard: bool = setting(False, "also write metrics for TensorBoard")
    parallel: str = setting(
        "auto", "under torchrun: ddp (auto) keeps the model whole, fsdp shards it"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("checkpoint_every", "eval_every", "eval_batches"):
            check_range(self, name, minimum=1)
        check_range(self, "sample_every", minimum=0)
        _check_choice(self, "parallel", PARALLELS)


def _check_choice(config: TrainingConfig | RunConfig, name: str, choices: tuple[str, ...]) -> None:
    if getattr(config, name) not in choices:
        message = f"`{name}` must be {', '.join(choices)}, got {getattr(config, name)!r}"
        raise ConfigError(message)
