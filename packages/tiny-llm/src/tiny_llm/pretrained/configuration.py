"""`config.json` of Hugging Face, to and from `ModelConfig`.

What tiny-llm does not compute is refused, never ignored: other activations, biases it does not
have, other kinds of RoPE scaling, quantized weights.
"""

from typing import Any

from tiny_llm.errors import ConfigError, FormatError
from tiny_llm.layers import format_layers
from tiny_llm.model_config import ModelConfig
from tiny_llm.rope import FEW_TURNS, MANY_TURNS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# setting: the only value that we compute, which is also what an absent one means
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
WINDOWED = "sliding_attention"
MAX_POSITIONS = 2048  # transformers' default where a config says nothing


def from_hugging_face(content: dict[str, Any], *, attention: str | dict[str, str]) -> ModelConfig:
    """Return the `ModelConfig` of a `config.json`.

    Raises:
        FormatError: It describes something else, lacks a setting, or has an impossible one.
    """
    kind = content.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        message = f"`model_type` must be one of {known}, got {kind!r}"
        raise FormatError(message)
    for name, expected in FIXED.items():
        found = content.get(name, expected)
        if found != expected:
            message = f"`{name}` must be {expected!r}, got {found!r}: tiny-llm has nothing else"
            raise FormatError(message)
    try:
        return ModelConfig(
            vocab_size=content["vocab_size"],
            d_model=content["hidden_size"],
            d_ff=content["intermediate_size"],
            num_layers=content["num_hidden_layers"],
            num_heads=content["num_attention_heads"],
            num_kv_heads=content.get("num_key_value_heads"),
            head_size=_head_size(content),
            max_seq_len=content.get("max_position_embeddings", MAX_POSITIONS),
            norm_eps=content.get("rms_norm_eps", 1e-6),
            tie_embeddings=content.get("tie_word_embeddings", False),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            attention=attention,
            **_rope_settings(content),
            **_window_settings(kind, content),
        )
    except KeyError as error:
        message = f"the setting {error} is missing"
        raise FormatError(message) from error
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        # the others come from values of another type, such as text in place of a number
        raise FormatError(str(error)) from error


def _head_size(content: dict[str, Any]) -> int | None:
    """Return the width of a head where it is not the one that the other settings give."""
    usual = content["hidden_size"] / content["num_attention_heads"]
    size: int | None = content.get("head_dim")
    return None if size == usual else size


def _rope_settings(content: dict[str, Any]) -> dict[str, Any]:
    """Read the rotation: `rope_parameters` of today's files, or the two settings of older ones."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", content.get("rope_theta", 10_000.0)))
    if kind == "default":
        return {"rope_theta": theta}
    turns = (rope.get("low_freq_factor"), rope.get("high_freq_factor"))
    if kind != "llama3" or turns != (FEW_TURNS, MANY_TURNS):
        message = (
            f"RoPE must be of the kind 'default' or 'llama3' with the factors "
            f"{FEW_TURNS} and {MANY_TURNS}, got {kind!r} with {turns[0]} and {turns[1]}"
        )
        raise FormatError(message)
    return {
        "rope_theta": theta,
        "rope_factor": float(rope["factor"]),
        "rope_original_len": rope["original_max_position_embeddings"],
    }


def _window_settings(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    window, num_layers = content.get("sliding_window"), content["num_hidden_layers"]
    if kind == "mistral":
        return {"sliding_window": window}
    if kind == "llama" or window is None or not content.get("use_sliding_window", False):
        return {}
    types = content.get("layer_types")
    if types is None:
        full = content.get("max_window_layers", num_layers)
        layers = frozenset(range(full, num_layers))
    else:
        layers = frozenset(index for index, each in enumerate(types) if each == WINDOWED)
    if not layers:
        return {}
    return {"sliding_window": window, "window_layers": format_layers(layers, num_layers)}


def to_hugging_face(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the `config.json` that transformers reads as the same model.

    Raises:
        ConfigError: No architecture of transformers has this mix of settings.
    """
    kind = architecture_of(config)
    windows = [config.window_at(layer) for layer in range(config.num_layers)]
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name in transformers 4
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **_rope_content(config),
    }
    if kind == "mistral":
        content["sliding_window"] = config.sliding_window
    elif kind.startswith("qwen"):
        content["use_sliding_window"] = any(windows)
        content["sliding_window"] = config.sliding_window
        content["layer_types"] = [WINDOWED if each else "full_attention" for each in windows]
    return content


def _rope_content(config: ModelConfig) -> dict[str, Any]:
    theta = {"rope_theta": config.rope_theta}
    if config.rope_factor == 1:
        return {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": FEW_TURNS,
        "high_freq_factor": MANY_TURNS,
        "original_max_position_embeddings": config.rope_original_len,
    }
    # `rope_theta` and `rope_scaling` are the names in transformers 4
    return {**theta, "rope_scaling": scaling, "rope_parameters": {**scaling, **theta}}


def architecture_of(config: ModelConfig) -> str:
    """Return the `model_type` that computes what `config` does.

    Raises:
        ConfigError: There is none.
    """
    if config.qk_norm and config.qkv_bias:
        raise ConfigError("no Hugging Face architecture here has both `qk_norm` and `qkv_bias`")
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    windows = {config.window_at(layer) for layer in range(config.num_layers)}
    if windows == {None}:
        return "llama"
    if len(windows) == 1:
        return "mistral"
    message = (
        "sliding windows in some layers only are Qwen's: set `qk_norm` or `qkv_bias`, "
        f"or window_layers='*', got window_layers={config.window_layers!r}"
    )
    raise ConfigError(message)
