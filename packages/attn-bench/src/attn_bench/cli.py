"""The command ``attn-bench``.

    attn-bench run FILE.toml              the grids of a file
    attn-bench quick                      train, check everything, time what this machine allows
    attn-bench flash --preset paper       the kernel against torch's attentions
    attn-bench layer --preset smoke       tiny-llm's attention with and without torch.compile
    attn-bench decode                     one query per sequence over a cache
    attn-bench overhead                   what a call costs the host
    attn-bench train-step                 a training step by attention backend
    attn-bench generate                   a decoding step of a model
    attn-bench policy FILE.jsonl          the fastest backend per shape class
    attn-bench list                       suites, providers, and why one is unavailable
    attn-bench report FILE.jsonl          one HTML page
    attn-bench plots FILE.jsonl           PNG and SVG
    attn-bench table FILE.jsonl           Markdown from a saved result
    attn-bench docs README.md             the tables and plots of a document, anew or checked
    attn-bench compare A.jsonl B.jsonl    what became slower
    attn-bench env                        the machine, as it goes with every result

Exit status: 0 if everything agrees, 1 if something is wrong, 2 for bad input, 130 if interrupted,
141 if nobody reads the output on.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from attn_bench import __version__
from attn_bench.case import DTYPES, MODES
from attn_bench.errors import InputError
from attn_bench.grid import DECODE_PRESETS, MODELS, PRESETS
from tiny_llm.model_config import PRESETS as MODEL_PRESETS


class _Parser(argparse.ArgumentParser):
    """Reports bad arguments in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    # the profiler that measures memory on a CPU would write to stderr; torch reads this once, when
    # it is imported, which is why this module and its parser do without torch
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    from attn_bench import commands

    try:
        status = commands.COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except InputError as error:
        print(f"attn-bench {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # who reads, such as `head`, has seen enough; Python itself must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        can_resume = "resume" in arguments and arguments.save is not None
        hint = "; `--resume` goes on if rows were saved" if can_resume else ", nothing was saved"
        print(f"attn-bench {arguments.command}: interrupted{hint}", file=sys.stderr)
        return 130
    return status


def positive(text: str) -> int:
    """Return `text` as an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        msg = f"needs an integer of at least 1, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; it needs no torch."""
    parser = _Parser(
        prog="attn-bench", description="Benchmarks that refuse to time a wrong kernel."
    )
    parser.add_argument("--version", action="version", version=f"attn-bench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_suite(commands.add_parser("flash", help="flash-kernel against torch's attentions"))
    _add_suite(commands.add_parser("layer", help="tiny-llm's attention, eager and compiled"))
    from_file = commands.add_parser("run", help="the grids of a TOML file")
    from_file.add_argument("file", type=Path, metavar="FILE.toml")
    _add_run(from_file)
    decode = commands.add_parser("decode", help="one query per sequence over a cache")
    _add_suite(decode, DECODE_PRESETS)
    overhead = commands.add_parser("overhead", help="what a call costs the host")
    overhead.add_argument("--provider", nargs="+", metavar="NAME", help="of the suite `flash`")
    _add_device(overhead)
    _add_save(overhead)
    _add_train_step(commands.add_parser("train-step", help="a training step by attention backend"))
    _add_generate(commands.add_parser("generate", help="a decoding step of a model"))
    _add_quick(commands.add_parser("quick", help="the main job: train, check, time; minutes"))
    listing = commands.add_parser("list", help="suites, providers, and why one is unavailable")
    _add_device(listing)
    _add_table(commands.add_parser("table", help="Markdown table of a saved result"))
    _add_plots(commands.add_parser("plots", help="plots of a saved result, as PNG and SVG"))
    docs = commands.add_parser("docs", help="the tables and plots of documents, anew or checked")
    docs.add_argument("documents", nargs="+", type=Path, metavar="README.md")
    docs.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if one does not show its file"
    )
    _add_device(commands.add_parser("env", help="the machine, as it goes with every result"))
    policy = commands.add_parser("policy", help="the fastest backend of tiny-llm per shape class")
    policy.add_argument("file", type=Path, metavar="FILE.jsonl")
    policy.add_argument("--into", type=Path, metavar="POLICY.json", help="default: print it")
    page = commands.add_parser("report", help="one HTML page of a saved result")
    page.add_argument("file", type=Path, metavar="FILE.jsonl")
    page.add_argument("--into", type=Path, metavar="PAGE.html", help="default: FILE.html")
    _add_compare(commands.add_parser("compare", help="two result files; 1 if the second is slower"))
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=MODEL_PRESETS, help="of tiny-llm, in place of a shape")
    model.add_argument("--d-model", type=positive, default=256)
    model.add_argument("--layers", type=positive, default=2)
    model.add_argument("--heads", type=positive, default=4)
    model.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, else fp32")


