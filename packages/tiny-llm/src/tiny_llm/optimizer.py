"""AdamW with the usual two groups, and the learning rate of each step."""

import math

from torch import nn
from torch.optim import AdamW

from tiny_llm.config import TrainingConfig

BETAS = (0.9, 0.95)  # the second is below AdamW's default: small batches, steadier (GPT-3)


def build_optimizer(model: nn.Module, config: TrainingConfig) -> AdamW:
    """Return AdamW that decays matrices and leaves vectors (the norms' weights) alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=BETAS)


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of step 0, 1, ..., steps - 1.

    It rises linearly over `warmup_steps`, then falls along half a cosine, from `learning_rate` to
    `final_lr_fraction` of it at the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 -> 0
    final = config.final_lr_fraction
    return config.learning_rate * (final + (1 - final) * cosine)
