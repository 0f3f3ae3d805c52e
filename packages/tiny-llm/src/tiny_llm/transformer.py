"""The language model: a pre-norm decoder of the Llama family.

What happens to the tokens ``[B, T]``:

    embedding                               x [B, T, d_model]
    num_layers times a Block:
        x = x + attention(norm(x))
        x = x + feed_forward(norm(x))
    norm, head                              logits [B, T, vocab_size]
"""

import math

import torch
from torch import Tensor, nn

from tiny_llm.attention.multi_head import MultiHeadAttentionWithRoPE
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError
from tiny_llm.feed_forward import SwiGLU
from tiny_llm.norm import RMSNorm
from tiny_llm.rope import RotaryEmbedding

INIT_STD = 0.02


class Block(nn.Module):
    """Attention, then the feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttentionWithRoPE(
            config.d_model, config.num_heads, rope=rope, attention=config.attention
        )
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[B, T, d_model]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """The decoder described by a `ModelConfig`, freshly initialized.

    The weights are drawn from torch's global generator: call `torch.manual_seed` before.

    Raises:
        UnknownAttentionError: `config.attention` is not registered.
        MissingExtraError: Its optional package is not installed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rope = RotaryEmbedding(config.head_dim, config.max_seq_len, theta=config.rope_theta)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, rope) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, T, vocab_size]`` of each next token, for tokens ``[B, T]``.

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
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def num_parameters(self) -> int:
        """Count the trainable numbers; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
        # 2 num_layers outputs are summed up: scale them so that the sum keeps its variance (GPT-2)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=residual_std)
