"""A result file that grows row by row, and can be gone on with after an interruption."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole, check_writable
from attn_bench.results import Row, RowWriter, read_results

# a run is gone on with only where these are as they were
SAME = ("device", "driver", "torch", "triton", "commit", "dirty", "flash_kernel", "peers")


def partial_path(path: Path) -> Path:
    """Return where the rows of an unfinished run lie."""
    return path.with_name(f"{path.name}.partial")


def rows_to_keep(
    path: Path | None, environment: Mapping[str, Any], *, resume: bool, suite: str
) -> list[Row]:
    """Return the rows of the interrupted run that is gone on with; none without `resume`.

    Raises:
        InputError: if `path` cannot be written, or if an interrupted run is in the way, is damaged,
            or was made in another environment or by another suite.
    """
    if path is None:
        if resume:
            raise InputError("`--resume` needs `--save`: the file of the interrupted run.")
        return []
    check_writable(path)
    partial = partial_path(path)
    if not partial.exists():
        return []
    if not resume:
        msg = f"{partial} holds an interrupted run: pass `--resume` to go on, or delete it."
        raise InputError(msg)
    earlier = read_results(partial, is_partial=True)
    for name in SAME:
        before, now = earlier.environment.get(name), environment.get(name)
        if before != now:
            msg = f"{partial} was measured with {name} {before!r}, now it is {now!r}: delete it."
            raise InputError(msg)
    for row in earlier.rows:
        if row.suite != suite:
            msg = f"{partial} is a run of {row.suite}, not of {suite}: delete it."
            raise InputError(msg)
    return list(earlier.rows)


def split_done(
    rows: Sequence[Row], cases: Sequence[Case], providers: Sequence[str]
) -> tuple[list[Row], list[Case]]:
    """Return the rows of the shapes that are done, and the cases that are left.

    All modes and providers of a shape are timed interleaved, so a shape is done as a whole or not.
    """
    had = {(row.case, row.provider) for row in rows}
    missing = {case.shape for case in cases if any((case, name) not in had for name in providers)}
    wanted = {(case, name) for case in cases for name in providers}
    kept = [
        row for row in rows if (row.case, row.provider) in wanted and row.case.shape not in missing
    ]
    return kept, [case for case in cases if case.shape in missing]


@contextmanager
def journaling(
    path: Path | None, environment: dict[str, Any], kept: Sequence[Row]
) -> Iterator[list[Row]]:
    """Yield a list whose ``append`` also writes the row to the file; it begins with `kept`.

    The rows lie beside `path` until the ``with`` block ends well, then take its name.
    """
    if path is None:
        yield list(kept)
        return
    partial = partial_path(path)
    with appearing_whole(partial) as file:
        writer = RowWriter(file, environment)
        for row in kept:
            writer.write(row)
    with partial.open("a", encoding="utf-8") as file:
        rows = _Journal(kept, RowWriter(file, None))
        try:
            yield rows
        except BaseException:
            if not rows:
                partial.unlink()
            raise
    partial.replace(path)


class _Journal(list[Row]):
    """Rows that are written when they are appended."""

    def __init__(self, kept: Sequence[Row], writer: RowWriter) -> None:
        super().__init__(kept)
        self._writer = writer

    def append(self, row: Row) -> None:
        super().append(row)
        self._writer.write(row)
