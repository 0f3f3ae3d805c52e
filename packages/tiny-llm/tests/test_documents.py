"""Every kind of source gives its documents, or one clear line."""

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tiny_llm.documents import find_sources, iter_documents
from tiny_llm.errors import ConfigError, FileError, FormatError, MissingExtraError

ROWS = ["first", "zweite Zeile\nmit Umbruch", "", "漢字"]


def documents(paths, column=None):
    sources = find_sources(paths, column)
    return [b"".join(pieces) for pieces in iter_documents(sources, column, lambda count: None)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"id": 1, "text": row}) for row in ROWS) + "\n\n")
    return path


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1] * len(ROWS), "text": ROWS}), path)
    return path


def test_rows_of_json_lines_and_parquet_are_documents(jsonl, parquet):
    expected = [row.encode() for row in ROWS]
    assert documents([jsonl], "text") == expected
    assert documents([parquet, jsonl], "text") == expected * 2


def test_folder_gives_its_files_sorted_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a/z.txt", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents([tmp_path]) == [b"a/z.txt", b"b.txt"]


def test_large_file_comes_in_pieces_that_end_with_a_line(tmp_path):
    path = tmp_path / "large.txt"
    content = b"".join(b"line %d\n" % number for number in range(300_000))
    path.write_bytes(content)
    (document,) = iter_documents([path], None, lambda count: None)
    pieces = list(document)
    assert b"".join(pieces) == content
    assert len(pieces) > 2
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_table_without_the_column_is_refused(jsonl, parquet):
    with pytest.raises(FormatError, match=r"rows\.jsonl line 1 has no text under 'body'"):
        documents([jsonl], "body")
    with pytest.raises(FormatError, match="has no column 'body'; it has id, text"):
        documents([parquet], "body")
    with pytest.raises(FormatError, match=r"column 'id' of .* holds 1, which is no text"):
        documents([parquet], "id")


def test_damaged_table_is_refused(jsonl, parquet):
    jsonl.write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(FormatError, match="line 2 is not JSON"):
        documents([jsonl], "text")
    parquet.write_bytes(b"PAR1 no more")
    with pytest.raises(FormatError, match="is no Parquet file"):
        documents([parquet], "text")


def test_column_of_a_text_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"--column text needs .jsonl or .parquet files, got"):
        documents([tmp_path / "a.txt"], "text")


def test_parquet_without_pyarrow_names_the_extra(parquet, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"needs .* pyarrow: install tiny-llm\[parquet\]"):
        documents([parquet], "text")


def test_sources_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="empty: the folder holds no files"):
        find_sources([tmp_path / "empty"])
    with pytest.raises(FileError, match="No such file"):
        find_sources([tmp_path / "none.txt"])
    with pytest.raises(ConfigError, match="nothing to prepare"):
        find_sources([])
