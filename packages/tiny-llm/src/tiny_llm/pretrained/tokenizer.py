"""Tokenizers of Hugging Face checkpoints: byte-level BPE with special tokens."""

import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_llm.bpe import byte_characters
from tiny_llm.chat_template import token_text, tokenizer_config
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import read_json_object
from tiny_llm.tokenizer import as_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

FILE_NAME, GENERATION_CONFIG = "tokenizer.json", "generation_config.json"


class PretrainedTokenizer:
    """The tokenizer of a checkpoint, as its authors made it.

    Unlike our own it knows special tokens, also where a text spells them, and may begin a text with
    one.

    Args:
        engine: A byte-level BPE of the `tokenizers` library.
        end_of_text: The id that ends a text.
        stop_tokens: All ids that end an answer.

    Raises:
        FormatError: It is another kind of tokenizer.
    """

    def __init__(self, engine: "Engine", end_of_text: int, stop_tokens: Iterable[int]) -> None:
        self._engine = engine
        self.end_of_text = end_of_text
        self.stop_tokens = frozenset({end_of_text, *stop_tokens})
        self.vocab_size = engine.get_vocab_size(with_added_tokens=True)
        added = engine.get_added_tokens_decoder()
        to_byte = {char: byte for byte, char in enumerate(byte_characters())}
        self._bytes: dict[int, bytes] = {}
        try:
            for token, token_id in engine.get_vocab(with_added_tokens=False).items():
                self._bytes[token_id] = bytes(to_byte[char] for char in token)
        except KeyError as error:
            message = f"not a byte-level BPE: {error} is in its vocabulary"
            raise FormatError(message) from error
        for token_id, entry in added.items():
            self._bytes[token_id] = b"" if entry.special else entry.content.encode()

    @classmethod
    def load(cls, folder: str | Path) -> "PretrainedTokenizer":
        """Read the tokenizer of a checkpoint folder.

        Raises:
            FileError: It has none.
            FormatError: It is damaged, of another kind, or does not say what ends a text.
        """
        from tokenizers import Tokenizer

        folder = Path(folder)
        path = folder / FILE_NAME
        if not path.is_file():
            message = f"{folder} has no {FILE_NAME}"
            raise FileError(message)
        try:
            engine = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for all it cannot parse
            message = f"{path} is no tokenizer file: {error}"
            raise FormatError(message) from error
        ending = token_text(tokenizer_config(folder).get("eos_token"))
        end_of_text = None if ending is None else engine.token_to_id(ending)
        stop_tokens = _stop_tokens(folder)
        if end_of_text is None and not stop_tokens:
            message = f"{folder} does not say which token ends a text (`eos_token`)"
            raise FormatError(message)
        try:
            return cls(engine, stop_tokens[0] if end_of_text is None else end_of_text, stop_tokens)
        except FormatError as error:
            message = f"{path} is {error}"
            raise FormatError(message) from error

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the tokenizer's own description."""
        return zlib.crc32(self._engine.to_str().encode())

    def encode(self, text: str | bytes) -> list[int]:
        """Return the ids of a text, after the one that begins a text if there is such.

        Raises:
            ConfigError: The text is no valid UTF-8.
        """
        return self._encoded(text, begins=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of what a chat template gave, which has its special tokens already."""
        return self._encoded(text, begins=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of some tokens; special ones, and ids that are not used, have none."""
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _encoded(self, text: str | bytes, *, begins: bool) -> list[int]:
        try:
            valid = as_bytes(text).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("this tokenizer takes UTF-8 only") from error
        ids: list[int] = self._engine.encode(valid, add_special_tokens=begins).ids
        return ids


def _stop_tokens(folder: Path) -> list[int]:
    """Return the ids that `generation_config.json` lets an answer end with."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return []
    found = read_json_object(path).get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return [token for token in listed if isinstance(token, int)]
