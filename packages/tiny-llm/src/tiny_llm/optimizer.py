"""AdamW with the usual two groups, its state by name, and the learning rate of each step."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from tiny_llm.config import TrainingConfig
from tiny_llm.errors import ConfigError

BETAS = (0.9, 0.95)  # the second is below AdamW's default: small batches, steadier (GPT-3)

NamedState = dict[str, dict[str, Tensor]]


def build_optimizer(model: nn.Module, config: TrainingConfig) -> AdamW:
    """Return AdamW that decays matrices and leaves vectors (the norms' weights) alone.

    It is fused where all parameters are on CUDA.  Build it when the model is where it stays.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(parameter.is_cuda for parameter in parameters)
    return AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=fused or None)


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> NamedState:
    """Return the state of each parameter under the parameter's name, sharded as that is."""
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def load_state_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: NamedState
) -> None:
    """Give an optimizer the state that `state_by_name` returned; whole tensors are sharded.

    Raises:
        ConfigError: A name is missing or unexpected, or a shape differs.
    """
    parameters = dict(model.named_parameters())
    # an optimizer that has made no step has no state at all
    if saved and saved.keys() != parameters.keys():
        odd = ", ".join(sorted(saved.keys() ^ parameters.keys()))
        message = f"missing or unexpected: {odd}"
        raise ConfigError(message)
    state: dict[int, dict[str, Tensor]] = {}
    index = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for name, values in saved.items():
        parameter = parameters[name]
        state[index[parameter]] = {
            key: _placed(name, value, parameter) for key, value in values.items()
        }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(name: str, value: Any, parameter: nn.Parameter) -> Tensor:
    if not isinstance(value, Tensor) or value.shape not in (parameter.shape, torch.Size([])):
        message = f"the state of {name} does not have its shape {list(parameter.shape)}"
        raise ConfigError(message)
    if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, placements)
    return value


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of step 0, 1, ..., steps - 1.

    It rises linearly over `warmup_steps`.  Then it falls from `learning_rate` to
    `final_lr_fraction` of it at the last step: with ``cosine`` along half a cosine from there on,
    with ``wsd`` (warm-up, stable, decay) linearly over the last `decay_fraction` of the steps.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    last = config.steps - 1
    if config.schedule == "wsd":
        decay_start = max(config.warmup_steps, config.steps * (1 - config.decay_fraction) - 1)
        remaining = 1 - max(0.0, step - decay_start) / max(1.0, last - decay_start)
    else:
        progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
        remaining = 0.5 * (1 + math.cos(math.pi * progress))  # 1 -> 0
    final = config.final_lr_fraction
    return config.learning_rate * (final + (1 - final) * max(0.0, remaining))
