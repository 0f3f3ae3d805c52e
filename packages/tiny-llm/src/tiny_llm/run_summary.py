"""What became of training runs, as Markdown, from the files in their folders.

    python -m tiny_llm.run_summary runs/first                    prints it
    python -m tiny_llm.run_summary runs/first --into README.md   replaces what lies between markers
    python -m tiny_llm.run_summary runs/one runs/two             compares how fast they were

A text that the model wrote is shown, too, if it lies there as sample.txt.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_llm.errors import FormatError, TinyLLMError
from tiny_llm.files import atomic_write, read_json_object
from tiny_llm.metrics import CURVE, METRICS, RUN, Row, read_metrics
from tiny_llm.settings_file import FILE_NAME, read_settings

Markers = tuple[str, str]
ONE_RUN: Markers = ("<!-- run -->", "<!-- /run -->")
SEVERAL_RUNS: Markers = ("<!-- runs -->", "<!-- /runs -->")
SAMPLE, SAMPLE_LINES = "sample.txt", 24


def summary(folder: Path, document: Path | None = None) -> str:
    """Return a table of the run, its loss curve and its sample.

    Args:
        folder: The run's.
        document: Where the picture is shown from; by default it is left out.

    Raises:
        FileError, FormatError: A file is missing or damaged, or no step was made.
    """
    cells = _cells(*_read(folder))
    parts = ["\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in cells)])]
    if document is not None:
        picture = os.path.relpath(folder / CURVE, document.parent)
        parts.append(f"![Loss of training and evaluation over the steps]({picture})")
    if (folder / SAMPLE).exists():
        lines = (folder / SAMPLE).read_text(encoding="utf-8").rstrip().splitlines()
        parts.append("\n".join(["```text", *lines[:SAMPLE_LINES], "```"]))
    return "\n\n".join(parts)


def comparison(folders: Sequence[Path]) -> str:
    """Return a table of the speed of runs that differ in how they were trained.

    It is the median over the second half of the steps, when all is warm.

    Args:
        folders: The runs'; the first is what the others are compared with.

    Raises:
        FileError, FormatError: A file is missing or damaged, no step was made, or the runs are not
            of one model, text and kind of device.
    """
    lines = [
        f"| run | sequences a step | tokens/s | against {folders[0].name} |",
        "| --- | --- | --- | --- |",
    ]
    baseline = None
    for folder in folders:
        facts, settings, rows = _read(folder)
        rates = [row["tokens_per_second"] for row in rows]
        rate = statistics.median(rates[len(rates) // 2 :])
        baseline = baseline or (facts, rate)
        if facts != baseline[0]:
            message = f"{folder / RUN} is not that of {folders[0]}, so the two do not compare"
            raise FormatError(message)
        training = settings["training"]
        size = f"{training['batch_size']} of {training['seq_len']} tokens"
        lines.append(f"| {folder.name} | {size} | {rate:,.0f} | {rate / baseline[1]:.2f}× |")
    return "\n".join(lines)


def replaced(document: str, text: str, markers: Markers = ONE_RUN) -> str:
    """Return a document with `text` between the markers.

    Raises:
        FormatError: It has not exactly one pair of them.
    """
    start, end = markers
    before, found, rest = document.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed or start in rest:
        message = f"the document must have one pair of {start} and {end}"
        raise FormatError(message)
    return f"{before}{start}\n{text}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the summary of a run or the comparison of several, or put it into a document."""
    parser = argparse.ArgumentParser(prog="python -m tiny_llm.run_summary")
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder", help="a run's")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT.md", help="default: print it")
    options = parser.parse_args(arguments)
    try:
        if len(options.folders) == 1:
            text, markers = summary(options.folders[0], options.into), ONE_RUN
        else:
            text, markers = comparison(options.folders), SEVERAL_RUNS
        if options.into is None:
            print(text)
            return
        updated = replaced(options.into.read_text(encoding="utf-8"), text, markers)
        with atomic_write(options.into) as file:
            file.write(updated.encode())
    except TinyLLMError as error:
        parser.error(str(error))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
    """Return the facts, settings and steps of a run."""
    rows = read_metrics(folder / METRICS)
    if not rows:
        message = f"{folder / METRICS} has no step of a run"
        raise FormatError(message)
    return read_json_object(folder / RUN), read_settings(folder / FILE_NAME), rows


def _cells(
    facts: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]
) -> list[tuple[str, str]]:
    training, model = settings["training"], settings["model"]
    batch = training["batch_size"] * training["seq_len"]
    evaluated = [row for row in rows if "eval_loss" in row]
    how = [*dict.fromkeys(facts["attention"]), training["precision"]]
    how += ["compiled"] if training["compile"] else []
    shape = f"{model['num_layers']} layers of width {model['d_model']}; {', '.join(how)}"
    seen = len(rows) * batch / facts["tokens"]
    seconds = sum(batch / row["tokens_per_second"] for row in rows)
    cells = [
        ("device", f"{facts['device']}, torch {facts['torch']}"),
        ("model", f"{facts['parameters'] / 1e6:.1f} million parameters: {shape}"),
        ("text", f"{facts['tokens'] / 1e6:.1f} million tokens, each seen {seen:.1f} times"),
        ("steps", f"{len(rows)} of {batch:,} tokens in {seconds:.0f} s"),
        ("training loss", f"{statistics.mean(_last_losses(rows)):.2f} nats per token at the end"),
    ]
    if evaluated:
        last = evaluated[-1]
        held_out = f"{last['eval_loss']:.2f} nats per token, {last['eval_bits_per_byte']:.2f} bits"
        cells.append(("held-out text", f"{held_out} per byte"))
    return cells


def _last_losses(rows: Sequence[Row]) -> list[float]:
    return [row["loss"] for row in rows[-max(1, len(rows) // 20) :]]


if __name__ == "__main__":
    main()
