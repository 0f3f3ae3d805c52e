"""Self-attention layers: project, split into heads, attend, join, project."""

from typing import Any

from torch import Tensor, nn

from tiny_llm.attention.automatic import AutomaticAttention
from tiny_llm.attention.backend import AttentionFn
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.attention.resolve import is_search, resolve
from tiny_llm.cache import AttentionCache
from tiny_llm.errors import AttentionUnavailable, ConfigError
from tiny_llm.norm import RMSNorm
from tiny_llm.packing import Packing
from tiny_llm.rope import RotaryEmbedding


class MultiHeadAttention(nn.Module):
    """Self-attention over x ``[B, T, d_model]`` without any notion of position.

    Args:
        d_model: Width of the input and the output.
        num_heads: Number of query heads H.
        attention: Name of a registered backend, "auto", "prefer:a,b", "policy:FILE", or the
            function itself.
        num_kv_heads: Key and value heads H_kv, each serving ``H / H_kv`` query heads (GQA); by
            default as many as query heads.
        head_dim: Width D of a head, by default ``d_model / num_heads``.
        window: Keys a causal row sees, itself included; by default all before it.
        qk_norm_eps: Normalize each head's q and k over D, with this eps (QK-norm).
        qkv_bias: Add a bias to q, k and v.
        layer_index: Which entry of a cache is this layer's.

    Attributes:
        attention_fn: The `AttentionFn` in use.  Assign another one to swap or to watch it.

    Raises:
        ConfigError: The width or the heads do not divide.
        AttentionUnavailable: The backend cannot do what this layer needs.
    """

    attention_fn: AttentionFn

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        attention: str | AttentionFn = "eager",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        qk_norm_eps: float | None = None,
        qkv_bias: bool = False,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % num_heads:
            message = f"`d_model` must be a multiple of `num_heads`, got {d_model} and {num_heads}"
            raise ConfigError(message)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.window = window
        self.layer_index = layer_index
        self.attention_fn = self._choose(attention)

        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, width, bias=qkv_bias)
        self.k_proj = nn.Linear(d_model, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(d_model, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, d_model, bias=False)
        self.q_norm, self.k_norm = (
            nn.Identity() if qk_norm_eps is None else RMSNorm(self.head_dim, qk_norm_eps)
            for _ in range(2)
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
        *,
        is_causal: bool = True,
        packing: Packing | None = None,
    ) -> Tensor:
        """Map x ``[B, T, d_model]`` to the same shape.

        Args:
            x: The new tokens.
            positions: Where they stand, int64 ``[T]`` or ``[B, T]``; by default behind the cache's
                tokens, those of the packing, or from 0.
            cache: Earlier tokens' keys and values, which the new ones see and join.
            is_causal: Each token sees only those before it, and itself.
            packing: The documents in x, none of which sees another; without a cache.

        Raises:
            ConfigError: Both a cache and a packing are given.
            AttentionUnavailable: The attention function lacks what this call needs.
        """
        q = self.q_norm(self._split_heads(self.q_proj(x)))
        k = self.k_norm(self._split_heads(self.k_proj(x)))
        v = self._split_heads(self.v_proj(x))
        if cache is not None and packing is not None:
            raise ConfigError("a packed sequence has no cache: pass one of `cache` and `packing`")
        if positions is None and cache is not None:
            positions = cache.positions(x.shape[1])
        if positions is None and packing is not None:
            positions = packing.positions
        q, k = self.add_positions(q, k, positions)
        options: dict[str, Any] = {} if self.window is None else {"window": self.window}
        if packing is not None:
            options["packing"] = packing
        if cache is not None:
            k, v = cache.update(self.layer_index, k, v)
            lengths = cache.key_lengths(x.shape[1])
            if lengths is not None:
                options["key_lengths"] = lengths
            else:
                k, v = self._within_window(k, v, rows=x.shape[1])
        o = self._attend(q, k, v, is_causal, options)
        joined: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return joined

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hook for subclasses: q and k ``[B, H, T, D]`` on their way to `attention_fn`."""
        return q, k

    def request(self, **known: Any) -> AttentionRequest:
        """Return what this layer asks of a backend, completed by what else is `known`."""
        return AttentionRequest(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            **known,
        )

    def _choose(self, attention: str | AttentionFn) -> AttentionFn:
        if not isinstance(attention, str):
            return attention
        if is_search(attention):
            return AutomaticAttention(attention)
        return resolve(self.request(), attention).attention_fn

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, options: dict[str, Any]
    ) -> Tensor:
        try:
            return self.attention_fn(q, k, v, is_causal=is_causal, **options)
        except TypeError as error:
            lacking = [
                name for name in options if f"unexpected keyword argument '{name}'" in str(error)
            ]
            if not lacking:
                raise
            message = (
                f"the attention of layer {self.layer_index} takes no `{lacking[0]}`, which this "
                "call needs: use 'sdpa' or 'prefer:flash,sdpa'"
            )
            raise AttentionUnavailable(message) from error

    def _within_window(self, k: Tensor, v: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
        """Drop the keys that no row's window reaches, so that kernels need not skip them."""
        if self.window is None:
            return k, v
        reach = self.window + rows - 1
        return k[:, :, -reach:], v[:, :, -reach:]

    def _split_heads(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], -1, self.head_dim)
        return heads.transpose(1, 2)  # [B, H, T, D]


class MultiHeadAttentionWithRoPE(MultiHeadAttention):
    """`MultiHeadAttention` whose queries and keys are rotated by their position.

    Args:
        d_model: Width of the input and the output.
        num_heads: Number of query heads.
        rope: The rotation; one object may serve all layers.
        attention: As in `MultiHeadAttention`, like all that follow.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        window: Keys a causal row sees.
        qk_norm_eps: Normalize q and k, before the rotation.
        qkv_bias: Add a bias to q, k and v.
        layer_index: Which entry of a cache is this layer's.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: RotaryEmbedding,
        attention: str | AttentionFn = "eager",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        qk_norm_eps: float | None = None,
        qkv_bias: bool = False,
        layer_index: int = 0,
    ) -> None:
        super().__init__(
            d_model,
            num_heads,
            attention=attention,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            qk_norm_eps=qk_norm_eps,
            qkv_bias=qkv_bias,
            layer_index=layer_index,
        )
        self.rope = rope

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k ``[B, H, T, D]`` to `positions`, by default 0 to T - 1."""
        return self.rope(q, positions), self.rope(k, positions)
