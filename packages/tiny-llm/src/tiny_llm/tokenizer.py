"""What a tokenizer is, and the simplest one: one token per byte."""

import zlib
from collections.abc import Iterable
from typing import Protocol

from tiny_llm.errors import ConfigError, FormatError


class Tokenizer(Protocol):
    """Turns bytes into token ids and back without losing one.

    Attributes:
        vocab_size: Every id is below this.
        end_of_text: The id between two documents; it has no bytes.
        checksum: Two tokenizers with the same checksum give the same ids.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def end_of_text(self) -> int: ...  # noqa: D102
    @property
    def checksum(self) -> int: ...  # noqa: D102

    def encode(self, text: str | bytes) -> list[int]:
        """Return the ids of a text; a `str` is taken as UTF-8."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return exactly the bytes that were encoded."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes; 256 marks the end of a text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, tokenizer.end_of_text])
    'né'
    """

    end_of_text = 256
    vocab_size = 257
    checksum = zlib.crc32(b"tiny-llm: one token per byte, 256 ends a text")

    def encode(self, text: str | bytes) -> list[int]:
        """Return one id per byte; a `str` is taken as UTF-8.

        Raises:
            ConfigError: `text` holds a character that UTF-8 cannot express (a lone surrogate).
        """
        return list(as_bytes(text))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return exactly the bytes that were encoded; end-of-text has none.

        Raises:
            ConfigError: An id is not in this vocabulary.
        """
        kept = [token for token in ids if token != self.end_of_text]
        for token in kept:
            check_id(token, self)
        return bytes(kept)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD.

        For an exact round trip of arbitrary bytes use `decode_bytes`.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def as_bytes(text: str | bytes) -> bytes:
    """Return the bytes of a text.

    Raises:
        ConfigError: `text` holds a character that UTF-8 cannot express (a lone surrogate).
    """
    if isinstance(text, bytes):
        return text
    try:
        # bytes that were no UTF-8 on the command line arrive as surrogates and leave as bytes
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        message = f"text cannot be encoded as UTF-8: {error.reason} at character {error.start}"
        raise ConfigError(message) from error


def check_id(token: int, tokenizer: Tokenizer) -> None:
    """Refuse an id outside the vocabulary.

    Raises:
        ConfigError: It is outside.
    """
    if not 0 <= token < tokenizer.vocab_size:
        message = f"token ids must be 0 to {tokenizer.vocab_size - 1}, got {token}"
        raise ConfigError(message)


def check_same_tokenizer(what: str, made_with: int, tokenizer: Tokenizer) -> None:
    """Refuse tokens made with another tokenizer: their ids would mean other text.

    Args:
        what: The file, for the message.
        made_with: The checksum it records.
        tokenizer: The one at hand.

    Raises:
        FormatError: The checksums differ.
    """
    if made_with != tokenizer.checksum:
        message = (
            f"{what} was made with another tokenizer (checksum {made_with:08x}, this one has "
            f"{tokenizer.checksum:08x}); prepare it again, or name its own tokenizer"
        )
        raise FormatError(message)
