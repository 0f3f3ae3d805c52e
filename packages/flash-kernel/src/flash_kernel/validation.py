"""What the inputs of attention must be.  Every message says what came and what to do about it."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_kernel.variant import PLAIN, Modifiers

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modifiers: Modifiers = PLAIN,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> None:
    """Raise unless the arguments are a valid input of attention.

    Args:
        q: Queries ``[..., H, M, D]``, strided, in one of `SUPPORTED_DTYPES`, with ``D >= 1``;
            ``[..., M, D]`` with fewer than four dimensions has no heads.
        k: Keys ``[..., H_kv, N, D]`` with the dtype, device and leading dimensions of ``q``;
            ``H_kv`` divides ``H``.
        v: Values ``[..., H_kv, N, D_v]``.
        modifiers: Bias and mask that broadcast to ``[..., M, N]``, slopes ``[H]`` or ``[B, H]``,
            sinks ``[H]``.
        is_causal: True or False.
        scale: None, or a finite number.
        window: None, or two of None and integers from 0.
        softcap: None, or a finite number above 0.
        return_lse: True or False.
        deterministic: True or False.

    ``M``, ``N`` and the leading dimensions may be 0.

    Raises:
        TypeError: Not a tensor, an unsupported kind of tensor or dtype, or mixed dtypes.
        ValueError: Shapes that do not fit each other, or mixed devices.
    """
    check_qkv(q, k, v)
    check_modifiers(q, k, modifiers)
    check_options(
        is_causal=is_causal,
        scale=scale,
        window=window,
        softcap=softcap,
        return_lse=return_lse,
        deterministic=deterministic,
    )


def check_options(
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> None:
    """Raise unless the options that are numbers are valid, whatever the tensors."""
    _check_number("scale", scale)
    _check_number("softcap", softcap, above_zero=True)
    _check_window(window)
    switches = {"is_causal": is_causal, "return_lse": return_lse, "deterministic": deterministic}
    for name, value in switches.items():
        if not isinstance(value, bool):
            msg = f"`{name}` must be True or False, got {value!r}."
            raise TypeError(msg)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the three tensors fit each other; see `check_inputs`."""
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        check_kind(name, tensor)
    for name, tensor in tensors.items():
        _check_rank(name, tensor)
    check_shared(tensors)
    *leading, _, head_dim = q.shape
    if len(leading) >= 2 and k.dim() == q.dim():
        leading = [*leading[:-1], checked_kv_heads(leading[-1], k.shape[-3])]
    check_shape("k", k, [*leading, "N", head_dim], like="q")
    check_shape("v", v, [*k.shape[:-1], "D_v"], like="k")


def check_modifiers(q: Tensor, k: Tensor, modifiers: Modifiers) -> None:
    """Raise unless bias, mask, slopes and sinks fit ``q`` and ``k``."""
    scores = (*q.shape[:-1], k.shape[-2])
    leading = q.shape[:-2] if q.dim() >= 4 else ()
    for name, tensor in modifiers._asdict().items():
        if tensor is None:
            continue
        check_modifier(name, tensor, q.device)
        if name in ("bias", "mask"):
            _check_broadcast(name, tensor, scores)
        else:
            check_by_head(name, tensor, leading)


def check_by_head(name: str, tensor: Tensor, leading: Sequence[int]) -> None:
    """Raise unless sinks or slopes fit the heads, ``leading = [B, H]``, of q."""
    fitting = [tuple(leading[-1:]), tuple(leading)][: 2 if name == "alibi_slopes" else 1]
    if not leading or tuple(tensor.shape) not in fitting:
        shapes = "[H] or [B, H]" if name == "alibi_slopes" else "[H]"
        msg = (
            f"`{name}` must have shape {shapes}, with the heads of q [..., H, M, D], "
            f"got {list(tensor.shape)} for [B, H] = {list(leading)}."
        )
        raise ValueError(msg)


