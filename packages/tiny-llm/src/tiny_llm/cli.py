"""The command line: `tiny-llm COMMAND ...`, one command for each entry of `COMMANDS`.

What a user can mend is reported as one line on stderr with exit status 2.  The options are
dataclasses (`tiny_llm.options`), parsed by tyro.  The commands themselves are imported after
parsing, so that `--help` does not wait for torch.
"""

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tiny_llm import __version__
from tiny_llm.errors import ConfigError, TinyLLMError

USER_ERROR, INTERRUPTED, OUTPUT_CLOSED = 2, 130, 141

# command -> class in tiny_llm.options, function that runs it, what it does
COMMANDS: dict[str, tuple[str, str, str]] = {
    "prepare": ("PrepareOptions", "tiny_llm.commands:prepare", "turn text into tokens"),
    "train": ("TrainOptions", "tiny_llm.run:train", "train a model"),
    "resume": ("TrainOptions", "tiny_llm.run:train", "go on training where a run was stopped"),
    "eval": ("EvalOptions", "tiny_llm.commands:evaluate", "say how well a model predicts a text"),
    "generate": ("GenerateOptions", "tiny_llm.talking:generate", "continue a prompt"),
    "chat": ("ChatOptions", "tiny_llm.talking:chat", "talk with a model, line by line"),
    "info": ("InfoOptions", "tiny_llm.describe:info", "describe a run, tokens or this machine"),
    "attention": (
        "AttentionOptions",
        "tiny_llm.commands:attention",
        "explain which attention backend a request gets",
    ),
}

HELP = """\
usage: tiny-llm COMMAND [OPTIONS]

Train a small language model on any text and sample from it.

commands:
{commands}
  tiny-llm COMMAND --help lists all options of one; --version prints the version

example:
  tiny-llm prepare --out tokens.bin
  tiny-llm train --tokens tokens.bin --out runs/first --steps 50
  tiny-llm generate --checkpoint runs/first --prompt "def "
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except TinyLLMError as error:
        print(f"tiny-llm: error: {_one_line(str(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(
            "tiny-llm: interrupted; saved files are whole, train goes on with --resume",
            file=sys.stderr,
        )
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has seen enough (`| head`); without this the interpreter's last flush fails too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        lines = (f"  {name:<10} {text}" for name, (_, _, text) in COMMANDS.items())
        print(HELP.format(commands="\n".join(lines) + "\n"), end="")
        return 0
    if arguments[:1] == ["--version"]:
        print(f"tiny-llm {__version__}")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        came = f"unknown command {arguments[0]!r}" if arguments else "a command is required"
        message = f"{came}; there are {', '.join(COMMANDS)} (see tiny-llm --help)"
        raise ConfigError(message)
    options = parse(arguments[0], arguments[1:])
    if options is None:
        return 0
    module, _, function = COMMANDS[arguments[0]][1].partition(":")
    getattr(import_module(module), function)(options)
    return 0


def parse(command: str, arguments: Sequence[str]) -> Any:
    """Return the options of a command, or None if its help was asked for and printed.

    Raises:
        ConfigError: An option is unknown, or a value does not fit.
    """
    import tyro

    from tiny_llm import options
    from tiny_llm.settings_file import train_defaults

    wants_help = bool({"-h", "--help"} & set(arguments))
    kind: Any = getattr(options, COMMANDS[command][0])
    default = kind()
    if kind is options.TrainOptions:
        # `--help` shows the built-in defaults, and needs no file
        default = kind() if wants_help else train_defaults(arguments, is_resume=command == "resume")
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            return tyro.cli(
                kind,
                args=arguments,
                default=default,
                prog=f"tiny-llm {command}",
                # given, because tyro takes "examples:" in a docstring for a section to leave out
                description=inspect.cleandoc(kind.__doc__ or ""),
                config=options.FLAT,
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        message = f"{_unboxed(heard.getvalue())} (see tiny-llm {command} --help)"
        raise ConfigError(message) from None


def _unboxed(text: str) -> str:
    """Return what tyro says inside its box: not its title, nor its advice below the first rule.

    With ASCII alone the box is no more than rules, the first of them below the title.
    """
    sections: list[list[str]] = [[]]
    for line in text.splitlines():
        content = line.strip().strip("│").strip()
        if content.startswith(("───", "---")):
            sections.append([])
        elif content and content[0] not in "╭╰":
            sections[-1].append(content)
    return " ".join(sections[0 if "╭" in text else 1])


def _one_line(text: str) -> str:
    return " ".join(text.split())
