"""Self-attention layers: project, split into heads, attend, join, project."""

from torch import Tensor, nn

from tiny_llm.attention.registry import AttentionFn, get
from tiny_llm.errors import ConfigError
from tiny_llm.rope import RotaryEmbedding


class MultiHeadAttention(nn.Module):
    """Self-attention over x ``[B, T, d_model]`` without any notion of position.

    Args:
        d_model: Width of the input and the output.
        num_heads: Number of heads, each ``d_model // num_heads`` wide.
        attention: Name of a registered backend, or the function itself.

    Attributes:
        attention_fn: The `AttentionFn` in use.  Assign another one to swap or to watch it.

    Raises:
        ConfigError: `d_model` is not a multiple of `num_heads`.
    """

    attention_fn: AttentionFn

    def __init__(
        self, d_model: int, num_heads: int, *, attention: str | AttentionFn = "eager"
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            message = f"`d_model` must be a multiple of `num_heads`, got {d_model} and {num_heads}"
            raise ConfigError(message)
        self.num_heads = num_heads
        self.attention_fn = get(attention) if isinstance(attention, str) else attention
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, *, is_causal: bool = True) -> Tensor:
        """Map x ``[B, T, d_model]`` to the same shape."""
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(x))
        v = self._split_heads(self.v_proj(x))
        q, k = self.add_positions(q, k)
        o = self.attention_fn(q, k, v, is_causal=is_causal)
        joined: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return joined

    def add_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Hook for subclasses: q and k ``[B, H, T, D]`` on their way to `attention_fn`."""
        return q, k

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, seq_len, d_model = x.shape
        heads = x.view(batch, seq_len, self.num_heads, d_model // self.num_heads)
        return heads.transpose(1, 2)  # [B, H, T, D]


class MultiHeadAttentionWithRoPE(MultiHeadAttention):
    """`MultiHeadAttention` whose queries and keys are rotated by their position.

    Args:
        d_model: Width of the input and the output.
        num_heads: Number of heads.
        rope: The rotation; one object may serve all layers.
        attention: Name of a registered backend, or the function itself.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rope: RotaryEmbedding,
        attention: str | AttentionFn = "eager",
    ) -> None:
        super().__init__(d_model, num_heads, attention=attention)
        self.rope = rope

    def add_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k ``[B, H, T, D]``; row t has position t."""
        return self.rope(q), self.rope(k)
