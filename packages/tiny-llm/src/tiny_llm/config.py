"""What a model is and how it is trained: two frozen records, checked when they are made.

Each field carries its own help text, which is also what `tiny-llm train --help` prints.
"""

from dataclasses import dataclass

from tiny_llm.errors import ConfigError
from tiny_llm.model_config import PRESETS, ModelConfig, preset
from tiny_llm.settings import check_positive_finite, check_range, check_types, setting

__all__ = ["MAX_SEED", "PRESETS", "ModelConfig", "TrainingConfig", "preset"]

MAX_SEED = 2**63 - 1  # what torch.manual_seed takes


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.

    Raises:
        ConfigError: A field is out of range.
    """

    batch_size: int = setting(16, "sequences per step")
    seq_len: int = setting(128, "tokens per sequence")
    steps: int = setting(200, "optimizer steps of the whole run")
    learning_rate: float = setting(2e-3, "peak learning rate, reached after the warm-up")
    final_lr_fraction: float = setting(0.1, "share of the peak at which the cosine ends")
    warmup_steps: int = setting(10, "steps over which the learning rate rises to its peak")
    weight_decay: float = setting(0.1, "decay of the weight matrices (norms are exempt)")
    grad_clip: float = setting(1.0, "largest norm of the whole gradient (inf: no clipping)")
    seed: int = setting(0, "decides the initial weights and every batch")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("batch_size", "seq_len", "steps"):
            check_range(self, name, minimum=1)
        for name in ("warmup_steps", "weight_decay"):
            check_range(self, name, minimum=0)
        check_range(self, "seed", minimum=0, maximum=MAX_SEED)
        check_range(self, "final_lr_fraction", minimum=0, maximum=1)
        check_positive_finite(self, "learning_rate")
        if not self.grad_clip > 0:
            message = f"`grad_clip` must be above 0, got {self.grad_clip}"
            raise ConfigError(message)
