"""Grids of cases: the presets, a TOML file, and the shapes of known models."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from attn_bench.case import MODES, Case, check_name
from attn_bench.errors import InputError


@dataclass(frozen=True)
class Grid:
    """Axes whose product is the cases.

    Two of `d_models`, `num_heads` and `head_dims` fix the heads; the third follows from
    d_model = num_heads * head_dim.  An empty `seqlens_k` means as many keys as queries, an empty
    `batches` means `total_tokens` // seqlen_q.
    """

    dtypes: tuple[str, ...]
    seqlens_q: tuple[int, ...]
    d_models: tuple[int, ...] = ()
    num_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    seqlens_k: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    total_tokens: int | None = None
    causal: tuple[bool, ...] = (False, True)
    modes: tuple[str, ...] = MODES
    num_kv_heads: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    def with_axes(self, given: Mapping[str, Any]) -> "Grid":
        """Return a copy with some axes replaced.

        Of the three axes that describe the heads, those not given yield to those given, so that two
        remain; head_dims yields last.
        """
        heads = ("head_dims", "d_models", "num_heads")
        asked = [name for name in heads if name in given]
        own = [name for name in heads if name not in given and getattr(self, name)]
        dropped = own[max(0, 2 - len(asked)) :]
        return replace(self, **{**given, **dict.fromkeys(dropped, ())})

    def cases(self) -> list[Case]:
        """Return the cases, the modes of one shape next to each other.

        Raises:
            InputError: if the axes contradict each other or a value is out of range.
        """
        return [
            Case(
                dtype=dtype,
                batch=self._batch(batch, n_q),
                num_heads=heads,
                seqlen_q=n_q,
                seqlen_k=n_k or n_q,
                head_dim=head_dim,
                is_causal=causal,
                mode=mode,
                # one way to say that there are as many, so that equal cases are equal
                num_kv_heads=None if kv_heads == heads else kv_heads,
                window=window,
            )
            for dtype, (heads, head_dim), kv_heads, causal, window, n_q, n_k, batch, mode in (
                self._product()
            )
        ]

    def _product(self) -> Iterator[tuple[Any, ...]]:
        return product(
            self.dtypes,
            self._heads(),
            self.num_kv_heads or (None,),
            self.causal,
            self.windows or (None,),
            self.seqlens_q,
            self.seqlens_k or (0,),
            self.batches or (0,),
            self.modes,
        )

    def _heads(self) -> list[tuple[int, int]]:
        """Return the pairs (num_heads, head_dim)."""
        given = [self.d_models, self.num_heads, self.head_dims]
        if sum(map(bool, given)) != 2:
            msg = (
                "exactly two of `--d-model`, `--heads` and `--head-dim` fix the heads, got d_model "
                f"{self.d_models}, heads {self.num_heads}, head_dim {self.head_dims}."
            )
            raise InputError(msg)
        if not self.d_models:
            return list(product(self.num_heads, self.head_dims))
        if self.head_dims:
            return [
                (split(d, dim, "head_dim"), dim)
                for d, dim in product(self.d_models, self.head_dims)
            ]
        return [(n, split(d, n, "heads")) for d, n in product(self.d_models, self.num_heads)]

    def _batch(self, batch: int, seqlen: int) -> int:
        if self.batches:
            return batch
        if self.total_tokens is None:
            raise InputError("give `--batch`, or `--total-tokens` to derive it from the length.")
        if self.total_tokens < seqlen:
            msg = f"`--total-tokens` must be at least the length {seqlen}, got {self.total_tokens}."
            raise InputError(msg)
        return self.total_tokens // seqlen


def split(d_model: int, parts: int, name: str) -> int:
    """Return d_model / parts, or raise InputError if it does not divide evenly."""
    if parts < 1 or d_model % parts:
        msg = f"`d_model` {d_model} is not a multiple of {name} {parts}."
        raise InputError(msg)
    return d_model // parts


PRESETS = {
    # seconds on a CPU; what CI runs
    "smoke": Grid(
        dtypes=("fp32",),
        seqlens_q=(64, 100),
        num_heads=(2,),
        head_dims=(32,),
        batches=(1,),
        modes=("fwd", "fwd+bwd"),
    ),
    # the grid of the FlashAttention papers: 16k tokens in all, hidden size 2048
    "paper": Grid(
        dtypes=("bf16",),
        seqlens_q=(512, 1024, 2048, 4096, 8192, 16384),
        d_models=(2048,),
        head_dims=(64, 128),
        total_tokens=16384,
        modes=("fwd", "bwd"),
    ),
    # what a course on building language models asks for: one sequence, every length and width
    "course": Grid(
        dtypes=("bf16", "fp32"),
        seqlens_q=tuple(2**power for power in range(7, 17)),
        num_heads=(1,),
        head_dims=(16, 32, 64, 128),
        batches=(1,),
        causal=(True,),
    ),
}

# what attention costs in a model does not depend on its weights, only on these
# one query for each sequence of a batch, over the keys and values of a cache.  A mask would hide
# nothing: the query is the last position.
DECODE_PRESETS = {
    "smoke": Grid(
        dtypes=("fp32",),
        seqlens_q=(1,),
        seqlens_k=(64, 100),
        num_heads=(4,),
        num_kv_heads=(2,),
        head_dims=(32,),
        batches=(2,),
        causal=(False,),
        modes=("fwd",),
    ),
    "serving": Grid(
        dtypes=("bf16",),
        seqlens_q=(1,),
        seqlens_k=(2048, 8192, 32768),
        num_heads=(32,),
        num_kv_heads=(8, 32),
        head_dims=(128,),
        batches=(1, 8, 64),
        causal=(False,),
        modes=("fwd",),
    ),
}

# name: (heads of q, heads of k and v, head dim, context length in training, window)
MODELS: dict[str, tuple[int, int, int, int, int | None]] = {
    "gpt2": (12, 12, 64, 1024, None),
    "gpt2-xl": (25, 25, 64, 1024, None),
    "llama-3-8b": (32, 8, 128, 8192, None),
    "llama-3-70b": (64, 8, 128, 8192, None),
    "mistral-7b": (32, 8, 128, 8192, 4096),
    "qwen3-0.6b": (16, 8, 128, 8192, None),
    "qwen3-8b": (32, 8, 128, 8192, None),
}


def grid_of_model(name: str) -> Grid:
    """Return one sequence of the model `name` in training: its heads, window and context length.

    Raises:
        InputError: if the model is unknown.
    """
    check_name("model", name, MODELS)
    num_heads, num_kv_heads, head_dim, seqlen, window = MODELS[name]
    return Grid(
        dtypes=("bf16",),
        seqlens_q=(seqlen // 4, seqlen),
        num_heads=(num_heads,),
        head_dims=(head_dim,),
        batches=(1,),
        causal=(True,),
        modes=("fwd", "bwd"),
        num_kv_heads=(num_kv_heads,),
        windows=() if window is None else (window,),
    )


@dataclass(frozen=True)
class RunFile:
    """What a TOML file asks for: a suite, providers (None: all that are there), and cases."""

    suite: str
    providers: list[str] | None
    cases: list[Case]


def read_run_file(path: Path) -> RunFile:
    """Read ``suite``, ``providers`` and the tables ``[[grid]]``, whose keys are the axes of `Grid`.

    A grid may start from a preset: ``preset = "paper"``.

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
    cases = [case for table in tables for case in _grid_of_table(table, path).cases()]
    return RunFile(str(content.get("suite", "flash")), providers, list(dict.fromkeys(cases)))


def _grid_of_table(table: Mapping[str, Any], path: Path) -> Grid:
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
        check_name("preset", preset, PRESETS)
        return PRESETS[preset].with_axes(given)
    for name in ("dtypes", "seqlens_q"):
        if name not in given:
            msg = f"{path}: a grid without a preset needs `{name}`."
            raise InputError(msg)
    return Grid(dtypes=(), seqlens_q=()).with_axes(given)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)
