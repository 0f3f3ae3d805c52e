"""What the inputs of attention must be.  Every message says what came and what to do about it."""

import math
import numbers
from typing import Any

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> None:
    """Raise unless the arguments are a valid input of attention.

    Args:
        q: Queries ``[..., M, D]``, strided, in one of `SUPPORTED_DTYPES`, with ``D >= 1``.
        k: Keys ``[..., N, D]`` with the dtype, device and leading dimensions of ``q``.
        v: Values, shaped like ``k``.
        is_causal: True or False.
        scale: None, or a finite number.

    ``M``, ``N`` and the leading dimensions may be 0.  Nothing is broadcast.

    Raises:
        TypeError: Not a tensor, an unsupported kind of tensor or dtype, or mixed dtypes.
        ValueError: Shapes that do not fit each other, or mixed devices.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        _check_kind(name, tensor)
    for name, tensor in tensors.items():
        _check_rank(name, tensor)
    _check_shared(tensors)
    *leading, _, head_dim = q.shape
    _check_shape("k", k, [*leading, None, head_dim], like="q")
    _check_shape("v", v, list(k.shape), like="k")
    _check_scale(scale)
    _check_flag("is_causal", is_causal)


def _check_kind(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        msg = f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}."
        raise TypeError(msg)
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        msg = f"`{name}` must be a dense, strided tensor, got {kind}. Convert it to a dense tensor."
        raise TypeError(msg)
    if tensor.dtype not in SUPPORTED_DTYPES:
        *names, last = map(_short, SUPPORTED_DTYPES)
        msg = (
            f"`{name}` must be {', '.join(names)} or {last}, got {_short(tensor.dtype)}. "
            f"Convert it, for example with {name}.float()."
        )
        raise TypeError(msg)


def _check_rank(name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2:
        msg = (
            f"`{name}` must have at least two dimensions, [..., sequence, head_dim], "
            f"got shape {list(tensor.shape)}."
        )
        raise ValueError(msg)
    if tensor.shape[-1] < 1:
        msg = f"`{name}` must have a head_dim of at least 1, got shape {list(tensor.shape)}."
        raise ValueError(msg)


def _check_shared(tensors: dict[str, Tensor]) -> None:
    """Refuse to choose a dtype or a device for the caller."""
    dtypes = [_short(tensor.dtype) for tensor in tensors.values()]
    if len(set(dtypes)) > 1:
        msg = f"`q`, `k` and `v` must share one dtype, got {_listed(dtypes)}. Convert them to one."
        raise TypeError(msg)
    devices = [str(tensor.device) for tensor in tensors.values()]
    if len(set(devices)) > 1:
        msg = f"`q`, `k` and `v` must share one device, got {_listed(devices)}. Move them to one."
        raise ValueError(msg)


def _check_shape(name: str, tensor: Tensor, expected: list[int | None], *, like: str) -> None:
    """``None`` in ``expected`` stands for any length and is printed as N."""
    shape = list(tensor.shape)
    fits = len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("N" if want is None else str(want) for want in expected)
        msg = (
            f"`{name}` must have shape [{wanted}] to match `{like}`, got {shape}. "
            f"Nothing is broadcast: expand or repeat `{name}` first."
        )
        raise ValueError(msg)


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not is_number:
        msg = f"`scale` must be a number or None, got {type(scale).__name__}."
        raise TypeError(msg)
    try:
        is_finite = math.isfinite(scale)
    except OverflowError:  # an integer beyond the range of floats
        is_finite = False
    if not is_finite:
        msg = f"`scale` must be finite, got {scale}."
        raise ValueError(msg)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        msg = f"`{name}` must be True or False, got {value!r}."
        raise TypeError(msg)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"
