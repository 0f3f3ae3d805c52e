"""Plots of a result file: TFLOP/s, memory and error over the length, as PNG and SVG."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_bench.environment import summarize
from attn_bench.errors import InputError
from attn_bench.metrics import METRICS, Metric
from attn_bench.results import Results
from attn_bench.series import Panel, all_providers, ceiling_of, panels
from attn_bench.tables import NOT_PERFORMANCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
STYLE: Any = {"svg.hashsalt": "attn-bench", "font.size": 9}


def save_plots(
    results: Results, metrics: Sequence[str], paths: Sequence[Path], source: str
) -> None:
    """Draw each metric into the file of `paths` at its place, PNG or SVG by its name.

    Args:
        results: What is drawn.
        metrics: Names of `METRICS`.
        paths: As many files.
        source: What the plots are made of; written into each, see `is_drawn_from`.

    Raises:
        InputError: if nothing was timed or a file cannot be written.
    """
    from matplotlib import rc_context

    drawn = panels(results.rows)
    for name, path in zip(metrics, paths, strict=True):
        figure = draw(drawn, METRICS[name], results.environment)
        # no date, so that the same results give the same file
        metadata: dict[str, Any] = {"Source": source}
        metadata |= {"Date": None} if path.suffix == ".svg" else {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with rc_context(STYLE):
                figure.savefig(path, dpi=120, metadata=metadata)
        except OSError as error:
            msg = f"cannot write {path}: {error.strerror or error}."
            raise InputError(msg) from error


def is_drawn_from(path: Path, source: str) -> bool:
    """Return whether `path` is a plot that `save_plots` made of `source`."""
    return path.is_file() and source.encode() in path.read_bytes()


def draw(drawn: Sequence[Panel], metric: Metric, environment: dict[str, Any]) -> "Figure":
    """Return a figure with a plot per panel, the same colour for a provider in all of them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # curves of one dtype lie in the same range
    is_shared = not metric.is_log and len({panel.rows[0].case.dtype for panel in drawn}) == 1
    columns = min(COLUMNS, len(drawn))
    rows = ceil(len(drawn) / columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(3.4 * columns, 5.5), 2.7 * rows + 1.1), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=is_shared)
        colors = {name: f"C{index % 10}" for index, name in enumerate(all_providers(drawn))}
        for ax in axes.flat[len(drawn) :]:
            ax.set_visible(False)
        for ax, panel in zip(axes.flat, drawn, strict=False):
            _draw_panel(ax, panel, metric, colors, environment)
        if not metric.is_log:
            # only now, since a limit set earlier would stop a shared axis from growing
            highest = max(ax.dataLim.y1 for ax in axes.flat)
            for ax in axes.flat[: len(drawn)]:
                ax.set_ylim(bottom=0, top=1.05 * (highest if is_shared else ax.dataLim.y1))
        handles: dict[str, Any] = {}
        for ax in axes.flat:
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False
        )
        figure.suptitle(_title(metric, drawn, environment), fontsize=10)
    return figure


def _title(metric: Metric, drawn: Sequence[Panel], environment: dict[str, Any]) -> str:
    is_performance = any(row.is_performance for panel in drawn for row in panel.rows)
    warning = "" if is_performance else f" ({NOT_PERFORMANCE})"
    parts = summarize(environment).split(", ")
    half = ceil(len(parts) / 2)
    return f"{metric.label}{warning}\n{', '.join(parts[:half])}\n{', '.join(parts[half:])}"


def _draw_panel(
    ax: "Axes", panel: Panel, metric: Metric, colors: dict[str, str], environment: dict[str, Any]
) -> None:
    lengths = sorted({row.case.seqlen_k for row in panel.rows})
    for name in panel.providers:
        points = panel.curve(name, metric)
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, marker="o", markersize=3, color=colors[name], label=name)
    ceiling = ceiling_of(panel, metric, environment)
    if ceiling is not None and ceiling.is_near:
        ax.axhline(ceiling.value, color="0.5", linestyle="--", label=ceiling.label)
    elif ceiling is not None:
        far = f"{ceiling.label}: {ceiling.value:.0f}"
        ax.text(0.03, 0.95, far, transform=ax.transAxes, va="top", fontsize=7, color="0.5")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [_short(n) for n in lengths])
    ax.minorticks_off()
    if metric.is_log:
        ax.set_yscale("log")
    ax.set_title(panel.title.partition(": ")[2], fontsize=9)
    ax.set_xlabel("n")
    ax.grid(alpha=0.25)


def _short(n: int) -> str:
    """Return 16384 as 16k, where it is a round number of binary thousands."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
