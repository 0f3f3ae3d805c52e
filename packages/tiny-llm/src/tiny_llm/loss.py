"""The loss of a language model, as a module that can be compiled, replicated or autocast."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tiny_llm.chunked_loss import IGNORED, chunked_cross_entropy
from tiny_llm.packing import Packing
from tiny_llm.transformer import Transformer

__all__ = [
    "AUTOCAST",
    "IGNORED",
    "LanguageModelLoss",
    "checkpoint_activations",
    "count_targets",
    "next_token_loss",
]

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LanguageModelLoss(nn.Module):
    """The summed cross-entropy of a model's predictions.

    Args:
        model: Maps tokens ``[B, T]`` to logits ``[B, T, vocab_size]``.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for autocast.
        chunk_tokens: Hold the logits of so many tokens at a time (0: of all); takes a
            `Transformer`.
    """

    def __init__(self, model: nn.Module, precision: str = "fp32", chunk_tokens: int = 0) -> None:
        super().__init__()
        self.model = model
        self.dtype = AUTOCAST.get(precision)
        self.chunk_tokens = chunk_tokens

    def forward(self, inputs: Tensor, targets: Tensor, packing: Packing | None = None) -> Tensor:
        """Return the sum over all targets ``[B, T]`` that are not `IGNORED`, in nats, float32.

        Args:
            inputs: Token ids ``[B, T]``.
            targets: The token after each, or `IGNORED`.
            packing: The documents in the inputs, if none is to see another.
        """
        given: dict[str, Any] = {} if packing is None else {"packing": packing}
        with torch.autocast(inputs.device.type, self.dtype, enabled=self.dtype is not None):
            if self.chunk_tokens:
                model = cast("Transformer", self.model)
                return chunked_cross_entropy(
                    model.hidden_states(inputs, **given).flatten(0, 1),
                    model.head.weight,
                    targets.flatten(),
                    chunk_tokens=self.chunk_tokens,
                )
            logits = self.model(inputs, **given)  # [B, T, vocab_size]
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of tokens and their successors [B, T]."""
    total: Tensor = LanguageModelLoss(model)(inputs, targets)
    return total / count_targets(targets)


def count_targets(targets: Tensor) -> Tensor:
    """Return how many targets count, int64 ``[]``, where they are: a GPU is not waited for."""
    return (targets != IGNORED).sum()


def checkpoint_activations(model: Transformer, *, enabled: bool) -> None:
    """Let every block keep only its input and compute the rest again in the backward pass.

    The blocks stay what they are, so neither the weights' names nor the numbers change.
    """
    for block in model.blocks:
        block.__dict__.pop("forward", None)
        if enabled:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
