"""Gradients of gradients: refused, never dropped in silence."""

import torch


def refuse_second_order() -> None:
    """Raise if a backward is itself being recorded, that is, under ``create_graph=True``.

    torch's ``once_differentiable`` looks at the incoming gradient alone, and would drop the terms
    that reach q, k and v without a word.
    """
    if torch.is_grad_enabled():
        msg = (
            "this attention is differentiable once, and create_graph=True asks for more. "
            "Pass impl='reference', which is differentiable any number of times."
        )
        raise RuntimeError(msg)
