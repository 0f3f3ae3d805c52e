"""What `tiny-llm prepare`, `eval`, `generate`, `chat` and `attention` do."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import torch

from tiny_llm import evaluation, generation
from tiny_llm.bpe import BPETokenizer
from tiny_llm.checkpoint import Checkpoint, load_checkpoint
from tiny_llm.config import MAX_SEED
from tiny_llm.data import Tokens, open_tokens, prepare_shards, prepare_tokens, stdlib_sources
from tiny_llm.devices import require, resolve_device
from tiny_llm.documents import find_sources, iter_documents
from tiny_llm.errors import ConfigError
from tiny_llm.options import (
    AttentionOptions,
    ChatOptions,
    EvalOptions,
    GenerateOptions,
    PrepareOptions,
    SamplingOptions,
)
from tiny_llm.settings_file import parse_attention
from tiny_llm.shards import INDEX
from tiny_llm.tokenizer import ByteTokenizer, Tokenizer, check_same_tokenizer
from tiny_llm.tokenizer_files import FILE_NAME as TOKENIZER_FILE
from tiny_llm.tokenizer_files import tokenizer_of_run, tokenizer_path
from tiny_llm.transformer import Transformer


def prepare(options: PrepareOptions) -> None:
    """Write a token file, or shards, from the named sources or the standard library's."""
    require(options, "out")
    if options.sources and options.max_bytes:
        raise ConfigError("--max-bytes is for the standard library's sources, not for named files")
    if options.max_bytes < 0:
        message = f"--max-bytes must be at least 1, got {options.max_bytes}"
        raise ConfigError(message)
    paths = options.sources or stdlib_sources(options.max_bytes or None)
    sources = find_sources(paths, options.column or None)
    tokenizer, to_save = _prepare_tokenizer(options, sources)
    column = options.column or None
    tokens: Tokens
    if options.shard_tokens:
        tokens = prepare_shards(
            sources,
            options.out,
            tokenizer,
            shard_tokens=options.shard_tokens,
            column=column,
            progress=True,
        )
    else:
        tokens = prepare_tokens(sources, options.out, tokenizer, column=column, progress=True)
    if to_save is not None:
        to_save.save(tokenizer_path(tokens.path))
    print(f"{tokens.path}: {len(tokens):,} tokens from {len(sources)} files")


def evaluate(options: EvalOptions) -> None:
    """Print how well a model predicts a text."""
    require(options, "checkpoint", "tokens")
    checkpoint, model, tokenizer = _open_model(
        options.checkpoint, options.attention, options.device
    )
    tokens = open_tokens(options.tokens)
    check_same_tokenizer(options.tokens, tokens.tokenizer_checksum, tokenizer)
    result = evaluation.evaluate(
        model,
        tokens,
        tokenizer,
        seq_len=checkpoint.training_config.seq_len,
        batch_size=options.batch_size,
        max_batches=options.max_batches or None,
        precision=options.precision,
        within_documents=checkpoint.training_config.within_documents,
    )
    described = {**asdict(result), "perplexity": result.perplexity}
    print(json.dumps(described) if options.json else result)


def generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation, token by token."""
    require(options, "checkpoint")
    _, model, tokenizer = _open_model(options.checkpoint, options.attention, options.device)
    prompt = tokenizer.encode(options.prompt)
    new_tokens = _continued(model, tokenizer, prompt, options.sampling)
    for text in generation.stream_text(chain(prompt, new_tokens), tokenizer):
        _write(text)
    _write("\n")


def chat(options: ChatOptions) -> None:
    """Continue the lines that come from the standard input, one after the other."""
    require(options, "checkpoint")
    _, model, tokenizer = _open_model(options.checkpoint, options.attention, options.device)
    text: list[int] = []
    while line := _ask():
        text += tokenizer.encode(line + "\n")
        answer = _recorded(_continued(model, tokenizer, list(text), options.sampling), text)
        for piece in generation.stream_text(answer, tokenizer):
            _write(piece)
        _write("\n")
        text += tokenizer.encode("\n")


def _recorded(tokens: Iterator[int], text: list[int]) -> Iterator[int]:
    for token in tokens:
        text.append(token)
        yield token


def attention(options: AttentionOptions) -> None:
    """Print which backend a request gets and why not the others."""
    from tiny_llm.attention.explain import explain
    from tiny_llm.attention.request import AttentionRequest

    if options.action != "explain":
        message = f"attention can only explain, got {options.action!r}"
        raise ConfigError(message)
    request = AttentionRequest(
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        seqlen_q=options.seqlen if options.seqlen_q is None else options.seqlen_q,
        seqlen_k=options.seqlen,
        is_causal=options.is_causal,
        window=options.window,
        dtype=options.dtype,
        device=options.device,
        capability=options.capability if options.device == "cuda" else None,
        needs_grad=options.training,
    )
    explanation = explain(request, options.choice)
    print(json.dumps(explanation.to_dict()) if options.json else explanation.table())


def _prepare_tokenizer(
    options: PrepareOptions, sources: list[Path]
) -> tuple[Tokenizer, BPETokenizer | None]:
    """Return the tokenizer to use, and again if it is to be saved beside the tokens."""
    if options.tokenizer and options.vocab_size:
        raise ConfigError(
            "--vocab-size trains a tokenizer, --tokenizer names one: pass one of them"
        )
    if options.tokenizer:
        bpe = BPETokenizer.load(options.tokenizer)
        return bpe, bpe
    if not options.vocab_size:
        return ByteTokenizer(), None
    saved = Path(options.out) / TOKENIZER_FILE
    if options.shard_tokens and saved.exists() and (Path(options.out) / INDEX).exists():
        # an earlier prepare was stopped: its shards were made with this one
        bpe = BPETokenizer.load(saved)
        return bpe, bpe
    bpe = BPETokenizer.train(_beginning(sources, options), options.vocab_size)
    if options.shard_tokens:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        bpe.save(saved)
    return bpe, bpe


def _beginning(sources: list[Path], options: PrepareOptions) -> Iterator[bytes]:
    left = options.tokenizer_bytes
    for document in iter_documents(sources, options.column or None, lambda count: None):
        for piece in document:
            if left <= 0:
                return
            yield piece
            left -= len(piece)


def _open_model(
    run: str, attention_name: str, device: str
) -> tuple[Checkpoint, Transformer, Tokenizer]:
    place = resolve_device(device)
    checkpoint = load_checkpoint(run)
    tokenizer = tokenizer_of_run(checkpoint.path)
    if checkpoint.model_config.vocab_size != tokenizer.vocab_size:
        message = (
            f"checkpoint {checkpoint.path} has a vocabulary of "
            f"{checkpoint.model_config.vocab_size}, its tokenizer {tokenizer.vocab_size}"
        )
        raise ConfigError(message)
    chosen = parse_attention(attention_name) if attention_name else None
    return checkpoint, checkpoint.build_model(device=place, attention=chosen).eval(), tokenizer


def _continued(
    model: Transformer, tokenizer: Tokenizer, prompt: list[int], sampling: SamplingOptions
) -> Iterator[int]:
    if not 0 <= sampling.seed <= MAX_SEED:
        message = f"--seed must be 0 to {MAX_SEED}, got {sampling.seed}"
        raise ConfigError(message)
    return generation.generate(
        model,
        # a text begins where another has ended
        prompt or [tokenizer.end_of_text],
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        generator=torch.Generator().manual_seed(sampling.seed),
        stop_token=tokenizer.end_of_text,
    )


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
