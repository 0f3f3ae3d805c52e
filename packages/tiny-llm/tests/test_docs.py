"""What the README and the docstrings say is run."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tiny_llm.cli import build_parser

README = Path(__file__).parents[1] / "README.md"


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testfile(str(README), module_relative=False)
    assert attempted > 5
    assert failed == 0


def test_readme_commands_are_understood():
    commands = re.findall(r"^tiny-llm .*", README.read_text(), flags=re.MULTILINE)
    assert {shlex.split(command)[1] for command in commands} == {"prepare", "train", "generate"}
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize("module", ["tokenizer", "attention.mask", "layers", "pretrained.names"])
def test_docstring_examples_run(module):
    failed, attempted = doctest.testmod(importlib.import_module(f"tiny_llm.{module}"))
    assert attempted
    assert failed == 0


def test_source_files_keep_to_their_size():
    for path in (README.parent / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path
