"""What `tiny-llm info` does: checkpoints, tokens and machines in words."""

from dataclasses import asdict
from pathlib import Path

import torch

from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.data import open_tokens
from tiny_llm.errors import FileError
from tiny_llm.options import InfoOptions
from tiny_llm.shards import INDEX


def info(options: InfoOptions) -> None:
    """Describe files, or this machine."""
    if not options.paths:
        print(describe_machine())
    for path in options.paths:
        print(describe(Path(path)))


def describe_machine() -> str:
    """Return the version of torch and the GPUs there are."""
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads"]
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        lines.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    return "\n".join(lines)


def describe(path: Path) -> str:
    """Return what a token file, a folder of shards, or a checkpoint holds.

    Raises:
        FileError: There is nothing at `path`, or it cannot be read.
        FormatError: It is none of these, or damaged.
    """
    if not path.exists():
        message = f"{path} does not exist"
        raise FileError(message)
    if path.suffix == ".bin" or (path / INDEX).exists():
        tokens = open_tokens(path)
        return (
            f"{path}: {len(tokens):,} tokens in {len(tokens.document_ends):,} documents, "
            f"vocabulary {tokens.vocab_size}, tokenizer {tokens.tokenizer_checksum:08x}"
        )
    checkpoint = load_checkpoint(path)
    model = checkpoint.build_model(device="cpu")
    lines = [f"{checkpoint.path}: step {checkpoint.step}, {model.num_parameters():,} parameters"]
    for config in (checkpoint.model_config, checkpoint.training_config):
        lines += [f"  {name} = {value}" for name, value in asdict(config).items()]
    return "\n".join(lines)
