"""Measured policies: an order of preference for each class of shapes, as a file.

`attn-bench policy` writes one from its results; the choice ``policy:FILE`` reads it.  A policy
holds for the device it was measured on, and is refused on another.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiny_llm.attention.request import AttentionRequest
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import reason_of

KIND, SCHEMA = "attention-policy", 1
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ShapeClass:
    """Shapes with one order of preference; it is for lengths up to `max_seqlen`."""

    dtype: str
    head_dim: int
    is_causal: bool
    max_seqlen: int
    prefer: tuple[str, ...]


@dataclass(frozen=True)
class Policy:
    """What was measured, and where.

    Attributes:
        path: Where it was read from.
        device: Name of the device, as torch gives it.
        device_type: "cuda" or "cpu".
    """

    path: str
    device: str
    device_type: str
    classes: tuple[ShapeClass, ...]

    def order(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return the backends from the fastest on; none if nothing like it was measured.

        Of the classes with the request's dtype, head width and mask it is the first that covers its
        length, else the one with the longest.  What the request does not say yet fits any.

        Raises:
            ConfigError: The policy was measured on another device.
        """
        self._check_device(request)
        fitting = [
            each
            for each in self.classes
            if request.dtype in (None, *(name for name in DTYPES if DTYPES[name] == each.dtype))
            and request.head_dim == each.head_dim
            and request.is_causal == each.is_causal
        ]
        fitting.sort(key=lambda each: each.max_seqlen)
        length = request.seqlen_k or 0
        covering = [each for each in fitting if each.max_seqlen >= length]
        chosen = covering[:1] or fitting[-1:]
        return chosen[0].prefer if chosen else ()

    def _check_device(self, request: AttentionRequest) -> None:
        there = None
        if request.device == "cuda" and torch.cuda.is_available():
            there = torch.cuda.get_device_name()
        is_other = request.device not in (None, self.device_type) or there not in (
            None,
            self.device,
        )
        if is_other:
            message = (
                f"{self.path} was measured on {self.device}, not on {there or request.device}: "
                "measure here with attn-bench, or choose 'auto'"
            )
            raise ConfigError(message)


def read_policy(path: str) -> Policy:
    """Read a file that `attn-bench policy` wrote; one that has not changed is read once.

    Raises:
        FileError: It cannot be read.
        FormatError: It is no policy.
    """
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        message = f"cannot read attention policy {path}: {reason_of(error)}"
        raise FileError(message) from error


@functools.lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> Policy:
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["kind"] != KIND or content["schema"] != SCHEMA:
            raise ValueError("its kind and schema are others")
        classes = tuple(_shape_class(each) for each in content["classes"])
        return Policy(path, str(content["device"]), str(content["device_type"]), classes)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is no attention policy of schema {SCHEMA}: {error}"
        raise FormatError(message) from error


def _shape_class(entry: dict[str, Any]) -> ShapeClass:
    names = entry["prefer"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("`prefer` must be a list of names")
    return ShapeClass(
        str(entry["dtype"]),
        int(entry["head_dim"]),
        bool(entry["is_causal"]),
        int(entry["max_seqlen"]),
        tuple(names),
    )
