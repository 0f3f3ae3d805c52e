"""The command line: `tiny-llm prepare | train | generate`.

What a user can mend is reported as one line on stderr with exit status 2.  The commands themselves
are in `tiny_llm.commands`, imported after parsing, so that `--help` does not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from tiny_llm import __version__
from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.errors import TinyLLMError

USER_ERROR, INTERRUPTED, OUTPUT_CLOSED = 2, 130, 141

# these follow from the token file and from --seq-len
DERIVED = frozenset({"vocab_size", "max_seq_len"})

EXAMPLE = """\
example:
  tiny-llm prepare --out tokens.bin
  tiny-llm train --tokens tokens.bin --out runs/first --steps 50
  tiny-llm generate --checkpoint runs/first --prompt "def "
"""


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, like all others of this program."""

    def error(self, message: str) -> NoReturn:
        """Report a wrong command line and exit."""
        self.exit(USER_ERROR, f"tiny-llm: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        _run(arguments)
    except TinyLLMError as error:
        one_line = " ".join(str(error).split())
        print(f"tiny-llm: error: {one_line}", file=sys.stderr)
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
    return 0


def _run(arguments: argparse.Namespace) -> None:
    from tiny_llm import commands

    match arguments.command:
        case "prepare":
            commands.prepare(arguments)
        case "train":
            commands.train(arguments)
        case "generate":
            commands.generate(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = OneLineParser(
        prog="tiny-llm",
        description="Train a small language model on any text and sample from it.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiny-llm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_prepare(commands.add_parser("prepare", help="turn text files into one token file"))
    _add_train(commands.add_parser("train", help="train a model, or go on training it"))
    _add_generate(commands.add_parser("generate", help="continue a prompt with a trained model"))
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write one token file from files of any bytes, one token per byte."
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="FILE",
        help="files to read (default: the sources of this Python's standard library)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="token file to write")
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="INT",
        help="take at most this much of the standard library (default: all, about 12 MB)",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a model on a token file; the run's folder gets its checkpoint."
    run = parser.add_argument_group("run")
    run.add_argument("--tokens", required=True, metavar="FILE", help="made by tiny-llm prepare")
    run.add_argument("--out", required=True, metavar="FOLDER", help="folder of the run")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out, with its settings; "
        "only --steps and --attention may then change",
    )
    run.add_argument(
        "--checkpoint-every",
        type=int,
        default=100,
        metavar="INT",
        help="steps between checkpoints; there is always one at the end (default: 100)",
    )
    _add_device(run)
    _add_settings(parser.add_argument_group("training"), TrainingConfig)
    _add_settings(parser.add_argument_group("model"), ModelConfig)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a prompt and what the model makes of it, as it is drawn."
    parser.add_argument(
        "--checkpoint", required=True, metavar="PATH", help="folder of a run, or its checkpoint"
    )
    parser.add_argument("--prompt", default="", help="text to continue (default: none)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="INT", help="(default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="FLOAT",
        help="0 always takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="INT", help="draw from the likeliest only (default: from all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="(default: 0)")
    parser.add_argument("--attention", help="backend to use (default: the one trained with)")
    _add_device(parser)


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, mps (default: cuda if there is one)"
    )


def _add_settings(
    parser: argparse._ActionsContainer, config: type[ModelConfig] | type[TrainingConfig]
) -> None:
    """Add a flag for each field; one that is not given is absent from the parsed arguments."""
    for item in fields(config):
        if item.name not in DERIVED:
            parser.add_argument(
                flag_of(item.name),
                default=argparse.SUPPRESS,
                help=f"{item.metadata['help']} (default: {item.default})",
                **_value_options(item),
            )


def _value_options(item: Field[Any]) -> dict[str, Any]:
    kind = type(item.default)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind, "metavar": kind.__name__.upper()}


def flag_of(field_name: str) -> str:
    """Return the flag that sets a field: ``--batch-size`` for ``batch_size``."""
    return "--" + field_name.replace("_", "-")
