"""The simplest tokenizer that loses nothing: one token per byte."""

from collections.abc import Iterable

from tiny_llm.errors import ConfigError


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

    def encode(self, text: str | bytes) -> list[int]:
        """Return one id per byte; a `str` is taken as UTF-8.

        Raises:
            ConfigError: `text` holds a character that UTF-8 cannot express (a lone surrogate).
        """
        if isinstance(text, bytes):
            return list(text)
        try:
            # bytes that were no UTF-8 on the command line arrive as surrogates and leave as bytes
            return list(text.encode("utf-8", errors="surrogateescape"))
        except UnicodeEncodeError as error:
            message = f"text cannot be encoded as UTF-8: {error.reason} at character {error.start}"
            raise ConfigError(message) from error

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return exactly the bytes that were encoded; end-of-text has none.

        Raises:
            ConfigError: An id is not in this vocabulary.
        """
        kept = [token for token in ids if token != self.end_of_text]
        for token in kept:
            if not 0 <= token < self.end_of_text:
                message = f"token ids must be 0 to {self.end_of_text}, got {token}"
                raise ConfigError(message)
        return bytes(kept)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD.

        For an exact round trip of arbitrary bytes use `decode_bytes`.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")
