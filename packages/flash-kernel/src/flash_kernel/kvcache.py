"""Attention over a key-value cache: decoding, one or a few new queries a sequence."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_kernel._triton.config import MAX_SPLITS
from flash_kernel.autocast import autocast, is_autocast
from flash_kernel.cache import Cache, check_cache
from flash_kernel.calls import Call, kind_of, known_call
from flash_kernel.decode import append_to_cache, attend_to_cache, describe_cached
from flash_kernel.dispatch import resolve
from flash_kernel.sequence_ops import cached_forward_appending_op, cached_forward_op
from flash_kernel.validation import check_options
from flash_kernel.variant import Modifiers, Variant, make_variant


@overload
def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    num_splits: int | None = None,
    impl: str = "auto",
) -> Tensor: ...
@overload
def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    num_splits: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Append ``k`` and ``v`` to a cache in place, and return attention to all it then holds.

    Sequence b has N_b keys: the first ``cache_seqlens[b]`` rows of its cache, and the new ones,
    which are written behind them.  ``cache_seqlens`` itself is left as it is.

        >>> import torch
        >>> from flash_kernel import flash_attention, flash_attention_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 8, 16)  # capacity 8
        >>> lengths = torch.zeros(2, dtype=torch.int32)
        >>> q, k, v = (torch.randn(2, 1, 3, 16) for _ in range(3))
        >>> for i in range(3):  # one token after the other
        ...     token = slice(i, i + 1)
        ...     o = flash_attention_with_kvcache(
        ...         q[:, :, token], k_cache, v_cache, k[:, :, token], v[:, :, token],
        ...         cache_seqlens=lengths + i, is_causal=True,
        ...     )
        >>> whole = flash_attention(q, k, v, is_causal=True)
        >>> torch.allclose(o, whole[:, :, 2:], atol=1e-6), torch.equal(k_cache[:, :, :3], k)
        (True, True)

    Args:
        q: Queries ``[B, H, M, D]``, the last M of each sequence.
        k_cache: ``[B, H_kv, capacity, D]``, any strides: a cache ``[B, capacity, H_kv, D]`` is
            passed as a transposed view.  In pages, ``[num_pages, H_kv, page_size, D]``.
        v_cache: ``[B, H_kv, capacity, D_v]``, or in pages.
        k: New keys ``[B, H_kv, M_new, D]``, or None to append nothing.
        v: New values ``[B, H_kv, M_new, D_v]``.
        cache_seqlens: Keys of each sequence before the call, int32 or int64 ``[B]``, on the device
            of q.
        block_table: Pages of each sequence in order, int32 or int64 ``[B, max_pages]``; those
            beyond a sequence's keys are not looked at.
        is_causal: Row i sees the keys ``j <= i + N_b - M``.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``: row i sees the keys from ``i + N_b - M - left`` to
            ``i + N_b - M + right``.  None for a side is unbounded.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        alibi_slopes: ``[H]`` or ``[B, H]``; adds ``-slope * |i + N_b - M - j|``.
        sinks: ``[H]``; one more score in each row's denominator, without a value.
        return_lse: Also return the log-sum-exp of each row's scores.
        num_splits: Into how many parts, worked on at once, the kernels split the keys of a
            sequence; by default that follows from the capacity.
        impl: As for `flash_attention`, but "hopper", which takes no cache.  All but "triton"
            walk the sequences one by one.

    Returns:
        ``o [B, H, M, D_v]``; with ``return_lse`` also ``lse [B, H, M]``, natural logarithm, float32
        (float64 for float64 inputs).

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes or devices that do not fit, or an option that does not exist.
        RuntimeError: A gradient is wanted, which there is none of; or an implementation asked for
            by name cannot run on this device.

    A sequence's result does not depend on the others of the batch, to the bit.  Lengths and pages
    are checked where they lie on the CPU.  The kernels read them on the GPU and make nobody wait,
    so that a call can be captured in a CUDA graph and replayed as the lengths grow; there they are
    not checked, and what would be written beyond the capacity is dropped.

    Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
    """
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    cache = Cache(k_cache, v_cache, cache_seqlens, block_table)
    # as in `_Options`
    options = (is_causal, scale, window, softcap, return_lse, num_splits, impl)
    if is_autocast(q):
        k, v = (None if x is None else autocast(x, q.device.type) for x in (k, v))
        q = autocast(q, q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _dispatched(q, cache, k, v, modifiers, options)
    else:
        o, lse = _dispatched(q, cache, k, v, modifiers, options)
    return o if lse is None or not return_lse else (o, lse)


class _Options(NamedTuple):
    """The public options that are numbers or names."""

    is_causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    return_lse: bool
    num_splits: int | None
    impl: str


def _dispatched(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:
    """Append, and return o and lse from whichever implementation the call gets."""
    if torch.compiler.is_compiling():
        return _traced(q, cache, k, v, modifiers, _Options(*options))
    call = checked_cached_call(q, cache, k, v, modifiers, options)
    if k is not None and v is not None:
        append_to_cache(call, cache, k, v)
    num_new = 0 if k is None else k.shape[2]
    return attend_to_cache(call, q, cache, num_new, modifiers, options[5])


def _traced(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    modifiers: Modifiers,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """Return o and lse inside ``torch.compile``, by one of our operators."""
    variant = _checked_variant(q, cache, k, v, modifiers, options)
    extras = (
        modifiers.alibi_slopes, modifiers.sinks, *variant, options.num_splits, options.impl
    )  # fmt: skip
    if k is None or v is None:
        o, lse = cached_forward_op(q, *cache, *extras)
    else:
        o, lse = cached_forward_appending_op(q, *cache, *extras, k, v)
    return o, lse


def checked_cached_call(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> Call:
    """Check the inputs, and return what is decided for them; see `calls`.

    Raises:
        TypeError, ValueError, RuntimeError: See `flash_attention_with_kvcache`.
    """

    def decide() -> Call:
        chosen = _Options(*options)
        variant = _checked_variant(q, cache, k, v, modifiers, chosen)
        request = describe_cached(q, cache, variant, modifiers, return_lse=chosen.return_lse)
        return Call(resolve(request, impl=chosen.impl, backward="auto"), variant)

    tensors = (q, *cache, k, v, *modifiers)
    return known_call(kind_of("flash_attention_with_kvcache", tensors, options), decide)


def _checked_variant(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    modifiers: Modifiers,
    options: _Options,
) -> Variant:
    """Check the inputs, and return the numbers among the options."""
    check_cache(q, cache, k, v, modifiers)
    _refuse_gradients(q, cache.k, cache.v, k, v, *modifiers)
    _check_num_splits(options.num_splits)
    wishes: dict[str, Any] = dict(zip(_Options._fields[:4], options[:4], strict=True))
    check_options(**wishes, return_lse=options.return_lse)
    return make_variant(q.shape[-1], **wishes)


def _refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise where a gradient is wanted: the cache changes in place, so there is none to be had."""
    present = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in present):
        msg = (
            "flash_attention_with_kvcache has no gradients, and an input requires one. Call it "
            "under torch.no_grad(), or train with flash_attention or flash_attention_varlen."
        )
        raise RuntimeError(msg)
    if forward_ad._current_level < 0:
        return
    tangents = [forward_ad.unpack_dual(x).tangent for x in present]  # type: ignore[no-untyped-call]
    if any(x is not None for x in tangents):
        msg = (
            "flash_attention_with_kvcache has no forward mode, and an input has a tangent. "
            "Pass impl='reference' to flash_attention, which has."
        )
        raise RuntimeError(msg)


def _check_num_splits(num_splits: int | None) -> None:
    is_count = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if num_splits is not None and not (is_count and 1 <= num_splits <= MAX_SPLITS):
        msg = f"`num_splits` must be None or an integer from 1 to {MAX_SPLITS}, got {num_splits!r}."
        raise ValueError(msg)
