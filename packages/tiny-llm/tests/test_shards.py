"""Shards read like one file, and a stopped preparation goes on to the very same shards."""

import numpy as np
import pytest
import torch

from tiny_llm import data
from tiny_llm.batches import sample_batch
from tiny_llm.bpe import BPETokenizer
from tiny_llm.data import open_tokens, prepare_shards, prepare_tokens
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.shards import TokenShards
from tiny_llm.tokenizer import ByteTokenizer


@pytest.fixture
def texts(tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([65 + number]) * (5 * number + 1))
    return paths


def shards(texts, folder, **settings):
    return prepare_shards(texts, folder, ByteTokenizer(), **{"shard_tokens": 40, **settings})


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_the_tokens_and_documents_of_a_single_file(texts, tmp_path):
    whole = prepare_tokens(texts, tmp_path / "t.bin", ByteTokenizer())
    parts = shards(texts, tmp_path / "t")
    assert len(parts.files) > 2
    assert len(parts) == len(whole)
    assert parts[:].tolist() == whole[:].tolist()
    assert parts.document_ends.tolist() == whole.document_ends.tolist()
    assert parts.document_ends.tolist() == np.cumsum([5 * n + 2 for n in range(9)]).tolist()
    # every window, also one that spans several shards
    for start in range(len(whole) - 60):
        assert parts[start : start + 60].tolist() == whole[start : start + 60].tolist()


def test_batches_are_those_of_a_single_file(texts, tmp_path):
    sources = [prepare_tokens(texts, tmp_path / "t.bin", ByteTokenizer())]
    shards(texts, tmp_path / "t")
    sources.append(open_tokens(tmp_path / "t"))
    one, other = (
        sample_batch(tokens, 16, 50, torch.Generator().manual_seed(0)) for tokens in sources
    )
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("stop_after", [0, 1, 4, 7, 8])
def test_stopped_preparation_goes_on_and_ends_with_the_same_bytes(
    texts, tmp_path, monkeypatch, stop_after
):
    shards(texts, tmp_path / "whole")
    read = []

    class Stopped(Exception):
        pass

    class StoppingTokenizer(ByteTokenizer):
        def encode(self, text):
            read.append(text)
            if len(read) == stop_after + 1:
                raise Stopped
            return super().encode(text)

    with pytest.raises(Stopped):
        prepare_shards(texts, tmp_path / "t", StoppingTokenizer(), shard_tokens=40)
    if (tmp_path / "t" / "shards.json").exists():
        with pytest.raises(FormatError, match=r"is not complete; repeat the tiny-llm prepare"):
            TokenShards.open(tmp_path / "t")
    shards(texts, tmp_path / "t")
    assert content(tmp_path / "t") == content(tmp_path / "whole")


def test_finished_preparation_reads_no_text_again(texts, tmp_path, monkeypatch):
    first = shards(texts, tmp_path / "t")
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: pytest.fail("read again"))
    assert shards(texts, tmp_path / "t").checksum == first.checksum


def test_folder_with_shards_of_something_else_is_refused(texts, tmp_path):
    shards(texts, tmp_path / "t")
    message = "holds shards of other text, another tokenizer or another size"
    with pytest.raises(FormatError, match=message):
        shards(texts, tmp_path / "t", shard_tokens=41)
    with pytest.raises(FormatError, match=message):
        shards(texts[1:], tmp_path / "t")
    bpe = BPETokenizer.train([b"abc"], 300)
    with pytest.raises(FormatError, match=message):
        prepare_shards(texts, tmp_path / "t", bpe, shard_tokens=40)


def test_shard_of_another_tokenizer_is_refused(texts, tmp_path):
    shards(texts, tmp_path / "t")
    bpe = BPETokenizer.train([b"abc"], 300)
    prepare_tokens(texts, tmp_path / "t" / "shard-00001.bin", bpe)
    with pytest.raises(FormatError, match=r"shard-00001\.bin was made with another tokenizer"):
        TokenShards.open(tmp_path / "t")


def test_damaged_or_missing_index_is_refused(texts, tmp_path):
    with pytest.raises(FileError, match="holds no token shards"):
        open_tokens(tmp_path)
    shards(texts, tmp_path / "t")
    (tmp_path / "t" / "shards.json").write_text('{"shards": [')
    with pytest.raises(FormatError, match=r"shards\.json is damaged"):
        open_tokens(tmp_path / "t")


def test_shards_without_a_size_are_refused(texts, tmp_path):
    with pytest.raises(ConfigError, match="`shard_tokens` must be at least 1, got 0"):
        data.prepare_shards(texts, tmp_path / "t", ByteTokenizer(), shard_tokens=0)
