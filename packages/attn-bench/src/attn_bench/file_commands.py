"""The commands that read a result file and measure nothing."""

import json
import sys
from argparse import Namespace

from attn_bench.compare import compare, comparison_table
from attn_bench.environment import summarize
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole
from attn_bench.plots import save_plots
from attn_bench.policy import policy_of
from attn_bench.report import report
from attn_bench.results import read_results
from attn_bench.tables import as_csv, markdown, replaced


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
    """Write the HTML page of a result file and, on request, its plots."""
    results = read_results(arguments.file)
    page = report(results)
    target = arguments.into or arguments.file.with_suffix(".html")
    with appearing_whole(target) as file:
        file.write(page)
    plots = []
    if arguments.plots is not None:
        plots = save_plots(results, arguments.plots, arguments.file.stem)
    for path in [target, *plots]:
        print(path)
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
    """Print a result as Markdown, or put it into a document, or check that it is there."""
    if arguments.check and arguments.into is None:
        raise InputError("`--check` needs `--into`: the document to compare with.")
    if arguments.csv:
        if arguments.into is not None:
            raise InputError("`--csv` prints; it does not go into a document.")
        print(as_csv(read_results(arguments.file)), end="")
        return 0
    table = markdown(read_results(arguments.file), arguments.metric)
    if arguments.into is None:
        print(table, end="")
        return 0
    try:
        document = arguments.into.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"cannot read {arguments.into}: {error.strerror or error}."
        raise InputError(msg) from error
    name = arguments.name or arguments.file.stem
    updated = replaced(document, name, table, arguments.into)
    if arguments.check:
        return _compare(document, updated, arguments)
    with appearing_whole(arguments.into) as file:
        file.write(updated)
    return 0


def _compare(document: str, updated: str, arguments: Namespace) -> int:
    if document == updated:
        return 0
    command = f"attn-bench table {arguments.file} --into {arguments.into}"
    print(f"{arguments.into} does not show {arguments.file}: run `{command}`", file=sys.stderr)
    return 1
