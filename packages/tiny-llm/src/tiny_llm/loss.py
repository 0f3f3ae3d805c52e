"""The loss of a language model, as a module that can be compiled, replicated or autocast."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tiny_llm.transformer import Transformer

IGNORED = -100  # a target that counts for nothing; also cross_entropy's default
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LanguageModelLoss(nn.Module):
    """The summed cross-entropy of a model's predictions.

    Args:
        model: Maps tokens ``[B, T]`` to logits ``[B, T, vocab_size]``.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for autocast.
    """

    def __init__(self, model: nn.Module, precision: str = "fp32") -> None:
        super().__init__()
        self.model = model
        self.dtype = AUTOCAST.get(precision)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all targets ``[B, T]`` that are not `IGNORED`, in nats, float32."""
        with torch.autocast(inputs.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self.model(inputs)  # [B, T, vocab_size]
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of tokens and their successors [B, T]."""
    total: Tensor = LanguageModelLoss(model)(inputs, targets)
    return total / count_targets(targets)


def count_targets(targets: Tensor) -> int:
    """Return how many targets count."""
    return int((targets != IGNORED).sum())


def checkpoint_activations(model: Transformer, *, enabled: bool) -> None:
    """Let every block keep only its input and compute the rest again in the backward pass.

    The blocks stay what they are, so neither the weights' names nor the numbers change.
    """
    for block in model.blocks:
        block.__dict__.pop("forward", None)
        if enabled:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
