"""What `tiny-llm generate` and `tiny-llm chat` do."""

import sys
from collections.abc import Iterator
from itertools import chain, islice

import torch

from tiny_llm.chat_template import ChatTemplate
from tiny_llm.config import MAX_SEED
from tiny_llm.devices import require
from tiny_llm.errors import ConfigError
from tiny_llm.generation import generate_batch, stream_text
from tiny_llm.opened import OpenedModel, open_model
from tiny_llm.options import ChatOptions, GenerateOptions, SamplingOptions
from tiny_llm.sampling import Sampling


def generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation, token by token, or the answer to it."""
    opened = _opened(options)
    if options.as_chat:
        if opened.template is None:
            message = (
                f"{options.checkpoint} has no chat template: name one with --chat-template, "
                "or leave --as-chat out"
            )
            raise ConfigError(message)
        text = opened.template.render([{"role": "user", "content": options.prompt}])
        tokens: Iterator[int] = _continued(opened, opened.encode_rendered(text), options.sampling)
    else:
        prompt = opened.tokenizer.encode(options.prompt)
        tokens = chain(prompt, _continued(opened, prompt, options.sampling))
    for piece in stream_text(tokens, opened.tokenizer):
        _write(piece)
    _write("\n")


def chat(options: ChatOptions) -> None:
    """Answer the lines that come from the standard input, one after the other."""
    opened = _opened(options)
    if opened.template is not None:
        _converse(opened, opened.template, options)
        return
    if options.system:
        message = (
            f"--system is for checkpoints with a chat template, which {options.checkpoint} has not"
        )
        raise ConfigError(message)
    _continue_lines(opened, options.sampling)


def _converse(opened: OpenedModel, template: ChatTemplate, options: ChatOptions) -> None:
    """Hold a conversation in the form of a template."""
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while line := _ask():
        messages.append({"role": "user", "content": line})
        prompt = opened.encode_rendered(template.render(messages))
        answer: list[int] = []
        tokens = _recorded(_continued(opened, prompt, options.sampling), answer)
        for piece in stream_text(tokens, opened.tokenizer):
            _write(piece)
        _write("\n")
        messages.append({"role": "assistant", "content": opened.tokenizer.decode(answer)})


def _continue_lines(opened: OpenedModel, sampling: SamplingOptions) -> None:
    """Continue the text that the lines make: what a model without a template was trained for."""
    text: list[int] = []
    while line := _ask():
        text += opened.tokenizer.encode(line + "\n")
        answer = _recorded(_continued(opened, list(text), sampling), text)
        for piece in stream_text(answer, opened.tokenizer):
            _write(piece)
        _write("\n")
        text += opened.tokenizer.encode("\n")


def _opened(options: GenerateOptions | ChatOptions) -> OpenedModel:
    require(options, "checkpoint")
    if not 0 <= options.sampling.seed <= MAX_SEED:
        message = f"--seed must be 0 to {MAX_SEED}, got {options.sampling.seed}"
        raise ConfigError(message)
    return open_model(
        options.checkpoint,
        attention=options.attention,
        device=options.device,
        precision=options.precision,
        chat_template=options.chat_template,
    )


def _continued(opened: OpenedModel, prompt: list[int], sampling: SamplingOptions) -> Iterator[int]:
    steps = generate_batch(
        opened.model,
        # a text begins where another has ended
        [prompt or [opened.tokenizer.end_of_text]],
        max_new_tokens=sampling.max_new_tokens,
        sampling=Sampling(
            sampling.repetition_penalty, sampling.temperature, sampling.top_k, sampling.top_p
        ),
        generators=[torch.Generator().manual_seed(sampling.seed)],
        stop_tokens=opened.stop_tokens,
        decode=sampling.decode,
    )
    return (token for (token,) in steps if token is not None)


def _recorded(tokens: Iterator[int], text: list[int]) -> Iterator[int]:
    for token in tokens:
        text.append(token)
        yield token


def _ask() -> str:
    if _is_terminal():
        _write("> ")
    return next(islice(sys.stdin, 1), "").rstrip("\n")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _write(text: str) -> None:
    """Print at once; what the terminal's encoding does not have becomes a question mark."""
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