def _add_train_step(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--batch", type=positive, help="sequences per step (default: 2)")
    parser.add_argument("--tokens", type=positive, help="tokens per step, in place of --batch")
    parser.add_argument("--seqlen", nargs="+", type=positive, default=[128, 256])
    parser.add_argument("--compile", action="store_true", help="compile model and loss")
    parser.add_argument(
        "--loss-chunk",
        type=positive,
        default=0,
        help="tokens whose logits are held at a time (default: those of all)",
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        metavar="NAME",
        default=["eager", "sdpa", "flash"],
        help="attention backends of tiny-llm; the first is what the others are predicted from",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE.py",
        help="also time other programs' models: a file's make_model(seq_len, vocab_size) returns "
        "a module of tokens and targets that returns the mean loss",
    )
    parser.add_argument(
        "--steps", type=positive, default=10, help="timed steps, in fives (default: 10)"
    )
    _add_device(parser)
    _add_save(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--batch", nargs="+", type=positive, help="sequences (default: 1)")
    parser.add_argument(
        "--context", nargs="+", type=positive, default=[128], help="tokens in the cache"
    )
    parser.add_argument("--backend", nargs="+", metavar="NAME", default=["sdpa", "flash"])
    parser.add_argument(
        "--decode",
        nargs="+",
        choices=("eager", "graph", "compile"),
        help="how a step is run (default: graph on a GPU, else eager)",
    )
    parser.add_argument(
        "--steps", type=positive, default=50, help="timed steps, in fives (default: 50)"
    )
    _add_device(parser)
    _add_save(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.jsonl")
    parser.add_argument("b", type=Path, metavar="B.jsonl")
    parser.add_argument(
        "--threshold",
        type=positive,
        default=5,
        help="percent that the whole confidence interval must exceed (default: 5)",
    )
    parser.add_argument("--all", action="store_true", help="also show the rows that are the same")


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:INDEX (default: the GPU if there is one)"
    )


def _add_save(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="write the rows to a file")


def _add_suite(parser: argparse.ArgumentParser, presets: Iterable[str] = PRESETS) -> None:
    """Add the axes of the grid, which override the preset's, and the options of the run."""
    axes = parser.add_argument_group("cases", "each of these replaces an axis of the preset")
    axes.add_argument("--preset", choices=presets, default="smoke", help="default: smoke")
    axes.add_argument("--shapes-of", choices=MODELS, metavar="MODEL", help="in place of a preset")
    axes.add_argument("--dtype", nargs="+", choices=DTYPES)
    axes.add_argument("--d-model", nargs="+", type=positive, help="heads * head-dim")
    axes.add_argument("--heads", nargs="+", type=positive)
    axes.add_argument("--head-dim", nargs="+", type=positive)
    axes.add_argument("--seqlen", nargs="+", type=positive, help="number of queries")
    axes.add_argument("--seqlen-k", nargs="+", type=positive, help="number of keys, if different")
    axes.add_argument("--batch", nargs="+", type=positive)
    axes.add_argument("--total-tokens", type=positive, help="sets batch to total-tokens // seqlen")
    axes.add_argument("--causal", nargs="+", choices=("no", "yes"))
    axes.add_argument("--kv-heads", nargs="+", type=positive, help="heads of k and v, if fewer")
    axes.add_argument("--window", nargs="+", type=positive, help="keys seen on each side")
    axes.add_argument("--mode", nargs="+", choices=MODES)
    parser.add_argument("--provider", nargs="+", metavar="NAME", help="see `attn-bench list`")
    _add_run(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--baseline", metavar="NAME", help="the provider that ratios refer to")
    run.add_argument(
        "--milliseconds", type=positive, default=500, help="time for a provider on a case"
    )
    run.add_argument(
        "--resume", action="store_true", help="go on with the interrupted run of --save"
    )
    run.add_argument(
        "--cold-start",
        action="store_true",
        help="also time a first call in a new process with empty caches (seconds each)",
    )
    _add_device(run)
    _add_save(run)


def _add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=40, help="training steps (default: 40)")
    _add_device(parser)
    _add_save(parser)


def _add_rows(parser: argparse.ArgumentParser) -> None:
    """Add a result file, and which of its rows are taken."""
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    rows = parser.add_argument_group("rows", "each of these leaves out all others")
    rows.add_argument("--provider", nargs="+", metavar="NAME")
    rows.add_argument("--mode", nargs="+", choices=MODES)
    rows.add_argument("--dtype", nargs="+", choices=DTYPES)
    rows.add_argument("--head-dim", nargs="+", type=positive)


def _add_table(parser: argparse.ArgumentParser) -> None:
    _add_rows(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--metric",
        default="tflops",
        metavar="NAME",
        help="tflops, tflops_unmasked, gb_s, ms, memory, error, roofline, step or cold "
        "(default: tflops)",
    )
    what.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="instead: the ratio to the best of these providers, its mean and its worst case",
    )
    what.add_argument("--csv", action="store_true", help="instead: every row as CSV")


def _add_plots(parser: argparse.ArgumentParser) -> None:
    _add_rows(parser)
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", default=Path(), help="default: the current one"
    )
    parser.add_argument(
        "--metric",
        nargs="+",
        default=["tflops", "memory", "error"],
        metavar="NAME",
        help="as of `table` (default: tflops memory error)",
    )
    parser.add_argument("--format", nargs="+", choices=("png", "svg"), default=["png", "svg"])
    parser.add_argument("--name", help="what the files' names begin with (default: FILE's)")
