"""Where a result was measured: hardware, versions, commit."""

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import attn_bench
import flash_kernel
import tiny_llm
from attn_bench.errors import InputError
from attn_bench.roofline import FLOP_CONVENTION

# distributions of attention that may be compared with, see `attn_bench.providers.others`
PEERS = (
    *("flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "xformers", "flashinfer-python"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)


def pick_device(name: str | None) -> torch.device:
    """Return the device `name`, by default the GPU if there is one; a GPU is made the current one.

    Raises:
        InputError: if the name is unknown or there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        msg = f"unknown device {name!r}; choose 'cpu', 'cuda' or 'cuda:INDEX'."
        raise InputError(msg) from error
    if device.type not in ("cpu", "cuda"):
        msg = f"device {name!r} is not supported; choose 'cpu', 'cuda' or 'cuda:INDEX'."
        raise InputError(msg)
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        msg = f"device {name!r} is not there: torch sees {count} CUDA devices."
        raise InputError(msg)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute with one thread if `device` is the CPU.

    With two threads on two cores that others use as well, each small operation waits for the
    scheduler at its barrier: six minutes instead of one for ``quick``.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what someone needs to judge or repeat a result, as JSON values."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "driver": _driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "triton": _version("triton"),
        "peers": {name: found for name in PEERS if (found := _version(name)) is not None},
        "flash_kernel": flash_kernel.__version__,
        "tiny_llm": tiny_llm.__version__,
        "attn_bench": attn_bench.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "flop_convention": FLOP_CONVENTION,
        **_commit(Path(__file__)),
    }


def summarize(environment: dict[str, Any]) -> str:
    """Return the environment in one line for the head of a table."""
    parts = [str(environment["device"])]
    if environment.get("device_type") == "cpu":
        parts.append(f"threads {environment['threads']}")
    parts += [
        f"{name} {environment[name]}"
        for name in ("torch", "triton", "cuda", "driver", "python")
        if environment.get(name)
    ]
    if environment.get("commit"):
        dirty = " with changes" if environment["dirty"] else ""
        parts.append(f"commit {str(environment['commit'])[:10]}{dirty}")
    parts.append(str(environment["date"])[:10])
    return ", ".join(parts)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def _driver() -> str | None:
    printed = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return printed.splitlines()[0] if printed else None


def _commit(source: Path) -> dict[str, str | bool | None]:
    """Return the commit of the running source, None if git does not track it.

    An installed copy may lie inside somebody else's repository, hence the question whether this
    very file is tracked.
    """
    git = ("git", "-C", str(source.parent))
    head = _run(*git, "rev-parse", "HEAD")
    if head is None or _run(*git, "ls-files", "--error-unmatch", source.name) is None:
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": bool(_run(*git, "status", "--porcelain", "-uno"))}


def _run(*command: str) -> str | None:
    """Return what a command prints, None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
