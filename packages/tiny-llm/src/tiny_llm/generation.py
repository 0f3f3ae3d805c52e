"""Sampling from a model, one token at a time."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiny_llm.errors import ConfigError
from tiny_llm.transformer import Transformer


def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, as they are drawn.

    The model sees the last `max_seq_len` tokens of prompt and answer; older ones are forgotten.

    Args:
        model: On any device.
        prompt: Token ids, at least one.
        max_new_tokens: Where to end.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw from this many likeliest tokens only; by default from all.
        generator: A CPU generator; the same state gives the same text on every run.
        stop_token: End before yielding this one.

    Raises:
        ConfigError: An argument is out of its range.  Raised at the call, not at the first token.
    """
    if not prompt:
        raise ConfigError("`prompt` must have at least one token, got none")
    if max_new_tokens < 0:
        message = f"`max_new_tokens` must be at least 0, got {max_new_tokens}"
        raise ConfigError(message)
    if not (temperature >= 0 and math.isfinite(temperature)):
        message = f"`temperature` must be at least 0 and finite, got {temperature}"
        raise ConfigError(message)
    if top_k is not None and top_k < 1:
        message = f"`top_k` must be at least 1, got {top_k}"
        raise ConfigError(message)

    def tokens() -> Iterator[int]:
        context = list(prompt)
        for _ in range(max_new_tokens):
            logits = _next_logits(model, context)
            token = sample_token(logits, temperature=temperature, top_k=top_k, generator=generator)
            if token == stop_token:
                return
            context.append(token)
            yield token

    return tokens()


@torch.no_grad()
def _next_logits(model: Transformer, context: Sequence[int]) -> Tensor:
    """Return the logits ``[vocab_size]`` after the part of the context that the model can see."""
    visible = context[-model.config.max_seq_len :]
    tokens = torch.tensor([visible], device=model.embedding.weight.device)
    logits: Tensor = model(tokens)[0, -1]
    return logits


def sample_token(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """Draw one token from the logits ``[vocab_size]``."""
    # on the CPU the draw does not depend on the device; float64 bears the tiniest temperature
    logits = logits.double().cpu()
    if temperature == 0:
        return int(logits.argmax())
    kept = len(logits) if top_k is None else min(top_k, len(logits))
    best = logits.topk(kept)
    # the largest becomes 0 before the division, so a tiny temperature gives 0 and -inf, never NaN
    weights = torch.softmax((best.values - best.values[0]) / temperature, dim=0)
    choice = torch.multinomial(weights, 1, generator=generator)
    return int(best.indices[choice])
