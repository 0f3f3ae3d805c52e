"""Grids of cases in a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from attn_bench.case import Case, check_name
from attn_bench.errors import InputError
from attn_bench.grid import Grid


@dataclass(frozen=True)
class RunFile:
    """What a TOML file asks for: a suite, providers (None: all that are there), and cases."""

    suite: str
    providers: list[str] | None
    cases: list[Case]


def read_run_file(path: Path, presets: Mapping[str, Mapping[str, Grid]]) -> RunFile:
    """Read ``suite``, ``providers`` and the tables ``[[grid]]``, whose keys are the axes of `Grid`.

    A grid may start from a preset of its suite: ``preset = "paper"``.

    Args:
        path: The file.
        presets: Of each suite, by name.

    Raises:
        InputError: if the file cannot be read, is no TOML, or has a key that does not exist.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read {path}: {getattr(error, 'strerror', None) or error}."
        raise InputError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{path} is not TOML: {error}."
        raise InputError(msg) from error
    for key in content:
        check_name(f"key in {path}:", key, ("suite", "providers", "grid"))
    tables = content.get("grid", [])
    if not isinstance(tables, list) or not tables:
        msg = f"{path} needs at least one table `[[grid]]`."
        raise InputError(msg)
    providers = content.get("providers")
    if providers is not None and not _is_list_of(str, providers):
        msg = f"{path}: `providers` must be a list of names, got {providers!r}."
        raise InputError(msg)
    suite = content.get("suite", "flash")
    check_name(f"suite in {path}:", suite, presets)
    grids = [_grid_of_table(table, path, presets[suite]) for table in tables]
    cases = [case for grid in grids for case in grid.cases()]
    return RunFile(suite, providers, list(dict.fromkeys(cases)))


def _grid_of_table(table: Mapping[str, Any], path: Path, presets: Mapping[str, Grid]) -> Grid:
    axes = dict(table)
    preset = axes.pop("preset", None)
    kinds: dict[str, type] = {each.name: int for each in fields(Grid)}
    kinds |= {"dtypes": str, "modes": str, "causal": bool}
    for name, axis in axes.items():
        check_name(f"axis in {path}:", name, kinds)
        if name == "total_tokens":
            if type(axis) is not int:
                msg = f"{path}: `total_tokens` must be an integer, got {axis!r}."
                raise InputError(msg)
        elif not _is_list_of(kinds[name], axis):
            msg = f"{path}: `{name}` must be a list of {kinds[name].__name__}, got {axis!r}."
            raise InputError(msg)
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in axes.items()}
    if preset is not None:
        check_name("preset", preset, presets)
        return presets[preset].with_axes(given)
    for name in ("dtypes", "seqlens_q"):
        if name not in given:
            msg = f"{path}: a grid without a preset needs `{name}`."
            raise InputError(msg)
    return Grid(dtypes=(), seqlens_q=()).with_axes(given)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)
