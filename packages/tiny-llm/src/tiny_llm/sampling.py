"""From the logits of the next token to the token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_llm.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.  The steps apply in the order of the fields.

    Attributes:
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that
            the text already has (CTRL, arXiv:1909.05858); 1 does nothing.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw from this many likeliest tokens only; by default from all.
        top_p: Draw from the fewest likeliest tokens whose probabilities sum to this.

    Raises:
        ConfigError: A field is out of range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            message = f"`temperature` must be at least 0 and finite, got {self.temperature}"
            raise ConfigError(message)
        if self.top_k is not None and self.top_k < 1:
            message = f"`top_k` must be at least 1, got {self.top_k}"
            raise ConfigError(message)
        if not 0 < self.top_p <= 1:
            message = f"`top_p` must be above 0 and at most 1, got {self.top_p}"
            raise ConfigError(message)
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            message = (
                f"`repetition_penalty` must be above 0 and finite, got {self.repetition_penalty}"
            )
            raise ConfigError(message)


def sample_token(
    logits: Tensor,
    sampling: Sampling,
    *,
    context: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> int:
    """Draw one token from the logits ``[vocab_size]``.

    Args:
        logits: On any device.
        sampling: How to draw.
        context: The text so far, for the repetition penalty.
        generator: A CPU generator; its state alone decides the draw.
    """
    logits = logits.double()  # which bears the tiniest temperature
    if sampling.repetition_penalty != 1 and context:
        seen = torch.tensor(sorted(set(context)), device=logits.device)
        values, penalty = logits[seen], sampling.repetition_penalty
        logits = logits.index_put(
            (seen,), torch.where(values > 0, values / penalty, values * penalty)
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    kept = len(logits) if sampling.top_k is None else min(sampling.top_k, len(logits))
    values, indices = (each.cpu() for each in logits.topk(kept))
    # from here on the CPU, where the draw does not depend on the device; the largest becomes 0
    # before the division, so a tiny temperature gives 0 and -inf, never NaN
    weights = torch.softmax((values - values[0]) / sampling.temperature, dim=0)
    # a token stays if those before it do not make up top_p yet: the likeliest one always does
    weights[weights.cumsum(0) - weights >= sampling.top_p] = 0
    choice = torch.multinomial(weights, 1, generator=generator)
    return int(indices[choice])
