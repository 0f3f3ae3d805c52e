"""The same weight under two names: `Transformer`'s, and Hugging Face's."""

import re

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}
BLOCK = re.compile(r"blocks\.(\d+)\.([a-z_]+)\.(.+)")


def hugging_face_name(name: str) -> str:
    """Return the name that transformers gives a weight of `Transformer`.

    >>> hugging_face_name("blocks.3.attention.q_proj.weight")
    'model.layers.3.self_attn.q_proj.weight'
    >>> hugging_face_name("head.weight")
    'lm_head.weight'
    """
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = BLOCK.fullmatch(name)
    if match is None:
        message = f"{name} is no weight of a Transformer"
        raise KeyError(message)
    layer, part, rest = match.groups()
    return f"model.layers.{layer}.{INSIDE[part]}.{rest}"
