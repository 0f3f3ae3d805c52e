"""What the README and the docstrings say is run."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tiny_llm import run_summary
from tiny_llm.cli import COMMANDS, main, parse

README = Path(__file__).parents[1] / "README.md"
ROOT = README.parents[2]
CONFIGS = sorted(ROOT.glob("results/*/*/config.toml"))
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testfile(str(README), module_relative=False)
    assert attempted > 5
    assert failed == 0


def test_readme_shows_the_run_whose_files_are_committed():
    folder = ROOT / "results" / "nvidia-h200" / "tiny-llm"
    if not folder.is_dir():
        pytest.skip("there is no such run here")
    text = README.read_text()
    assert run_summary.replaced(text, run_summary.summary(folder, README)) == text


def test_readme_shows_the_speed_on_two_gpus_that_is_committed():
    folders = [ROOT / "results" / "nvidia-h200-x2" / name for name in ("one", "ddp", "fsdp")]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip("there are no such runs here")
    text, found = README.read_text(), run_summary.comparison(folders)
    assert run_summary.replaced(text, found, run_summary.SEVERAL_RUNS) == text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_a_committed_run_can_be_made_again_from_its_configuration(path):
    options = parse("train", ["--config", str(path)])
    assert (options.tokens, options.out.partition("/")[0]) == ("tokens.bin", "runs")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_files_and_folders_that_a_readme_links_to_exist(readme):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme.read_text())
    assert links
    assert [link for link in links if not (readme.parent / link).exists()] == []


def commands_in(text):
    lines = re.findall(r"^ *tiny-llm .*", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_readme_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = commands_in(README.read_text())
    assert {command[0] for command in commands} >= {"prepare", "train", "generate"}
    for name, *arguments in commands:
        if name != "resume" and not {"--resume", "--config"} & set(arguments):
            assert parse(name, arguments) is not None, arguments


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_shows_examples_that_are_understood(
    command, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: tiny-llm {command}" in shown
    examples = commands_in(shown)
    assert examples
    for name, *arguments in examples:
        if "--config" not in arguments and name != "resume":
            assert parse(name, arguments) is not None


@pytest.mark.parametrize("module", ["tokenizer", "attention.mask", "layers", "pretrained.names"])
def test_docstring_examples_run(module):
    failed, attempted = doctest.testmod(importlib.import_module(f"tiny_llm.{module}"))
    assert attempted
    assert failed == 0


def test_source_files_keep_to_their_size():
    for path in (README.parent / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path
