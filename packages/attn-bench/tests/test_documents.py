from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.documents import filled
from attn_bench.errors import InputError
from attn_bench.results import Row, saving

HERE = {"device": "a GPU", "date": "2026-11-30"}
ROW = Row(
    "flash_attention",
    "sdpa",
    Case("bf16", 1, 1, 512, 512, 64, True, "fwd"),
    "ok",
    median_ms=2.0,
    tflops=100.0,
    is_performance=True,
)
TABLE = """Speed:
<!-- attn-bench table results/run.jsonl --metric ms -->
old
<!-- /attn-bench -->
<!-- attn-bench plots results/run.jsonl --into images --metric tflops --format png svg -->
End.
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Return a document beside a folder with results; both are far from the current folder."""
    (tmp_path / "results").mkdir()
    save(tmp_path, ROW)
    path = tmp_path / "README.md"
    path.write_text(TABLE)
    return path


def save(folder: Path, *rows: Row) -> None:
    with saving(folder / "results" / "run.jsonl", HERE) as writes:
        for row in rows:
            writes(row)


def test_docs_makes_the_tables_and_plots_that_a_document_asks_for(document: Path) -> None:
    assert main(["docs", str(document)]) == 0
    text = document.read_text()
    assert "**2**" in text
    assert "old" not in text
    assert text.startswith("Speed:\n<!-- attn-bench table results/run.jsonl --metric ms -->\n\n")
    assert text.endswith(
        "\n\n<!-- /attn-bench -->\n" + TABLE[TABLE.index("<!-- attn-bench plots") :]
    )
    images = document.parent / "images"
    assert {path.name for path in images.iterdir()} == {"run-tflops.png", "run-tflops.svg"}
    assert main(["docs", str(document), "--check"]) == 0


def test_docs_check_changes_nothing_and_names_what_is_out_of_date(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", str(document), "--check"]) == 1
    assert document.read_text() == TABLE
    assert not (document.parent / "images").exists()
    said = capsys.readouterr().err
    assert f"a table of {document}" in said
    assert f"run `attn-bench docs {document}`" in said


def test_docs_check_finds_a_table_and_a_plot_of_other_results(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", str(document)]) == 0
    # the table shows milliseconds alone
    save(document.parent, replace(ROW, tflops=101.0))
    assert main(["docs", str(document), "--check"]) == 1
    said = capsys.readouterr().err
    assert "run-tflops.png" in said
    assert "run-tflops.svg" in said
    assert "a table" not in said
    save(document.parent, replace(ROW, median_ms=3.0))
    assert main(["docs", str(document), "--check"]) == 1
    assert "a table" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "<!-- attn-bench table run.jsonl -->\n",
        "<!-- attn-bench table a -->\n<!-- attn-bench table b -->\n<!-- /attn-bench -->\n",
        "<!-- /attn-bench -->\n",
        "<!-- attn-bench list -->\n",
    ],
)
def test_a_marker_without_its_end_or_of_another_command_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a table needs a line"):
        filled(text, lambda _: "new", Path("R.md"))


def test_a_wrong_option_in_a_document_is_refused(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document.write_text(TABLE.replace("--metric ms", "--metrics ms"))
    assert main(["docs", str(document)]) == 2
    assert "--metrics ms` is no command" in capsys.readouterr().err
