"""What each command does once its arguments are parsed."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from attn_bench import file_commands, model_commands
from attn_bench.case import DTYPES, Case, check_name
from attn_bench.environment import describe_environment, one_thread, pick_device, summarize
from attn_bench.errors import InputError
from attn_bench.grid import MODELS, grid_of_model
from attn_bench.journal import journaling, rows_to_keep, split_done
from attn_bench.overhead import run_overhead
from attn_bench.providers import Provider, pick_providers
from attn_bench.quick import quick
from attn_bench.results import Row, exit_status, saving
from attn_bench.roofline import FLOP_CONVENTION, describe_ceilings, measure_ceilings
from attn_bench.run_file import read_run_file
from attn_bench.runner import Runner
from attn_bench.suites import SUITES, Suite
from attn_bench.tables import terminal_table, terminal_width
from attn_bench.timing import Budget
from tiny_llm.errors import TinyLLMError


def run_suite(arguments: Namespace) -> int:
    """Run ``flash`` or ``layer``; 1 if a provider is wrong or failed, else 0."""
    suite = SUITES[arguments.command]
    return _run_on_device(suite, cases_of(arguments), arguments.provider, arguments)


def run_file(arguments: Namespace) -> int:
    """Run the suite and the grids of a TOML file."""
    asked = read_run_file(arguments.file, {name: each.presets for name, each in SUITES.items()})
    return _run_on_device(SUITES[asked.suite], asked.cases, asked.providers, arguments)


def _run_on_device(
    suite: Suite, cases: Sequence[Case], names: list[str] | None, arguments: Namespace
) -> int:
    if not suite.checks_gradients and any(case.mode != "fwd" for case in cases):
        msg = f"`{suite.command}` checks and times the forward alone: leave `--mode` out."
        raise InputError(msg)
    device = pick_device(arguments.device)
    providers = pick_providers(suite.providers, names, device)
    if arguments.baseline is not None:
        check_name("baseline", arguments.baseline, [each.name for each in providers])
    with one_thread(device):
        rows = _measure(suite, cases, providers, device, arguments)
    print(terminal_table(rows, arguments.baseline or suite.baseline(rows), terminal_width()))
    return exit_status(rows)


def _measure(
    suite: Suite,
    cases: Sequence[Case],
    providers: Sequence[Provider],
    device: torch.device,
    arguments: Namespace,
) -> list[Row]:
    """Measure what an interrupted run left, or everything, and return all rows."""
    environment = describe_environment(device)
    chosen = [each.name for each in providers]
    earlier = rows_to_keep(arguments.save, environment, resume=arguments.resume, suite=suite.name)
    kept, left = split_done(earlier, cases, chosen)
    print(f"{suite.name} on {summarize(environment)}\nFLOPs: {FLOP_CONVENTION}", flush=True)
    ceilings = measure_ceilings(device, [case.dtype for case in cases])
    print(f"ceilings: {describe_ceilings(ceilings)}\n", flush=True)
    environment["ceilings"] = asdict(ceilings)
    with journaling(arguments.save, environment, kept) as rows:
        runner = Runner(
            suite.name,
            providers,
            device,
            Budget(seconds=arguments.milliseconds / 1e3),
            ceilings,
            arguments.cold_start,
            suite.checks_gradients,
        )
        with tqdm(total=len(cases) * len(chosen), initial=len(kept), unit="row") as progress:
            for row in runner.rows(left):
                rows.append(row)
                progress.update()
    return rows


def cases_of(arguments: Namespace) -> list[Case]:
    """Return the cases of the preset, with every axis replaced that was given."""
    model = arguments.shapes_of
    presets = SUITES[arguments.command].presets
    preset = presets[arguments.preset] if model is None else grid_of_model(model)
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
        "num_kv_heads": arguments.kv_heads,
        "windows": arguments.window,
    }
    given: dict[str, Any] = {name: tuple(axis) for name, axis in axes.items() if axis is not None}
    if arguments.total_tokens is not None:
        given |= {"total_tokens": arguments.total_tokens, "batches": given.get("batches", ())}
    return preset.with_axes(given).cases()


def list_providers(arguments: Namespace) -> int:
    """Print every suite with its providers, and the reason where one is unavailable."""
    device = pick_device(arguments.device)
    width = terminal_width()
    # a name takes up to 28 columns; the two texts share what is left
    widths = None if width is None else [None, *[max(20, (width - 32) // 2)] * 2]
    shown: set[str] = set()
    for suite in SUITES.values():
        print(f"attn-bench {suite.command}: {suite.summary}")
        lines = [
            [each.name, each.summary, each.why_unavailable(device) or "available"]
            for each in suite.providers.values()
            if each.name not in shown
        ]
        if len(lines) < len(suite.providers):
            print(f"{len(suite.providers) - len(lines)} of the providers above")
        if lines:
            headers = ["provider", "what it is", f"on {device}"]
            print(tabulate(lines, headers, maxcolwidths=widths))
        shown.update(suite.providers)
        print(f"presets: {', '.join(suite.presets)}\n")
    print(f"models for --shapes-of: {', '.join(MODELS)}")
    return 0


def print_environment(arguments: Namespace) -> int:
    """Print what goes with every result, and this device's measured ceilings."""
    device = pick_device(arguments.device)
    with one_thread(device):
        environment = describe_environment(device)
        ceilings = measure_ceilings(device, DTYPES if device.type == "cuda" else ("fp32",))
    peers = ", ".join(f"{name} {version}" for name, version in environment.pop("peers").items())
    lines = [*environment.items(), ("peers", peers), ("ceilings", describe_ceilings(ceilings))]
    print(tabulate(lines, tablefmt="plain", disable_numparse=True, missingval="-"))
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


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "flash": run_suite,
    "layer": run_suite,
    "decode": run_suite,
    "overhead": run_overhead,
    "train-step": model_commands.run_train_step,
    "generate": model_commands.run_generation,
    "policy": file_commands.write_policy,
    "run": run_file,
    "quick": run_quick,
    "env": print_environment,
    "list": list_providers,
    "table": file_commands.print_table,
    "plots": file_commands.draw_plots,
    "docs": file_commands.fill_documents,
    "compare": file_commands.compare_files,
    "report": file_commands.save_report,
}
