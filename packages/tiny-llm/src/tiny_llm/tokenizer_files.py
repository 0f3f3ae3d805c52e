"""Where the tokenizer of tokens and of runs lies."""

from pathlib import Path

from tiny_llm.bpe import BPETokenizer
from tiny_llm.data import Tokens
from tiny_llm.errors import FileError
from tiny_llm.tokenizer import ByteTokenizer, Tokenizer, check_same_tokenizer

FILE_NAME = "tokenizer.json"


def tokenizer_path(tokens: Path) -> Path:
    """Return where `prepare` saves the tokenizer of a token file or of a folder of shards.

    >>> tokenizer_path(Path("data/tokens.bin")).as_posix()
    'data/tokens.tokenizer.json'
    """
    return tokens / FILE_NAME if tokens.is_dir() else tokens.with_suffix(f".{FILE_NAME}")


def tokenizer_of(tokens: Tokens, named: str = "") -> Tokenizer:
    """Return the tokenizer that made some tokens.

    Args:
        tokens: Which record its checksum.
        named: Its file; by default the one that `prepare` saved beside the tokens.

    Raises:
        FileError: Its file is not there.
        FormatError: The file holds another tokenizer.
    """
    bytewise = ByteTokenizer()
    if not named and tokens.tokenizer_checksum == bytewise.checksum:
        return bytewise
    path = Path(named) if named else tokenizer_path(tokens.path)
    if not path.exists():
        message = f"the tokenizer of {tokens.path} is not at {path}; name its file with --tokenizer"
        raise FileError(message)
    tokenizer = BPETokenizer.load(path)
    check_same_tokenizer(str(tokens.path), tokens.tokenizer_checksum, tokenizer)
    return tokenizer


def tokenizer_of_run(checkpoint: Path) -> Tokenizer:
    """Return the tokenizer saved beside a checkpoint, or the byte tokenizer if none was.

    Raises:
        FormatError: The file there is no tokenizer.
    """
    path = checkpoint.with_name(FILE_NAME)
    return BPETokenizer.load(path) if path.exists() else ByteTokenizer()
