"""TOML files of settings: read as defaults of the command line, written beside every run."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from tiny_llm.config import ModelConfig, preset
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import atomic_write, reason_of
from tiny_llm.options import DERIVED, ModelOptions, TrainOptions

FILE_NAME = "config.toml"
# what only a command line says, about where the other values come from
NOT_SAVED = frozenset({"config", "preset", "resume"})


def train_defaults(arguments: Sequence[str], *, is_resume: bool) -> TrainOptions:
    """Return what `train` starts from before its command line is applied.

    Args:
        arguments: The command line, in which `--preset`, `--config`, `--resume` and `--out` count.
        is_resume: The command is `resume`.

    Raises:
        ConfigError: A preset or a setting is unknown.
        FileError: A file cannot be read, or the run to go on with is not there.
        FormatError: A file is no TOML.
    """
    defaults = TrainOptions()
    if is_resume or "--resume" in arguments:
        out = _value_of(arguments, "--out")
        if not out:
            raise ConfigError("to go on with a run, name its folder with --out")
        path = Path(out) / FILE_NAME
        if not path.exists():
            message = f"{out} holds no run to go on with: there is no {path}"
            raise FileError(message)
        defaults = replace(_merged(defaults, read_settings(path), path), resume=True)
    if name := _value_of(arguments, "--preset"):
        shape = {k: v for k, v in asdict(preset(name)).items() if k not in DERIVED}
        defaults = replace(defaults, model=ModelOptions(**shape))
    if config := _value_of(arguments, "--config"):
        defaults = _merged(defaults, read_settings(Path(config)), Path(config))
    return defaults


def model_config(options: TrainOptions, *, vocab_size: int) -> ModelConfig:
    """Return the configuration of the model that the options describe.

    Raises:
        ConfigError: They contradict each other.
    """
    shape = {item.name: getattr(options.model, item.name) for item in fields(options.model)}
    shape["attention"] = parse_attention(shape["attention"])
    return ModelConfig(**shape, vocab_size=vocab_size, max_seq_len=options.training.seq_len)


def parse_attention(text: str | dict[str, str]) -> str | dict[str, str]:
    """Return a choice for all layers, or of ``0-3=eager;*=flash`` one for each.

    >>> parse_attention("prefer:flash,sdpa")
    'prefer:flash,sdpa'
    >>> parse_attention("0-3=eager; *=flash")
    {'0-3': 'eager', '*': 'flash'}
    """
    if isinstance(text, dict) or "=" not in text:
        return text
    pairs = (each.partition("=") for each in text.split(";") if each.strip())
    return {layers.strip(): choice.strip() for layers, _, choice in pairs}


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        FileError: It cannot be read.
        FormatError: It is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read {path}: {reason_of(error)}"
        raise FileError(message) from error
    except ValueError as error:
        message = f"{path} is no TOML: {error}"
        raise FormatError(message) from error


def write_settings(path: Path, options: TrainOptions) -> None:
    """Write options as TOML that `read_settings` and `--config` take.

    Raises:
        FileError: It cannot be written.
    """
    top: list[str] = []
    tables: list[str] = []
    for item in fields(options):
        value = getattr(options, item.name)
        if is_dataclass(value):
            pairs = {each.name: getattr(value, each.name) for each in fields(value)}
            lines = [f"{name} = {_toml(v)}" for name, v in pairs.items() if v is not None]
            tables.append("\n".join(["", f"[{item.name}]", *lines]))
        elif item.name not in NOT_SAVED:
            top.append(f"{item.name} = {_toml(value)}")
    with atomic_write(path) as file:
        file.write("\n".join([*top, *tables, ""]).encode())


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    # TOML spells strings, integers and booleans as JSON does
    return json.dumps(value)


def _merged(options: Any, table: dict[str, Any], path: Path, prefix: str = "") -> Any:
    changes = {}
    names = {item.name for item in fields(options)} - NOT_SAVED
    for name, value in table.items():
        if name not in names:
            message = f"{path} has an unknown setting {prefix + name!r}"
            raise ConfigError(message)
        current = getattr(options, name)
        if is_dataclass(current) != isinstance(value, dict) and name != "attention":
            message = f"{path}: {prefix + name!r} cannot be {value!r}"
            raise ConfigError(message)
        nested = is_dataclass(current)
        changes[name] = _merged(current, value, path, f"{name}.") if nested else value
    if isinstance(changes.get("attention"), dict):
        pairs = changes["attention"].items()
        changes["attention"] = ";".join(f"{layers}={choice}" for layers, choice in pairs)
    return replace(options, **changes)


def _value_of(arguments: Sequence[str], flag: str) -> str:
    """Return what follows a flag, as ``--flag value`` or ``--flag=value``; '' if nothing does."""
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return ""
