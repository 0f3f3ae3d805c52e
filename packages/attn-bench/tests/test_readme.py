import shlex
from pathlib import Path

import pytest

from attn_bench.cli import build_parser
from attn_bench.commands import cases_of

README = Path(__file__).parents[1] / "README.md"
COMMANDS = [
    line.removeprefix("$ ").partition(" #")[0]
    for line in README.read_text(encoding="utf-8").splitlines()
    if line.startswith("$ attn-bench ")
]


def test_readme_shows_every_command() -> None:
    assert {shlex.split(line)[1] for line in COMMANDS} == {
        "quick",
        "flash",
        "layer",
        "run",
        "list",
        "table",
        "plots",
        "docs",
        "compare",
        "report",
        "decode",
        "overhead",
        "train-step",
        "generate",
        "policy",
        "env",
    }


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_is_one_that_exists(line: str) -> None:
    arguments = build_parser().parse_args(shlex.split(line)[1:])
    if arguments.command in ("flash", "layer", "decode"):
        assert cases_of(arguments)
