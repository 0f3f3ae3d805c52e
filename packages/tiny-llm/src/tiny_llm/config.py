"""What a model is and how it is trained: two frozen records, checked when they are made.

Each field carries its own help text, which is also what `tiny-llm train --help` prints.
"""

import math
from dataclasses import dataclass, field, fields
from typing import TypeVar

from tiny_llm.errors import ConfigError
from tiny_llm.tokenizer import ByteTokenizer

T = TypeVar("T")

MAX_SEED = 2**63 - 1  # what torch.manual_seed takes


def _setting(default: T, help_text: str) -> T:
    """A dataclass field with a default and a help text, typed as its value."""
    made: T = field(default=default, metadata={"help": help_text})
    return made


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a `Transformer` and the attention it computes with.

    Raises:
        ConfigError: A field is out of range, or the width cannot be split into heads.
    """

    vocab_size: int = _setting(ByteTokenizer.vocab_size, "number of token ids")
    d_model: int = _setting(128, "width of the residual stream")
    num_layers: int = _setting(4, "number of blocks")
    num_heads: int = _setting(4, "attention heads per block; divides d_model")
    d_ff: int = _setting(384, "hidden width of the feed-forward layer")
    max_seq_len: int = _setting(128, "longest sequence the model can see, in tokens")
    rope_theta: float = _setting(10_000.0, "base of the rotary wavelengths")
    norm_eps: float = _setting(1e-5, "added to the mean square in RMSNorm")
    tie_embeddings: bool = _setting(True, "share the embedding's weight with the output layer")
    attention: str = _setting(
        "eager", "attention backend: eager (readable), sdpa (torch's), flash (tiny-llm[flash])"
    )

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "max_seq_len"):
            _check_range(self, name, minimum=1)
        for name in ("rope_theta", "norm_eps"):
            _check_positive_finite(self, name)
        if self.d_model % self.num_heads:
            message = (
                f"`d_model` must be a multiple of `num_heads`, "
                f"got d_model={self.d_model} and num_heads={self.num_heads}"
            )
            raise ConfigError(message)
        if self.head_dim % 2:
            message = (
                f"d_model / num_heads must be even, because RoPE rotates pairs, got "
                f"{self.d_model} / {self.num_heads} = {self.head_dim}"
            )
            raise ConfigError(message)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.

    Raises:
        ConfigError: A field is out of range.
    """

    batch_size: int = _setting(16, "sequences per step")
    seq_len: int = _setting(128, "tokens per sequence")
    steps: int = _setting(200, "optimizer steps of the whole run")
    learning_rate: float = _setting(2e-3, "peak learning rate, reached after the warm-up")
    final_lr_fraction: float = _setting(0.1, "share of the peak at which the cosine ends")
    warmup_steps: int = _setting(10, "steps over which the learning rate rises to its peak")
    weight_decay: float = _setting(0.1, "decay of the weight matrices (norms are exempt)")
    grad_clip: float = _setting(1.0, "largest norm of the whole gradient (inf: no clipping)")
    seed: int = _setting(0, "decides the initial weights and every batch")

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("batch_size", "seq_len", "steps"):
            _check_range(self, name, minimum=1)
        for name in ("warmup_steps", "weight_decay"):
            _check_range(self, name, minimum=0)
        _check_range(self, "seed", minimum=0, maximum=MAX_SEED)
        _check_range(self, "final_lr_fraction", minimum=0, maximum=1)
        _check_positive_finite(self, "learning_rate")
        if not self.grad_clip > 0:
            message = f"`grad_clip` must be above 0, got {self.grad_clip}"
            raise ConfigError(message)


def _check_types(config: ModelConfig | TrainingConfig) -> None:
    for item in fields(config):
        value, expected = getattr(config, item.name), type(item.default)
        # an int serves as a float, but a bool is no int here
        fits = type(value) is expected or (expected is float and type(value) is int)
        if not fits:
            message = f"`{item.name}` must be {expected.__name__}, got {value!r}"
            raise ConfigError(message)


def _check_range(
    config: ModelConfig | TrainingConfig, name: str, *, minimum: float, maximum: float = math.inf
) -> None:
    value = getattr(config, name)
    if not minimum <= value <= maximum or value == math.inf:
        limit = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"
        message = f"`{name}` must be {limit}, got {value}"
        raise ConfigError(message)


def _check_positive_finite(config: ModelConfig | TrainingConfig, name: str) -> None:
    value = getattr(config, name)
    if not 0 < value < math.inf:
        message = f"`{name}` must be above 0 and finite, got {value}"
        raise ConfigError(message)