def check_modifier(name: str, tensor: object, device: torch.device) -> None:
    """Raise unless a modifier is a tensor of its kind on a device."""
    if not isinstance(tensor, Tensor):
        msg = f"`{name}` must be a torch.Tensor or None, got {type(tensor).__name__}."
        raise TypeError(msg)
    if (tensor.dtype == torch.bool) != (name == "mask") or tensor.is_complex():
        wanted = "boolean, True where a row may attend" if name == "mask" else "of a float dtype"
        msg = f"`{name}` must be {wanted}, got {_short(tensor.dtype)}."
        raise TypeError(msg)
    check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless a tensor is on the device of q."""
    if tensor.device != device:
        msg = f"`{name}` must be on the device of `q`, {device}, got {tensor.device}."
        raise ValueError(msg)


def checked_kv_heads(num_heads: int, num_heads_kv: int, dim: int = -3) -> int:
    """Return the heads of k; raise unless each serves as many heads of q."""
    if num_heads_kv < 1 or num_heads % num_heads_kv:
        if num_heads == num_heads_kv:
            return num_heads_kv
        msg = (
            f"the heads of `k`, dimension {dim}, must divide the {num_heads} heads of `q`, "
            f"got {num_heads_kv}."
        )
        raise ValueError(msg)
    return num_heads_kv


def _check_broadcast(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    sizes = list(tensor.shape)
    padded = [1] * (len(shape) - len(sizes)) + sizes
    fits = len(padded) == len(shape) and all(
        size in (1, want) for size, want in zip(padded, shape, strict=True)
    )
    if not fits:
        msg = f"`{name}` must broadcast to the scores {list(shape)}, got {sizes}."
        raise ValueError(msg)


def check_kind(name: str, tensor: object) -> None:
    """Raise unless an argument is a dense tensor of a supported dtype."""
    if not isinstance(tensor, Tensor):
        msg = f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}."
        raise TypeError(msg)
    if hasattr(tensor, "to_local"):
        msg = (
            f"`{name}` must be a local tensor, got a {type(tensor).__name__}. Wrap the call in "
            "torch.distributed.tensor.experimental.local_map, batch or heads sharded."
        )
        raise TypeError(msg)
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        msg = f"`{name}` must be a dense, strided tensor, got {kind}. Convert it to a dense tensor."
        raise TypeError(msg)
    if not torch.compiler.is_compiling() and tensor.is_neg():  # Dynamo does not know the bit
        msg = (
            f"`{name}` is the negative of its memory, as of a conjugate. Pass {name}.resolve_neg()."
        )
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


def check_shared(tensors: dict[str, Tensor]) -> None:
    """Refuse to choose a dtype or a device for the caller."""
    dtypes = [_short(tensor.dtype) for tensor in tensors.values()]
    if len(set(dtypes)) > 1:
        msg = f"`q`, `k` and `v` must share one dtype, got {_listed(dtypes)}. Convert them to one."
        raise TypeError(msg)
    devices = [str(tensor.device) for tensor in tensors.values()]
    if len(set(devices)) > 1:
        msg = f"`q`, `k` and `v` must share one device, got {_listed(devices)}. Move them to one."
        raise ValueError(msg)


def check_shape(name: str, tensor: Tensor, expected: list[int | str], *, like: str) -> None:
    """Raise unless a shape is the expected one; a name in it stands for any length."""
    shape = list(tensor.shape)
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or size == want for size, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected))
        msg = (
            f"`{name}` must have shape [{wanted}] to match `{like}`, got {shape}. "
            f"Nothing is broadcast: expand or repeat `{name}` first."
        )
        raise ValueError(msg)


def _check_number(name: str, value: Any, *, above_zero: bool = False) -> None:
    if value is None:
        return
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        msg = f"`{name}` must be a number or None, got {type(value).__name__}."
        raise TypeError(msg)
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        is_finite = False
    if not is_finite:
        msg = f"`{name}` must be finite, got {value}."
        raise ValueError(msg)
    if above_zero and float(value) <= 0:
        msg = f"`{name}` must be above 0, got {value}. Pass None for none."
        raise ValueError(msg)


def _check_window(window: Any) -> None:
    if window is None:
        return
    if not isinstance(window, tuple) or len(window) != 2:
        msg = f"`window` must be None or (left, right), got {window!r}."
        raise TypeError(msg)
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            msg = (
                "each side of `window` must be None, for unbounded, or an integer from 0, "
                f"got {window!r}."
            )
            raise ValueError(msg)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"
