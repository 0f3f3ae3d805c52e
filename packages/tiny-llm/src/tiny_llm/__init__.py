"""A small Llama-style language model whose attention is chosen through a registry.

Start reading at `tiny_llm.transformer`; the attention backends are in `tiny_llm.attention`.
This module imports nothing, so that `tiny-llm --help` answers at once.
"""

__version__ = "0.1.0"
