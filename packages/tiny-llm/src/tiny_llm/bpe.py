"""Byte-level BPE, trained and run by the `tokenizers` library.

The saved file is that library's own JSON, so other programs can read it.  Two things are ours:

* bytes that are no valid UTF-8 become one token per byte, so that any bytes round-trip;
* the end of a text is the id after the last one of the vocabulary.  The library does not know it,
  so no text, whatever it spells, can contain it.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import atomic_write, reason_of
from tiny_llm.tokenizer import as_bytes, check_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

SMALLEST_VOCAB = 257  # every byte, and the end of a text
NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # what surrogateescape makes of invalid bytes


class BPETokenizer:
    """Frequent byte sequences are one token; see the module for what is guaranteed.

    Args:
        engine: A byte-level BPE of the `tokenizers` library that knows all 256 bytes.

    Raises:
        FormatError: It is another kind of tokenizer.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        by_id = {token_id: token for token, token_id in engine.get_vocab().items()}
        self.end_of_text = len(by_id)
        self.vocab_size = len(by_id) + 1
        to_byte = {char: byte for byte, char in enumerate(byte_characters())}
        try:
            tokens = [by_id[token_id] for token_id in range(len(by_id))]
            self._bytes = [bytes(to_byte[char] for char in token) for token in tokens]
        except KeyError as error:
            message = f"not a byte-level BPE without special tokens: {error} cannot be a token"
            raise FormatError(message) from error
        self._of_byte = {token[0]: i for i, token in enumerate(self._bytes) if len(token) == 1}
        if len(self._of_byte) < 256:
            message = f"not a byte-level BPE: it knows {len(self._of_byte)} of 256 bytes"
            raise FormatError(message)

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> "BPETokenizer":
        """Learn a vocabulary of at most `vocab_size` ids, the end of a text included.

        Deterministic: the same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: `vocab_size` has no room for the 256 bytes and the end of a text.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < SMALLEST_VOCAB:
            message = f"`vocab_size` must be at least {SMALLEST_VOCAB}, got {vocab_size}"
            raise ConfigError(message)
        engine = Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=byte_characters(),
            show_progress=False,
        )
        engine.train_from_iterator(_valid_parts(texts), trainer)
        return cls(engine)

    @classmethod
    def load(cls, path: str | Path) -> "BPETokenizer":
        """Read a tokenizer that `save` wrote.

        Raises:
            FileError: The file cannot be read.
            FormatError: It holds no byte-level BPE.
        """
        from tokenizers import Tokenizer

        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            message = f"cannot read tokenizer {path}: {reason_of(error)}"
            raise FileError(message) from error
        except UnicodeDecodeError as error:
            message = f"{path} is no tokenizer file: it is not text"
            raise FormatError(message) from error
        try:
            return cls(Tokenizer.from_str(text))
        except FormatError as error:
            message = f"tokenizer {path} is {error}"
            raise FormatError(message) from error
        except Exception as error:  # the library raises bare Exception for all it cannot parse
            message = f"{path} is no tokenizer file: {error}"
            raise FormatError(message) from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as JSON; the file appears whole or not at all.

        Raises:
            FileError: It cannot be written.
        """
        with atomic_write(Path(path)) as file:
            file.write(self._engine.to_str(pretty=True).encode())

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of vocabulary and merges, and of nothing else that the file may say."""
        model: dict[str, Any] = json.loads(self._engine.to_str())["model"]
        described = [sorted(model["vocab"].items(), key=lambda item: item[1]), model["merges"]]
        return zlib.crc32(json.dumps(described).encode())

    def encode(self, text: str | bytes) -> list[int]:
        """Return the ids of a text; a `str` is taken as UTF-8.

        Raises:
            ConfigError: `text` holds a character that UTF-8 cannot express (a lone surrogate).
        """
        ids: list[int] = []
        parts = NOT_UTF8.split(as_bytes(text).decode("utf-8", errors="surrogateescape"))
        for index, part in enumerate(parts):
            if index % 2:  # what the pattern matched
                broken = part.encode("utf-8", errors="surrogateescape")
                ids.extend(self._of_byte[byte] for byte in broken)
            elif part:
                ids.extend(self._engine.encode(part).ids)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return exactly the bytes that were encoded; end-of-text has none.

        Raises:
            ConfigError: An id is not in this vocabulary.
        """
        pieces = []
        for token in ids:
            check_id(token, self)
            if token != self.end_of_text:
                pieces.append(self._bytes[token])
        return b"".join(pieces)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE (GPT-2's table).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _valid_parts(texts: Iterable[bytes]) -> Iterator[str]:
    for text in texts:
        yield from NOT_UTF8.split(text.decode("utf-8", errors="surrogateescape"))[::2]
