"""Tables and plots in Markdown documents, made from result files and checked against them.

A comment holds the command that makes what follows it, with paths as seen from the document:

    <!-- attn-bench table results/run.jsonl --metric ms -->
    ... what it prints ...
    <!-- /attn-bench -->

    <!-- attn-bench plots results/run.jsonl --into images --metric tflops -->
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from attn_bench.errors import InputError

TABLE = re.compile(
    r"^<!-- attn-bench (table [^\n]*?) -->\n(.*?)^<!-- /attn-bench -->$", re.MULTILINE | re.DOTALL
)
PLOTS = re.compile(r"^<!-- attn-bench (plots .*?) -->$", re.MULTILINE)
MARKER = re.compile(r"^<!-- /?attn-bench\b.*$", re.MULTILINE)


def filled(document: str, make_table: Callable[[list[str]], str], path: Path) -> str:
    """Return a document whose tables are what `make_table` says, given the words of each command.

    Raises:
        InputError: if a marker is unknown or is not closed.
    """
    known = 2 * len(TABLE.findall(document)) + len(PLOTS.findall(document))
    markers = MARKER.findall(document)
    if known != len(markers):
        msg = f"{path}: a table needs a line `<!-- attn-bench table FILE.jsonl -->` and, after it, "
        msg += f"`<!-- /attn-bench -->`; found {', '.join(markers)}."
        raise InputError(msg)

    def replace(match: re.Match[str]) -> str:
        table = make_table(shlex.split(match[1]))
        return f"<!-- attn-bench {match[1]} -->\n\n{table.strip()}\n\n<!-- /attn-bench -->"

    return TABLE.sub(replace, document)


def plot_commands(document: str) -> list[list[str]]:
    """Return the words of every command that draws plots."""
    return [shlex.split(command) for command in PLOTS.findall(document)]
