"""What the documents say is run, or compared with the code."""

import doctest
import importlib.metadata
import re
import textwrap
from pathlib import Path

import pytest

import flash_kernel
from flash_kernel import support_matrix
from flash_kernel.dispatch import BACKWARDS, IMPLS
from flash_kernel.document import replaced

FOLDER = Path(__file__).parents[1]
SOURCE = Path(flash_kernel.__file__).parent
VERSION = flash_kernel.__version__


def document(*places: Path) -> Path:
    """Return the first place that exists; a wheel carries no documents, so skip if none does."""
    for place in places:
        if place.is_file():
            return place
    pytest.skip(f"{places[0].name} does not lie beside these tests")


def test_readme_examples_run() -> None:
    readme = document(FOLDER / "README.md")
    failed, attempted = doctest.testfile(str(readme), module_relative=False)
    assert readme.read_text("utf-8").count("```python\n") == 8
    assert attempted > 30
    assert failed == 0


def test_readme_names_every_implementation_and_backward() -> None:
    tables = document(FOLDER / "README.md").read_text("utf-8")
    for option, choices in (("impl", IMPLS), ("backward", BACKWARDS)):
        (table,) = re.findall(rf"^\| `{option}` \| what.*\n((?:\|.*\n)+)", tables, re.MULTILINE)
        assert set(re.findall(r'^\| `"(\w+)"` \|', table, re.MULTILINE)) == set(choices)


def test_support_matrix_is_what_the_code_decides() -> None:
    """Made anew by ``python -m flash_kernel.support_matrix --into`` the README."""
    readme = document(FOLDER / "README.md").read_text("utf-8")
    assert readme == replaced(readme, support_matrix.as_markdown(), support_matrix.MARKERS)


def test_text_is_replaced_between_markers_that_are_there_once() -> None:
    assert replaced("a <1> b <2> c", "new", ("<1>", "<2>")) == "a <1>\nnew\n<2> c"
    with pytest.raises(ValueError, match="must have the markers"):
        replaced("a <1> b", "new", ("<1>", "<2>"))


def test_version_is_the_one_of_the_installed_package_and_of_the_changelog() -> None:
    try:
        assert importlib.metadata.version("flash-kernel") == VERSION
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-kernel is on the path, but not installed")
    changelog = document(FOLDER / "CHANGELOG.md").read_text("utf-8")
    assert f"\n## [{VERSION}] - " in changelog


@pytest.mark.parametrize("name", ["flash-attention.md", "packed-and-cached.md"])
def test_walk_through_quotes_the_code_as_it_is(name: str) -> None:
    page = document(FOLDER.parents[1] / "docs" / name).read_text("utf-8")
    quotes = re.findall(r"^`(\S+\.py)`, in .+\n\n```python\n((?:.*\n)+?)```$", page, re.MULTILINE)
    assert len(quotes) == page.count("```python\n") >= 5
    for path, quote in quotes:
        code = (SOURCE / path).read_text("utf-8")
        indented = [textwrap.indent(quote, " " * depth) for depth in (0, 4, 8)]
        assert any(f"\n{text}" in code for text in indented), f"not in {path}:\n{quote}"
