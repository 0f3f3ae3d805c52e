"""What a provider's exception means."""

import warnings
from collections.abc import Sequence

import torch

from tiny_llm.errors import AttentionUnavailable


def failure_state(error: Exception) -> str:
    """Return the row state for an exception: ``oom``, ``unsupported`` or ``error``."""
    text = str(error)
    # torch has no class of its own for a CPU allocation that failed
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "oom"
    # an implementation that refuses its input says so by ValueError or NotImplementedError,
    # tiny-llm's registry by its own error, torch's SDPA when pinned to a backend by this sentence
    refusals = (NotImplementedError, ValueError, AttentionUnavailable)
    if isinstance(error, refusals) or "No available kernel" in text:
        return "unsupported"
    return "error"


def one_line(error: Exception) -> str:
    """Return the first line of the message, with the class where that says more."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def explained(error: Exception, caught: Sequence[warnings.WarningMessage]) -> str:
    """Return the message, and what torch warned of before it: why a pinned backend is no choice."""
    text = one_line(error)
    if failure_state(error) != "unsupported" or not caught:
        return text
    # torch ends these with the place in its own source
    reasons = [str(each.message).partition(" (Triggered internally")[0] for each in caught]
    return " | ".join([text, *(" ".join(each.split()) for each in dict.fromkeys(reasons))])
