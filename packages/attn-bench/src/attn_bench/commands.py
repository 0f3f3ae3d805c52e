"""What each command does once its arguments are parsed."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from attn_bench.case import PRESETS, Case, check_name
from attn_bench.environment import describe_environment, one_thread, pick_device, summarize
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole
from attn_bench.providers import pick_providers
from attn_bench.quick import quick
from attn_bench.results import Row, read_results, saving
from attn_bench.roofline import FLOP_CONVENTION
from attn_bench.runner import Runner
from attn_bench.suites import SUITES
from attn_bench.tables import markdown, replaced, terminal_table
from attn_bench.timing import Budget
from tiny_llm.errors import TinyLLMError


def run_suite(arguments: Namespace) -> int:
    """Run ``flash`` or ``layer``; 1 if a provider is wrong or failed, else 0."""
    suite = SUITES[arguments.command]
    device = pick_device(arguments.device)
    cases = cases_of(arguments)
    providers = pick_providers(suite.providers, arguments.provider, device)
    if arguments.baseline is not None:
        check_name("baseline", arguments.baseline, [each.name for each in providers])
    environment = describe_environment(device)
    runner = Runner(suite.name, providers, device, Budget(seconds=arguments.milliseconds / 1e3))
    rows: list[Row] = []
    total = len(cases) * len(providers)
    with saving(arguments.save, environment) as save, tqdm(total=total, unit="row") as progress:
        print(f"{suite.name} on {summarize(environment)}\nFLOPs: {FLOP_CONVENTION}\n", flush=True)
        for row in runner.rows(cases):
            rows.append(row)
            save(row)
            progress.update()
    print(terminal_table(rows, arguments.baseline or suite.baseline(rows)))
    return exit_status(rows)


def cases_of(arguments: Namespace) -> list[Case]:
    """Return the cases of the preset, with every axis replaced that was given."""
    preset = PRESETS[arguments.preset]
    axes = {
        "dtypes": arguments.dtype,
        "d_models": arguments.d_model,
        "num_heads": arguments.heads,
        "head_dims": arguments.head_dim,
        "seqlens_q": arguments.seqlen,
        "seqlens_k": arguments.seqlen_k,
        "batches": arguments.batch,
        "causal": arguments.causal and [each == "yes" for each in arguments.causal],
        "modes": arguments.mode,
    }
    given: dict[str, Any] = {name: tuple(axis) for name, axis in axes.items() if axis is not None}
    if arguments.total_tokens is not None:
        given |= {"total_tokens": arguments.total_tokens, "batches": given.get("batches", ())}
    return preset.with_axes(given).cases()


def exit_status(rows: Sequence[Row]) -> int:
    """Return 1 if any provider was wrong or failed; a refusal or a lack of memory is no failure."""
    return int(any(row.state in ("wrong", "error") for row in rows))


def list_providers(arguments: Namespace) -> int:
    """Print every suite with its providers, and the reason where one is unavailable."""
    device = pick_device(arguments.device)
    for suite in SUITES.values():
        print(f"attn-bench {suite.command}: {suite.summary}")
        lines = [
            [each.name, each.summary, each.why_unavailable(device) or "available"]
            for each in suite.providers.values()
        ]
        print(tabulate(lines, ["provider", "what it is", f"on {device}"]), end="\n\n")
    print(f"presets: {', '.join(PRESETS)}")
    return 0


def run_quick(arguments: Namespace) -> int:
    """Run the main job."""
    device = pick_device(arguments.device)
    with one_thread(device):
        environment = describe_environment(device)
        with saving(arguments.save, environment) as save:
            try:
                agrees = quick(device, environment, steps=arguments.steps, on_row=save)
            except TinyLLMError as error:  # for example a Python without its sources
                raise InputError(str(error)) from error
    return 0 if agrees else 1


def print_table(arguments: Namespace) -> int:
    """Print a result as Markdown, or put it into a document, or check that it is there."""
    if arguments.check and arguments.into is None:
        raise InputError("`--check` needs `--into`: the document to compare with.")
    table = markdown(read_results(arguments.file), arguments.metric)
    if arguments.into is None:
        print(table, end="")
        return 0
    try:
        document = arguments.into.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"cannot read {arguments.into}: {error.strerror or error}."
        raise InputError(msg) from error
    name = arguments.name or arguments.file.stem
    updated = replaced(document, name, table, arguments.into)
    if arguments.check:
        return _compare(document, updated, arguments)
    with appearing_whole(arguments.into) as file:
        file.write(updated)
    return 0


def _compare(document: str, updated: str, arguments: Namespace) -> int:
    if document == updated:
        return 0
    command = f"attn-bench table {arguments.file} --into {arguments.into}"
    print(f"{arguments.into} does not show {arguments.file}: run `{command}`", file=sys.stderr)
    return 1


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "flash": run_suite,
    "layer": run_suite,
    "quick": run_quick,
    "list": list_providers,
    "table": print_table,
}
