"""Reading a checkpoint folder: its settings, and which file holds which weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiny_llm.errors import FileError, FormatError
from tiny_llm.files import read_json_object, reason_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in `config.json`.

    Raises:
        FileError: There is none, or it cannot be read.
        FormatError: It is not a JSON object.
    """
    return read_json_object(folder / CONFIG)


def locate_weights(folder: Path) -> dict[str, Path]:
    """Return the file of each weight, by its Hugging Face name.

    Raises:
        FileError: There are no weights, or a file is missing or cannot be read.
        FormatError: A file is damaged, or the index and the files contradict each other.
    """
    if (folder / INDEX).exists():
        return _locate_shards(folder)
    path = folder / WEIGHTS
    if not path.exists():
        message = f"{folder} has neither {WEIGHTS} nor {INDEX}"
        raise FileError(message)
    with opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _locate_shards(folder: Path) -> dict[str, Path]:
    places = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(map(_is_file_name, places.values())):
        message = f"{folder / INDEX} must have a `weight_map` of names to file names"
        raise FormatError(message)
    absent = sorted({name for name in places.values() if not (folder / name).exists()})
    if absent:
        message = f"{folder} lacks {', '.join(absent)}, named in {INDEX}"
        raise FileError(message)
    for name in sorted(set(places.values())):
        with opened(folder / name) as file:
            promised = {weight for weight, place in places.items() if place == name}
            held = set(file.keys())
        if promised != held:
            wrong = ", ".join(sorted(promised ^ held))
            message = f"{folder / name} and {INDEX} disagree about {wrong}"
            raise FormatError(message)
    return {weight: folder / name for weight, name in places.items()}


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and Path(value).name == value


class SafetensorsFile:
    """An open safetensors file; weights are read one at a time.

    Args:
        path: The file, for messages.
        handle: What `safe_open` gave.
    """

    def __init__(self, path: Path, handle: Any) -> None:
        self._path, self._handle = path, handle

    def keys(self) -> list[str]:
        """Return the names of the weights."""
        return list(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight without reading it."""
        return tuple(self._handle.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a weight on the CPU."""
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor


@contextmanager
def opened(path: Path) -> Iterator[SafetensorsFile]:
    """Open a safetensors file.

    Raises:
        FileError: It cannot be read.
        FormatError: It is truncated, damaged or something else.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield SafetensorsFile(path, handle)
    except SafetensorError as error:
        message = f"{path} is damaged or no safetensors file: {error}"
        raise FormatError(message) from error
    except OSError as error:
        message = f"cannot read {path}: {reason_of(error)}"
        raise FileError(message) from error
