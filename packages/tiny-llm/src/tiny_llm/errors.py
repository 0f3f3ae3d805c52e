"""The errors a user can mend.  Each message is one line: what came, and what to do.

Every class is also the built-in exception that fits, so library users may catch either.
The command line prints a `TinyLLMError` and shows no traceback; anything else is our bug.
"""

from typing import Any


class TinyLLMError(Exception):
    """Base of all errors that are the caller's to mend."""


class ConfigError(TinyLLMError, ValueError):
    """A setting or an argument is out of its range, or two of them do not go together."""


class UnknownAttentionError(TinyLLMError, KeyError):
    """No attention backend is registered under the name asked for."""

    def __str__(self) -> str:
        # KeyError would show the repr of its argument, quotes and all
        return str(self.args[0])


class MissingExtraError(TinyLLMError, ImportError):
    """A backend needs an optional package that is absent or broken."""


class FileError(TinyLLMError, OSError):
    """A file cannot be found, read or written."""


class FormatError(TinyLLMError, ValueError):
    """A file can be read, but is not what it should be: foreign, truncated or damaged."""


class TrainingError(TinyLLMError, RuntimeError):
    """Training cannot go on, for example because the loss is not finite."""


class AttentionUnavailable(TinyLLMError, RuntimeError):
    """No backend that was asked for can serve the request; the message has every reason and fix.

    Attributes:
        trace: The `tiny_llm.attention.Decision` on each backend that was considered.
    """

    trace: tuple[Any, ...] = ()


class MissingAttentionError(AttentionUnavailable, MissingExtraError):
    """As `AttentionUnavailable`, because a package is absent or broken."""
