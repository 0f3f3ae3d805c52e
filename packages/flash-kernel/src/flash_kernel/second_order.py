"""Gradients of gradients and torch.func: refused, never dropped in silence."""

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


def refuse_transforms(function: str) -> None:
    """Raise if a ``torch.func`` transform is active, which sees through no ``Function`` of ours."""
    if torch._C._are_functorch_transforms_active():
        msg = (
            f"{function} does not run under torch.func transforms (grad, vmap, jvp, ...). "
            "Pass impl='reference', which does."
        )
        raise RuntimeError(msg)
