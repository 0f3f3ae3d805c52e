"""Token files hold what was put in, and anything else is refused."""

import resource
import sysconfig
import tracemalloc

import numpy as np
import pytest
import torch

from tiny_llm.batches import sample_batch
from tiny_llm.data import TokenFile, prepare_tokens, stdlib_sources
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.token_file import HEADER, write_token_file
from tiny_llm.tokenizer import ByteTokenizer


@pytest.fixture
def two_texts(tmp_path):
    contents = {"a.txt": b"first \xff\x00 text", "b.txt": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in contents]


def test_token_file_holds_each_text_followed_by_end_of_text(two_texts, tmp_path):
    tokens = prepare_tokens(two_texts, tmp_path / "tokens.bin", ByteTokenizer())
    assert tokens[:].tolist() == [*b"first \xff\x00 text", 256, 256]
    assert tokens.vocab_size == 257
    assert tokens.document_ends.tolist() == [14, 15]
    assert tokens.tokenizer_checksum == ByteTokenizer.checksum
    assert tokens.array.dtype == np.dtype("<u2")
    assert isinstance(tokens.array, np.memmap)
    again = TokenFile.open(tmp_path / "tokens.bin")
    assert np.array_equal(again.array, tokens.array)
    assert again.checksum == tokens.checksum


def test_large_vocabulary_is_stored_in_32_bits(tmp_path):
    tokens = write_token_file(tmp_path / "t.bin", [[[0, 65_535], [65_536]]], vocab_size=65_537)
    assert tokens[:].tolist() == [0, 65_535, 65_536]
    assert tokens.array.dtype == np.dtype("<u4")


def test_preparing_and_opening_take_bounded_memory(tmp_path):
    text = tmp_path / "large.txt"
    text.write_bytes(bytes(range(256)) * (64 << 10))  # 16 MiB of text, 32 MiB of tokens
    tracemalloc.start()
    prepare_tokens([text], tmp_path / "tokens.bin", ByteTokenizer())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.parametrize("cut", [0, 5, HEADER.size - 1, HEADER.size, -1])
def test_truncated_token_file_is_refused(token_file, cut):
    content = token_file.path.read_bytes()
    token_file.path.write_bytes(content[:cut])
    with pytest.raises(FormatError, match=r"truncated|is not a tiny-llm token file"):
        TokenFile.open(token_file.path)


def test_any_flipped_bit_is_noticed(token_file):
    content = token_file.path.read_bytes()
    positions = [*range(HEADER.size - 16), HEADER.size, len(content) // 2, len(content) - 1]
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1
        token_file.path.write_bytes(damaged)
        with pytest.raises(FormatError):
            TokenFile.open(token_file.path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"import this\n" * 20, "is not a tiny-llm token file; make one with tiny-llm prepare"),
        (
            HEADER.pack(b"TINYLLM\0", 9, b"uint16", 257, 0, 0, 0, 0),
            "has format version 9, .* reads 2",
        ),
    ],
)
def test_foreign_file_is_refused(tmp_path, content, message):
    path = tmp_path / "foreign.bin"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        TokenFile.open(path)


def test_missing_token_file_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(FileError, match=r"no\.bin does not exist; make it with tiny-llm prepare"):
        TokenFile.open(tmp_path / "no.bin")
    with pytest.raises(FileError, match="Is a directory"):
        TokenFile.open(tmp_path)


def test_source_that_cannot_be_read_leaves_nothing_behind(two_texts, tmp_path):
    out = tmp_path / "out" / "tokens.bin"
    out.parent.mkdir()
    for bad in (tmp_path / "missing.txt", out.parent):
        with pytest.raises(FileError, match="cannot read"):
            prepare_tokens([*two_texts, bad], out, ByteTokenizer())
        assert list(out.parent.iterdir()) == []


def test_no_sources_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no source files"):
        prepare_tokens([], tmp_path / "tokens.bin", ByteTokenizer())


@pytest.mark.parametrize("out", [".", "missing/tokens.bin", "a.txt/tokens.bin"])
def test_unwritable_output_is_refused(two_texts, tmp_path, out):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match="cannot write"):
        prepare_tokens(two_texts, tmp_path / out, ByteTokenizer())
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_no_token_file_is_not_overwritten(two_texts, tmp_path):
    with pytest.raises(FormatError, match=r"a\.txt exists and is no token file"):
        prepare_tokens(two_texts, two_texts[0], ByteTokenizer())
    assert two_texts[0].read_bytes() == b"first \xff\x00 text"


def test_full_disk_keeps_the_old_file_and_leaves_no_other(token_file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(1 << 20))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond this size fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(FileError, match=r"cannot write .*tokens.bin: File too large"):
            prepare_tokens([text], token_file.path, ByteTokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_batches_are_windows_with_targets_one_token_later():
    tokens = np.arange(100, 140)
    inputs, targets = sample_batch(tokens, 64, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (64, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
    assert torch.equal(targets, inputs + 1)
    # the first and the last window are among 64 draws from 32 places
    assert inputs.min() == 100
    assert targets.max() == 139


def test_the_generator_alone_decides_the_batch(token_file):
    batches = [
        sample_batch(token_file, 4, 8, torch.Generator().manual_seed(seed))[0] for seed in (3, 3, 4)
    ]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_shortest_text_gives_its_only_window_and_a_shorter_one_is_refused():
    generator = torch.Generator()
    inputs, targets = sample_batch(np.array([7, 8, 9]), 1, 2, generator)
    assert inputs.tolist() == [[7, 8]]
    assert targets.tolist() == [[8, 9]]
    with pytest.raises(ConfigError, match="seq_len=3 needs at least 4 tokens, got 3"):
        sample_batch(np.array([7, 8, 9]), 1, 3, generator)


def test_stdlib_sources_are_sorted_python_files_without_tests():
    sources = stdlib_sources()
    assert sources == sorted(sources)
    names = {path.name for path in sources}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"test", "site-packages"} & set(path.parts) for path in sources)


def test_stdlib_sources_keep_to_the_size_cap():
    total = sum(path.stat().st_size for path in stdlib_sources(max_bytes=100_000))
    assert 50_000 < total <= 100_000


def test_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileError, match=r"no standard library sources under .*; name files"):
        stdlib_sources()
