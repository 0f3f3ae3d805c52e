"""The commands that read a result file and measure nothing."""

import json
import shlex
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from attn_bench.case import check_name
from attn_bench.cli import build_parser
from attn_bench.compare import compare, comparison_table
from attn_bench.documents import filled, plot_commands
from attn_bench.environment import summarize
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole
from attn_bench.metrics import METRICS
from attn_bench.plots import is_drawn_from, save_plots
from attn_bench.policy import policy_of
from attn_bench.report import report
from attn_bench.results import Results, Row, read_results
from attn_bench.standing import standing_table, standings
from attn_bench.tables import as_csv, headed, markdown


def compare_files(arguments: Namespace) -> int:
    """Compare two result files; 1 if anything of the second is worse."""
    a, b = read_results(arguments.a), read_results(arguments.b)
    print(f"A: {summarize(a.environment)}\nB: {summarize(b.environment)}\n")
    differences = compare(a, b, arguments.threshold / 100)
    shown = [each for each in differences if arguments.all or each.verdict != "same"]
    print(comparison_table(shown) if shown else "every row is the same")
    worse = sum(each.is_regression for each in differences)
    print(f"\n{len(differences)} rows compared, {worse} worse by more than {arguments.threshold} %")
    return int(worse > 0)


def save_report(arguments: Namespace) -> int:
    """Write the HTML page of a result file."""
    page = report(read_results(arguments.file))
    target = arguments.into or arguments.file.with_suffix(".html")
    with appearing_whole(target) as file:
        file.write(page)
    print(target)
    return 0


def write_policy(arguments: Namespace) -> int:
    """Write which backend of tiny-llm was fastest for each class of shapes."""
    policy = policy_of(read_results(arguments.file))
    text = json.dumps(policy, indent=2) + "\n"
    if arguments.into is None:
        print(text, end="")
        return 0
    with appearing_whole(arguments.into) as file:
        file.write(text)
    return 0


def print_table(arguments: Namespace) -> int:
    """Print a result as Markdown, or as CSV."""
    print(table_of(arguments), end="")
    return 0


def table_of(arguments: Namespace) -> str:
    """Return what ``table`` prints."""
    if arguments.csv:
        return as_csv(chosen(arguments))
    if arguments.against is None:
        check_name("metric", arguments.metric, METRICS)
        return markdown(timed_ones(chosen(arguments)), METRICS[arguments.metric])
    providers, arguments.provider = arguments.provider, None  # the peers must stay
    results = timed_ones(chosen(arguments))
    found = standings(results.rows, arguments.against, providers)
    return headed(results, [standing_table(found, arguments.against)])


def chosen(arguments: Namespace) -> Results:
    """Return those rows of a result file that the command line asks for."""
    results = read_results(arguments.file)

    def is_asked_for(row: Row) -> bool:
        asked = (
            (row.provider, arguments.provider),
            (row.case.mode, arguments.mode),
            (row.case.dtype, arguments.dtype),
            (row.case.head_dim, arguments.head_dim),
        )
        return all(values is None or value in values for value, values in asked)

    return replace(results, rows=tuple(filter(is_asked_for, results.rows)))


def timed_ones(results: Results) -> Results:
    """Return the rows of the suites that were timed; the first part of ``quick`` only checks.

    Raises:
        InputError: if no row was timed.
    """
    timed = {row.suite for row in results.rows if row.median_ms is not None}
    if not timed:
        raise InputError("none of the rows was timed.")
    return replace(results, rows=tuple(row for row in results.rows if row.suite in timed))


def draw_plots(arguments: Namespace) -> int:
    """Draw the plots of a result file."""
    for path in plots_of(arguments, is_check=False):
        print(path)
    return 0


def plots_of(arguments: Namespace, *, is_check: bool) -> list[Path]:
    """Draw the plots that ``plots`` asks for, or those that are out of date, and return them.

    With `is_check` nothing is drawn.
    """
    for name in arguments.metric:
        check_name("metric", name, METRICS)
    results = timed_ones(chosen(arguments))
    rows = [asdict(row) for row in results.rows]
    source = sha256(json.dumps([results.environment, rows]).encode()).hexdigest()
    stem = arguments.name or arguments.file.stem
    paths = {
        arguments.into / f"{stem}-{metric}.{suffix}": metric
        for metric in arguments.metric
        for suffix in arguments.format
    }
    if is_check:
        return [path for path in paths if not is_drawn_from(path, source)]
    save_plots(results, list(paths.values()), list(paths), source)
    return list(paths)


def fill_documents(arguments: Namespace) -> int:
    """Make the tables and plots of documents, or check that they are what their files say."""
    stale: list[str] = []
    for path in arguments.documents:
        try:
            document = path.read_text(encoding="utf-8")
        except OSError as error:
            msg = f"cannot read {path}: {error.strerror or error}."
            raise InputError(msg) from error
        updated = filled(document, partial(_table_in, path), path)
        if updated != document:
            stale.append(f"a table of {path}")
        for words in plot_commands(document):
            plots = plots_of(_parsed(words, path), is_check=arguments.check)
            stale += map(str, plots) if arguments.check else ()
        if not arguments.check and updated != document:
            with appearing_whole(path) as file:
                file.write(updated)
    if not arguments.check or not stale:
        return 0
    names = " ".join(map(str, arguments.documents))
    print(f"out of date: {', '.join(stale)}; run `attn-bench docs {names}`", file=sys.stderr)
    return 1


def _table_in(document: Path, words: list[str]) -> str:
    return table_of(_parsed(words, document))


def _parsed(words: list[str], document: Path) -> Namespace:
    """Return the arguments of a command in a document, whose paths are as seen from there."""
    try:
        arguments = build_parser().parse_args(words)
    except SystemExit as stop:
        msg = f"{document}: `attn-bench {shlex.join(words)}` is no command."
        raise InputError(msg) from stop
    arguments.file = document.parent / arguments.file
    if "into" in arguments:
        arguments.into = document.parent / arguments.into
    return arguments
