"""The language model: a pre-norm decoder of the Llama family.

What happens to the tokens ``[B, T]``:

    embedding                               x [B, T, d_model]
    num_layers times a Block:
        x = x + attention(norm(x))
        x = x + feed_forward(norm(x))
    norm, head                              logits [B, T, vocab_size]
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from tiny_llm.attention.multi_head import MultiHeadAttentionWithRoPE
from tiny_llm.attention.request import capability_of
from tiny_llm.attention.resolve import Resolution, resolve_all
from tiny_llm.cache import AttentionCache
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError
from tiny_llm.feed_forward import SwiGLU
from tiny_llm.norm import RMSNorm
from tiny_llm.packing import Packing
from tiny_llm.rope import RotaryEmbedding

INIT_STD = 0.02


class Block(nn.Module):
    """Attention, then the feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttentionWithRoPE(
            config.d_model,
            config.num_heads,
            rope=rope,
            attention=config.attention_at(layer),
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.window_at(layer),
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            qkv_bias=config.qkv_bias,
            layer_index=layer,
        )
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Map x ``[B, T, d_model]`` to the same shape; see `MultiHeadAttention.forward`."""
        x = x + self.attention(self.attention_norm(x), positions, cache, packing=packing)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """The decoder described by a `ModelConfig`, freshly initialized.

    The weights are drawn from torch's global generator: call `torch.manual_seed` before.

    Raises:
        UnknownAttentionError: `config.attention` names a backend that is not registered.
        AttentionUnavailable: A layer's backend cannot do what the model needs, or its package is
            missing (then also a `MissingExtraError`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rope = RotaryEmbedding(
            config.head_dim,
            config.max_seq_len,
            theta=config.rope_theta,
            factor=config.rope_factor,
            original_len=config.rope_original_len,
        )
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            Block(config, rope, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._init_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Return the logits ``[B, T, vocab_size]`` of each next token, for tokens ``[B, T]``.

        See `hidden_states` for the arguments and errors.
        """
        logits: Tensor = self.head(self.hidden_states(tokens, positions, cache, packing))
        return logits

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Return what the output layer gets, ``[B, T, d_model]``, for tokens ``[B, T]``.

        Args:
            tokens: Token ids, int64.
            positions: Where they stand, int64 ``[T]`` or ``[B, T]``; by default behind the cache's
                tokens, or from 0.
            cache: Keys and values of the tokens before these; see `tiny_llm.cache`.
            packing: The documents of a packed batch; each token then sees its own document only,
                and positions are counted within it.

        Raises:
            ConfigError: `tokens` is not a matrix of int64, or is longer than `max_seq_len`.
        """
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            message = (
                f"`tokens` must have shape [B, T] and dtype int64, "
                f"got {list(tokens.shape)} and {tokens.dtype}"
            )
            raise ConfigError(message)
        x = self.embedding(tokens)  # [B, T, d_model]
        for block in self.blocks:
            x = block(x, positions, cache, packing)
        out: Tensor = self.norm(x)
        return out

    def resolve_attention(
        self,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seq_len: int | None = None,
        needs_grad: bool = False,
        packed: bool = False,
        ragged: bool = False,
    ) -> tuple[Resolution, ...]:
        """Fix each layer's backend for what it is going to be given; return the decisions.

        An explicit choice is checked against it, "auto" and "prefer:..." are settled.

        Args:
            device: Where the model will run.
            dtype: What its attention will compute in (under autocast, autocast's).
            seq_len: Length of its sequences, if it is always the same.
            needs_grad: Whether it will be trained.
            packed: Whether its sequences hold several documents, given as a `Packing`.
            ragged: Whether it reads a cache of sequences of different lengths, or a static one.

        Raises:
            AttentionUnavailable: A layer's choice cannot serve; says why and what to do.
        """
        device = torch.device(device)
        known = {
            "seqlen_q": seq_len,
            "seqlen_k": seq_len,
            "device": device.type,
            "capability": capability_of(device),
            "dtype": str(dtype).removeprefix("torch."),
            "needs_grad": needs_grad,
            "packed": packed,
            "ragged": ragged,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        layers = [cast("Block", block).attention for block in self.blocks]
        resolutions = resolve_all(
            (layer.request(**known), self.config.attention_at(index))
            for index, layer in enumerate(layers)
        )
        for layer, resolution in zip(layers, resolutions, strict=True):
            layer.attention_fn = resolution.attention_fn
        return resolutions

    def num_parameters(self) -> int:
        """Count the trainable numbers; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # 2 num_layers outputs are summed up: scale them so that the sum keeps its variance (GPT-2)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=residual_std)
