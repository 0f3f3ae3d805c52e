"""Hugging Face checkpoints: Llama, Qwen2, Qwen3 and Mistral, in and out.

    model = load_pretrained("path/to/folder", attention="sdpa")
    save_pretrained(model, "path/to/new/folder")

A folder has a `config.json` and one `model.safetensors`, or several with an index.  Nothing is
downloaded.
"""

from tiny_llm.pretrained.loading import load_pretrained
from tiny_llm.pretrained.saving import save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
