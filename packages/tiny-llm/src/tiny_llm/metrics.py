"""What a run reports: what it is, JSON lines, TensorBoard if asked, a picture of the loss."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_llm.errors import FileError, FormatError, MissingExtraError
from tiny_llm.files import atomic_write, reason_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RUN = "run.json"
METRICS = "metrics.jsonl"
CURVE = "loss.png"

Row = dict[str, Any]


class MetricsLog:
    """Appends one JSON object a line to `metrics.jsonl` in the run's folder.

    Args:
        folder: The run's.
        start_step: Rows of this step and later ones are dropped: that part of the run is repeated.
        tensorboard: Also write TensorBoard's event files, into `tensorboard/`.

    Raises:
        FileError: The file cannot be written.
        MissingExtraError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, *, start_step: int, tensorboard: bool = False) -> None:
        self.path = folder / METRICS
        self._writer = _tensorboard(folder, start_step) if tensorboard else None
        kept = [row for row in read_metrics(self.path) if row["step"] < start_step]
        with atomic_write(self.path) as file:
            file.writelines(_line(row) for row in kept)

    def add(self, step: int, **values: float | str | None) -> None:
        """Write a row; values that are not known (None) are left out.

        Raises:
            FileError: The disk is full.
        """
        row: Row = {"step": step, **{k: v for k, v in values.items() if v is not None}}
        try:
            with self.path.open("ab") as file:
                file.write(_line(row))
        except OSError as error:
            message = f"cannot write {self.path}: {reason_of(error)}"
            raise FileError(message) from error
        for name, value in row.items():
            if self._writer is not None and name != "step" and not isinstance(value, str):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish TensorBoard's files."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file; a last line that a kill cut off is left out.

    Raises:
        FormatError: Another line is no JSON object with a step.
    """
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                rows.append(json.loads(line))
                _ = rows[-1]["step"]
            except (ValueError, KeyError, TypeError) as error:
                message = f"{path} line {len(rows) + 1} is no row of metrics; remove the file"
                raise FormatError(message) from error
    return rows


def draw_loss_curve(rows: list[Row], path: Path) -> None:
    """Draw training and evaluation loss over the steps as a PNG.

    Raises:
        FileError: It cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(row["step"] + 1, row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _tensorboard(folder: Path, start_step: int) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        message = (
            "--tensorboard needs the optional package tensorboard: install tiny-llm[tensorboard]"
        )
        raise MissingExtraError(message) from error
    # TensorBoard hides what an earlier attempt wrote from this step on
    return SummaryWriter(str(folder / "tensorboard"), purge_step=start_step)
