"""From a Hugging Face folder to a `Transformer`: every weight, and nothing but these."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tiny_llm.errors import FormatError
from tiny_llm.pretrained.configuration import from_hugging_face
from tiny_llm.pretrained.folder import CONFIG, SafetensorsFile, locate_weights, opened, read_config
from tiny_llm.pretrained.names import hugging_face_name
from tiny_llm.transformer import Transformer

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# tables that old versions of transformers stored beside the weights; we compute them
COMPUTED = "rotary_emb.inv_freq"


def load_pretrained(
    folder: str | Path,
    *,
    attention: str | dict[str, str] = "eager",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Transformer:
    """Return the model in a folder that Hugging Face's transformers wrote, or `save_pretrained`.

    Args:
        folder: Has `config.json` and `model.safetensors`, or several files and their index.
        attention: As in `ModelConfig`.
        device: Where to put the model.
        dtype: To convert the weights to; by default what `config.json` says, or float32.

    Raises:
        FileError: A file is missing or cannot be read.
        FormatError: A file is damaged, the architecture is another, or a weight is missing,
            unexpected or of another shape; every such weight is named.
        AttentionUnavailable: See `Transformer`.
    """
    folder = Path(folder)
    content = read_config(folder)
    try:
        config = from_hugging_face(content, attention=attention)
    except FormatError as error:
        message = f"{folder / CONFIG}: {error}"
        raise FormatError(message) from error
    if dtype is None:
        dtype = _dtype_of(folder, content.get("dtype") or content.get("torch_dtype"))
    places = {name: path for name, path in locate_weights(folder).items() if COMPUTED not in name}
    with torch.random.fork_rng(devices=[]):  # the initial weights are about to be overwritten
        model = Transformer(config).to(dtype)
    targets = _targets(model)
    tied = config.tie_embeddings
    _check_names(folder, set(places), set(targets), optional={HEAD} if tied else set())
    for path in sorted(set(places.values())):
        with opened(path) as file:
            _copy_weights(path, file, targets)
    if tied and HEAD in places:
        _check_tied(places)
    return model.to(device)


def _dtype_of(folder: Path, name: str | None) -> torch.dtype:
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        message = f"{folder / CONFIG}: `dtype` must be the name of a torch dtype, got {name!r}"
        raise FormatError(message)
    return dtype


def _targets(model: Transformer) -> dict[str, Tensor]:
    """Return the model's weights by their Hugging Face names; a tied head is left out."""
    return {
        hugging_face_name(name): parameter.detach() for name, parameter in model.named_parameters()
    }


def _check_names(
    folder: Path, found: Collection[str], expected: Collection[str], *, optional: Collection[str]
) -> None:
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected) - set(optional))
    problems = [
        f"{kind} {', '.join(names)}"
        for kind, names in (("misses", missing), ("has unexpected", unexpected))
        if names
    ]
    if problems:
        message = f"{folder} does not fit its {CONFIG}: it {' and '.join(problems)}"
        raise FormatError(message)


def _copy_weights(path: Path, file: SafetensorsFile, targets: Mapping[str, Tensor]) -> None:
    names = [name for name in file.keys() if name in targets]  # noqa: SIM118, not a mapping
    wrong = [
        f"{name} {list(file.shape(name))} instead of {list(targets[name].shape)}"
        for name in names
        if file.shape(name) != tuple(targets[name].shape)
    ]
    if wrong:
        message = f"{path} has weights of another shape: {', '.join(wrong)}"
        raise FormatError(message)
    for name in names:
        targets[name].copy_(file.read(name))


def _check_tied(places: Mapping[str, Path]) -> None:
    """Raise if a file brings a head of its own for a model that shares the embedding's."""
    with opened(places[HEAD]) as file:
        head = file.read(HEAD)
    with opened(places[EMBEDDING]) as file:
        embedding = file.read(EMBEDDING)
    if not torch.equal(head, embedding):
        message = (
            f"{places[HEAD]}: {HEAD} differs from {EMBEDDING}, "
            f"but {CONFIG} says `tie_word_embeddings`: set it to false"
        )
        raise FormatError(message)
