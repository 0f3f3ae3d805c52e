"""From a `Transformer` to a folder that Hugging Face's transformers loads."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tiny_llm.errors import ConfigError, FileError
from tiny_llm.files import reason_of
from tiny_llm.pretrained.configuration import to_hugging_face
from tiny_llm.pretrained.folder import CONFIG, INDEX, WEIGHTS
from tiny_llm.pretrained.names import hugging_face_name
from tiny_llm.transformer import Transformer

MAX_SHARD_BYTES = 5_000_000_000


def save_pretrained(
    model: Transformer, folder: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model as Llama, Qwen2, Qwen3 or Mistral, whichever computes the same.

    The folder appears whole or not at all.

    Args:
        model: Its weights may be on any device, in one dtype.
        folder: Must not exist yet.
        max_shard_bytes: Weights beyond this go to further files; one weight is never split.

    Raises:
        ConfigError: No architecture has this mix of settings, or the limit is not above 0.
        FileError: The folder exists or cannot be written.
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        message = f"`max_shard_bytes` must be at least 1, got {max_shard_bytes}"
        raise ConfigError(message)
    if folder.exists():
        message = f"{folder} exists already; name a new folder"
        raise FileError(message)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    content = to_hugging_face(model.config, dtype=dtype)
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        _remove(temporary)  # what a killed process left behind
        temporary.mkdir(parents=True)
        _write_json(temporary / CONFIG, content)
        _write_weights(model, temporary, max_shard_bytes)
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        _remove(temporary)
        reason = reason_of(error) if isinstance(error, OSError) else error
        message = f"cannot write {folder}: {reason}"
        raise FileError(message) from error


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _write_weights(model: Transformer, folder: Path, max_shard_bytes: int) -> None:
    weights = {
        hugging_face_name(name): parameter.detach() for name, parameter in model.named_parameters()
    }
    shards = list(_shards(weights, max_shard_bytes))
    if len(shards) == 1:
        _write_shard(folder / WEIGHTS, weights, shards[0])
        return
    places = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file_name, weights, names)
        places.update(dict.fromkeys(names, file_name))
    total = sum(weight.nbytes for weight in weights.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _shards(weights: dict[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, weight in weights.items():
        if names and size + weight.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += weight.nbytes
    yield names


def _write_shard(path: Path, weights: dict[str, Tensor], names: list[str]) -> None:
    held = {name: weights[name].cpu().contiguous() for name in names}
    save_file(held, path, metadata={"format": "pt"})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
