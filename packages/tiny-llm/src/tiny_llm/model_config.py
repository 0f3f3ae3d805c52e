"""What a model is: a frozen record, checked when it is made, and presets of it."""

from dataclasses import dataclass, field

from tiny_llm.errors import ConfigError
from tiny_llm.layers import parse_layers
from tiny_llm.settings import check_positive_finite, check_range, check_types, setting

BYTE_VOCAB_SIZE = 257  # `ByteTokenizer.vocab_size`: 256 bytes and the end of a document

SIZES = (
    "vocab_size",
    "d_model",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "d_ff",
    "max_seq_len",
    "sliding_window",
    "rope_original_len",
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a `Transformer` and the attention it computes with.

    `attention` is a choice for all layers, or a mapping from layers to choices such as
    ``{"0": "eager", "1-7": "flash"}``, where ``"*"`` stands for the layers not named otherwise.  A
    choice is a backend's name, ``"auto"``, ``"prefer:flash,sdpa"``, or ``"policy:FILE"`` with what
    `attn-bench policy` wrote (see `tiny_llm.attention`).

    Raises:
        ConfigError: A field is out of range, or the width cannot be split into heads.
    """

    vocab_size: int = setting(BYTE_VOCAB_SIZE, "number of token ids")
    d_model: int = setting(128, "width of the residual stream")
    num_layers: int = setting(4, "number of blocks")
    num_heads: int = setting(4, "attention heads per block; divides d_model")
    d_ff: int = setting(384, "hidden width of the feed-forward layer")
    max_seq_len: int = setting(128, "longest sequence the model can see, in tokens")
    rope_theta: float = setting(10_000.0, "base of the rotary wavelengths")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm")
    tie_embeddings: bool = setting(True, "share the embedding's weight with the output layer")
    attention: str | dict[str, str] = field(  # ruff takes no other call as a dict's default
        default="eager",
        metadata={
            "help": "attention backend: eager (readable), sdpa, flash, auto, ...; or one per layer"
        },
    )
    num_kv_heads: int | None = setting(
        None,
        "heads of the keys and values, each shared by several query heads (default: num_heads)",
    )
    head_size: int | None = setting(None, "width of one head (default: d_model / num_heads)")
    qk_norm: bool = setting(False, "normalize each head's queries and keys before the rotation")
    qkv_bias: bool = setting(False, "add a bias to the query, key and value projections")
    sliding_window: int | None = setting(
        None, "keys a query sees, itself included, in the windowed layers (default: all before it)"
    )
    rope_factor: float = setting(
        1.0, "Llama 3's stretch of the longest rotary wavelengths (1: none)"
    )
    rope_original_len: int = setting(8192, "sequence length that `rope_factor` stretches from")
    window_layers: str = setting(
        "*", "layers that have the sliding window: '0,2-5', or '*' for all"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in SIZES:
            check_range(self, name, minimum=1)
        for name in ("rope_theta", "norm_eps"):
            check_positive_finite(self, name)
        check_range(self, "rope_factor", minimum=1)
        self._check_heads()
        parse_layers(self.window_layers, self.num_layers)
        for layer in range(self.num_layers):
            self.attention_at(layer)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def window_at(self, layer: int) -> int | None:
        """Return the sliding window of a layer in keys, or None if it sees all before it."""
        windowed = parse_layers(self.window_layers, self.num_layers)
        return self.sliding_window if layer in windowed else None

    def attention_at(self, layer: int) -> str:
        """Return the attention chosen for a layer.

        Raises:
            ConfigError: The mapping names the layer twice or not at all.
        """
        if isinstance(self.attention, str):
            return self.attention
        chosen = [
            choice
            for layers, choice in self.attention.items()
            if layers.strip() != "*" and layer in parse_layers(layers, self.num_layers)
        ]
        if not chosen and "*" in self.attention:
            return self.attention["*"]
        if len(chosen) != 1:
            found = "no attention" if not chosen else f"several attentions ({', '.join(chosen)})"
            message = (
                f"`attention` names {found} for layer {layer}; name one, or use '*' for the rest"
            )
            raise ConfigError(message)
        return chosen[0]

    def _check_heads(self) -> None:
        if self.head_size is None and self.d_model % self.num_heads:
            message = (
                f"`d_model` must be a multiple of `num_heads`, "
                f"got d_model={self.d_model} and num_heads={self.num_heads}"
            )
            raise ConfigError(message)
        if self.head_dim % 2:
            source = (
                f"d_model / num_heads must be even, because RoPE rotates pairs, got "
                f"{self.d_model} / {self.num_heads} = {self.head_dim}"
                if self.head_size is None
                else f"`head_size` must be even, because RoPE rotates pairs, got {self.head_size}"
            )
            raise ConfigError(source)
        if self.num_heads % self.kv_heads:
            message = (
                f"`num_heads` must be a multiple of `num_kv_heads`, "
                f"got num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads}"
            )
            raise ConfigError(message)


PRESETS: dict[str, ModelConfig] = {
    # trains on a laptop's CPU in a minute
    "toy": ModelConfig(),
    "10m": ModelConfig(
        vocab_size=4096,
        d_model=320,
        num_layers=6,
        num_heads=5,
        num_kv_heads=5,
        d_ff=864,
        max_seq_len=512,
    ),
    # the shape of GPT-2 small; the feed-forward layer has three matrices instead of two
    "124m": ModelConfig(
        vocab_size=50_304,
        d_model=768,
        num_layers=12,
        num_heads=12,
        d_ff=2048,
        max_seq_len=1024,
    ),
    "350m": ModelConfig(
        vocab_size=50_304,
        d_model=1024,
        num_layers=24,
        num_heads=16,
        num_kv_heads=8,
        d_ff=3072,
        max_seq_len=2048,
        qk_norm=True,
    ),
    "1b": ModelConfig(
        vocab_size=50_304,
        d_model=2048,
        num_layers=18,
        num_heads=16,
        num_kv_heads=8,
        d_ff=6144,
        max_seq_len=4096,
        rope_theta=500_000.0,
        qk_norm=True,
    ),
}


def preset(name: str) -> ModelConfig:
    """Return the configuration called `name`: ``toy``, ``10m``, ``124m``, ``350m`` or ``1b``.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in PRESETS:
        message = f"unknown preset {name!r}; there are {', '.join(PRESETS)}"
        raise ConfigError(message)
    return PRESETS[name]
