"""The tensors of a checkpoint that no process holds whole.

Each process writes its own part of every tensor, and reads what it needs of the parts of all,
however many processes wrote them: that is `torch.distributed.checkpoint`, here with safetensors
files, whose reading runs no code.  All processes must see the same folder.
"""

import shutil
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tiny_llm.distributed import Parallel
from tiny_llm.errors import FileError, FormatError
from tiny_llm.files import crc32_of, reason_of

MODEL, OPTIMIZER = "model.", "optimizer."  # before the parameters' names

Checksums = dict[str, int]


def save_shards(
    path: Path, step: int, tensors: dict[str, Tensor], parallel: Parallel
) -> tuple[str, Checksums]:
    """Write tensors into a new folder beside `path`; every process calls this.

    Returns:
        The folder's name, and the CRC-32 of each of its files.

    Raises:
        FileError: A process could not write its part or read it back, raised in all of them.
    """
    # whatever was saved before stays until a checkpoint names the new folder
    folder = path.with_name(parallel.gathered(_unused_name(path, step))[0])
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(tensors, storage_writer=writer)
        return folder.name, _checksums(folder, parallel)
    except FileError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)
        message = f"cannot write {folder}: {_cause(error)}"
        raise FileError(message) from error


def verify_shards(folder: Path, expected: Checksums, parallel: Parallel) -> None:
    """Check every file of a folder against its checksum, each process some of them.

    Raises:
        FileError: A process could not read a file, raised in all of them.
        FormatError: A file is missing or damaged, raised in all processes.
    """
    found = _checksums(folder, parallel)
    for name in expected:
        if found.get(name) != expected[name]:
            what = "is damaged (wrong checksum)" if name in found else "is missing"
            message = f"checkpoint shard {folder / name} {what}"
            raise FormatError(message)


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or whole, with what is saved under their names.

    Raises:
        FormatError: A name is missing, or a shape differs.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            # without a process group torch says that it takes this for a single process: it is one
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader)
    except (CheckpointException, RuntimeError, ValueError) as error:
        message = f"checkpoint shards {folder} do not fit their own configuration: {_cause(error)}"
        raise FormatError(message) from error


def remove_shards(path: Path, *, keep: str | None) -> None:
    """Remove the folders of earlier and of killed saves beside `path`."""
    for folder in path.parent.glob(f"{path.name}.shards-*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once by name, without its gradient's record."""
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def _unused_name(path: Path, step: int) -> str:
    names = (f"{path.name}.shards-{step}{f'.{n}' if n else ''}" for n in count())
    return next(name for name in names if not path.with_name(name).exists())


def _checksums(folder: Path, parallel: Parallel) -> Checksums:
    """Return the CRC-32 of each file; what one process cannot read is raised in all of them."""
    everyone: Checksums = {}
    for part in parallel.gathered(_own_checksums(folder, parallel)):
        if isinstance(part, FileError):
            raise part
        everyone |= part
    return everyone


def _own_checksums(folder: Path, parallel: Parallel) -> Checksums | FileError:
    own: Checksums = {}
    try:
        for file in sorted(folder.glob("*.safetensors"))[parallel.rank :: parallel.world_size]:
            with file.open("rb") as opened:
                own[file.name] = crc32_of(opened, file.stat().st_size)
    except OSError as error:
        # not raised here: the other processes wait for an answer
        return FileError(f"cannot read {folder}: {reason_of(error)}")
    return own


def _cause(error: BaseException) -> str:
    """Return the words of the first failure inside torch's report of all processes'."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return reason_of(error) if isinstance(error, OSError) else str(error)
