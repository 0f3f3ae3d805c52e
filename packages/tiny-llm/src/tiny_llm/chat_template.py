"""Chat templates: how a checkpoint wants a conversation written down.

A template is Jinja code that comes with a checkpoint, so it runs in Jinja's sandbox.  It is
rendered as Hugging Face's transformers renders it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.files import read_json_object, reason_of

FILE_NAME, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Message = Mapping[str, str]  # role ("system", "user", "assistant") and content


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens it may name.

    Attributes:
        source: Jinja code.
        special_tokens: Texts by name, such as ``{"eos_token": "<|im_end|>"}``.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: From the first to the last, each with its role and content.
            add_generation_prompt: End with what the assistant's answer begins with.

        Raises:
            FormatError: The template is no Jinja, or cannot be rendered.
            ConfigError: It refuses these messages; says why in its own words.
        """
        from jinja2 import TemplateError

        try:
            template = _environment().from_string(self.source)
            text: str = template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except _RefusedError as error:
            message = f"the chat template refuses the conversation: {error}"
            raise ConfigError(message) from error
        except (TemplateError, TypeError, ValueError) as error:
            message = f"the chat template cannot be rendered: {error}"
            raise FormatError(message) from error
        return text


class _RefusedError(Exception):
    """What `raise_exception` of a template raises."""


def _environment() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise _RefusedError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def chat_template_of(folder: Path) -> ChatTemplate | None:
    """Return the template of a Hugging Face folder, None if it has none.

    It is the file `chat_template.jinja`, or stands in `tokenizer_config.json`; of several by name
    the one called "default".

    Raises:
        FormatError: The configuration is damaged.
    """
    config = tokenizer_config(folder)
    path = folder / FILE_NAME
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        message = f"{folder / TOKENIZER_CONFIG}: `chat_template` must be text, got {source!r}"
        raise FormatError(message)
    tokens = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def read_chat_template(path: str | Path) -> ChatTemplate:
    """Return the template in a file of Jinja code.

    Raises:
        FileError: It cannot be read.
    """
    try:
        return ChatTemplate(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read chat template {path}: {reason_of(error)}"
        raise FileError(message) from error


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return what `tokenizer_config.json` holds, nothing if it is not there.

    Raises:
        FileError: It cannot be read.
        FormatError: It is no JSON object.
    """
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    return read_json_object(path)


def token_text(entry: Any) -> str | None:
    """Return the text of a special token, which is written as text or as an object with it."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
