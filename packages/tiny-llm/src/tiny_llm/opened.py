"""Models with their tokenizer, from a run of ours or from a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tiny_llm.chat_template import ChatTemplate, chat_template_of, read_chat_template
from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.config import TrainingConfig
from tiny_llm.devices import resolve_device
from tiny_llm.errors import ConfigError
from tiny_llm.pretrained import load_pretrained
from tiny_llm.pretrained.folder import CONFIG
from tiny_llm.pretrained.tokenizer import PretrainedTokenizer
from tiny_llm.settings_file import parse_attention
from tiny_llm.tokenizer import Tokenizer
from tiny_llm.tokenizer_files import tokenizer_of_run
from tiny_llm.transformer import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class OpenedModel:
    """A model that can be given text.

    Attributes:
        training: How it was trained, if we did.
        template: How it wants conversations written down, if it says so.
    """

    model: Transformer
    tokenizer: Tokenizer
    training: TrainingConfig | None
    template: ChatTemplate | None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a text or an answer."""
        if isinstance(self.tokenizer, PretrainedTokenizer):
            return self.tokenizer.stop_tokens
        return frozenset({self.tokenizer.end_of_text})

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of what the chat template gave."""
        if isinstance(self.tokenizer, PretrainedTokenizer):
            return self.tokenizer.encode_rendered(text)
        return self.tokenizer.encode(text)


def open_model(
    path: str | Path,
    *,
    attention: str = "",
    device: str = "auto",
    precision: str = "",
    chat_template: str = "",
) -> OpenedModel:
    """Return the model of a run or its checkpoint, or of a Hugging Face folder, in eval mode.

    Args:
        path: A folder or a checkpoint file.
        attention: A choice as on the command line; by default the run's, or "auto".
        device: As on the command line.
        precision: What weights are converted to, and so what is computed in: fp32, bf16 or fp16; by
            default they stay as they are saved.
        chat_template: A file of Jinja code, in place of the checkpoint's own template.

    Raises:
        ConfigError: The tokenizer has more ids than the model, or an argument is none of these.
        FileError, FormatError: Something cannot be read or is damaged.
    """
    if precision and precision not in DTYPES:
        message = f"--precision must be {', '.join(DTYPES)}, got {precision!r}"
        raise ConfigError(message)
    place, folder = resolve_device(device), Path(path)
    chosen = parse_attention(attention) if attention else None
    template = read_chat_template(chat_template) if chat_template else None
    if (folder / CONFIG).is_file():
        model = load_pretrained(folder, attention=chosen or "auto", device=place)
        opened = OpenedModel(
            model, PretrainedTokenizer.load(folder), None, template or chat_template_of(folder)
        )
    else:
        checkpoint = load_checkpoint(folder)
        model = checkpoint.build_model(device=place, attention=chosen)
        tokenizer = tokenizer_of_run(checkpoint.path)
        opened = OpenedModel(model, tokenizer, checkpoint.training_config, template)
    _check_vocabulary(folder, opened)
    if precision:
        model.to(DTYPES[precision])
    model.eval()
    return opened


def _check_vocabulary(path: Path, opened: OpenedModel) -> None:
    """Refuse ids that the model does not have; a pretrained one may have some that are not used."""
    of_model, of_tokenizer = opened.model.config.vocab_size, opened.tokenizer.vocab_size
    may_pad = isinstance(opened.tokenizer, PretrainedTokenizer)
    if of_tokenizer > of_model or (of_tokenizer < of_model and not may_pad):
        message = f"checkpoint {path} has a vocabulary of {of_model}, its tokenizer {of_tokenizer}"
        raise ConfigError(message)
