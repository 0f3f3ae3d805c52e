"""Byte-level BPE loses no byte, compresses, and cannot be mistaken for another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.bpe import BPETokenizer, byte_characters
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.tokenizer import ByteTokenizer

TEXT = "the cat sat on the mat; la crème brûlée est brûlée.\n" * 20

ENGINE_WITHOUT_BYTES = (
    b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],'
    b'"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,'
    b'"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}'
)


def trained(text: str = TEXT, vocab_size: int = 320) -> BPETokenizer:
    return BPETokenizer.train([text.encode()], vocab_size)


tokenizer = trained()


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_round_trip(content):
    assert tokenizer.decode_bytes(tokenizer.encode(content)) == content


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_arbitrary_text_round_trips_in_both_tokenizers(text):
    for each in (tokenizer, ByteTokenizer()):
        try:
            ids = each.encode(text)
        except ConfigError:
            # a lone surrogate is no text
            assert any(0xD800 <= ord(char) <= 0xDFFF for char in text)
        else:
            assert each.decode_bytes(ids) == text.encode("utf-8", errors="surrogateescape")


def test_frequent_text_takes_a_third_of_its_bytes():
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 3
    assert tokenizer.vocab_size <= 320


def test_no_text_contains_the_end_of_text():
    ids = tokenizer.encode("<|endoftext|> </s> <eos>")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == "<|endoftext|> </s> <eos>"


def test_saved_tokenizer_comes_back_the_same(tmp_path):
    tokenizer.save(tmp_path / "bpe.json")
    again = BPETokenizer.load(tmp_path / "bpe.json")
    assert again.checksum == tokenizer.checksum
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_training_is_deterministic_and_another_text_gives_another_checksum():
    assert trained().checksum == tokenizer.checksum
    assert trained(TEXT.upper()).checksum != tokenizer.checksum
    assert tokenizer.checksum != ByteTokenizer.checksum


def test_byte_characters_are_256_printable_ones():
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert characters[ord("A")] == "A"
    assert characters[ord(" ")] == "Ġ"
    assert all(char.isprintable() for char in characters)


def test_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="`vocab_size` must be at least 257, got 256"):
        trained(vocab_size=256)


def test_smallest_vocabulary_is_one_token_per_byte():
    assert len(trained(vocab_size=257).encode("né")) == 3


def test_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="token ids must be 0 to"):
        tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is no tokenizer file: it is not text"),
        (b"{}", "is no tokenizer file"),
        (
            ENGINE_WITHOUT_BYTES,
            "is not a byte-level BPE: it knows 1 of 256 bytes",
        ),
    ],
)
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    path = tmp_path / "bpe.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        BPETokenizer.load(path)


def test_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"cannot read tokenizer .*none\.json: No such file"):
        BPETokenizer.load(tmp_path / "none.json")
