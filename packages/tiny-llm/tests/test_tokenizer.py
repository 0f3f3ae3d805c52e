"""No byte is lost."""

import pytest

from tiny_llm.errors import ConfigError
from tiny_llm.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


def test_arbitrary_bytes_round_trip():
    every_byte = bytes(range(256)) + b"\xff\xfe\xed\xa0\x80"
    ids = tokenizer.encode(every_byte)
    assert ids == list(every_byte)
    assert tokenizer.decode_bytes(ids) == every_byte


def test_text_round_trips_through_utf8():
    text = "naïve 漢字 \N{GRINNING FACE}\0\r\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_smuggled_in_as_surrogates_come_out_as_bytes():
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert tokenizer.encode(argument) == list(b"caf\xe9")


def test_broken_utf8_decodes_to_replacement_characters():
    assert tokenizer.decode([0x61, 0xE6, 0x62]) == "a\ufffdb"


def test_end_of_text_is_the_last_id_and_has_no_bytes():
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    assert tokenizer.decode([104, 105, tokenizer.end_of_text]) == "hi"


@pytest.mark.parametrize("token", [-1, 257])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ConfigError, match=f"must be 0 to 256, got {token}"):
        tokenizer.decode([65, token])


def test_text_that_no_utf8_can_hold_is_refused():
    with pytest.raises(ConfigError, match="surrogates not allowed at character 1"):
        tokenizer.encode("a\ud800")
