"""What `tiny-llm prepare`, `eval` and `attention` do."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tiny_llm import evaluation
from tiny_llm.bpe import BPETokenizer
from tiny_llm.data import Tokens, open_tokens, prepare_shards, prepare_tokens, stdlib_sources
from tiny_llm.devices import require
from tiny_llm.documents import find_sources, iter_documents
from tiny_llm.errors import ConfigError
from tiny_llm.opened import open_model
from tiny_llm.options import AttentionOptions, EvalOptions, PrepareOptions
from tiny_llm.shards import INDEX
from tiny_llm.tokenizer import ByteTokenizer, Tokenizer, check_same_tokenizer
from tiny_llm.tokenizer_files import FILE_NAME as TOKENIZER_FILE
from tiny_llm.tokenizer_files import tokenizer_path

HELD_OUT_EVERY = 20


def prepare(options: PrepareOptions) -> None:
    """Write a token file, or shards, from the named sources or the standard library's."""
    require(options, "out")
    if options.sources and options.max_bytes:
        raise ConfigError("--max-bytes is for the standard library's sources, not for named files")
    if options.max_bytes < 0:
        message = f"--max-bytes must be at least 1, got {options.max_bytes}"
        raise ConfigError(message)
    _check_held_out(options)
    paths = options.sources or stdlib_sources(options.max_bytes or None)
    column = options.column or None
    sources, held_out = _split(find_sources(paths, column), options)
    tokenizer, to_save = _prepare_tokenizer(options, sources)
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
    if held_out:
        kept = prepare_tokens(held_out, options.held_out, tokenizer, column=column)
        print(f"{kept.path}: {len(kept):,} tokens from {len(held_out)} files, held out")


def evaluate(options: EvalOptions) -> None:
    """Print how well a model predicts a text."""
    require(options, "checkpoint", "tokens")
    opened = open_model(options.checkpoint, attention=options.attention, device=options.device)
    training = opened.training
    if training is None:
        message = f"eval is for runs of tiny-llm, {options.checkpoint} is a Hugging Face folder"
        raise ConfigError(message)
    tokens = open_tokens(options.tokens)
    check_same_tokenizer(options.tokens, tokens.tokenizer_checksum, opened.tokenizer)
    result = evaluation.evaluate(
        opened.model,
        tokens,
        opened.tokenizer,
        seq_len=training.seq_len,
        batch_size=options.batch_size,
        max_batches=options.max_batches or None,
        precision=options.precision,
        within_documents=training.within_documents,
    )
    described = {**asdict(result), "perplexity": result.perplexity}
    print(json.dumps(described) if options.json else result)


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


def _check_held_out(options: PrepareOptions) -> None:
    """Refuse a --held-out that would overwrite what --out gets."""
    if not options.held_out:
        return
    out, held_out = Path(options.out).resolve(), Path(options.held_out).resolve()
    # shards lie with their tokenizer inside `out`, a token file has it beside itself
    if held_out in (out, *out.parents, tokenizer_path(out)) or out in held_out.parents:
        message = f"--held-out {options.held_out} is where --out {options.out} goes; name another"
        raise ConfigError(message)


def _split(sources: list[Path], options: PrepareOptions) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those to hold out."""
    if not options.held_out:
        return sources, []
    if len(sources) < HELD_OUT_EVERY:
        message = (
            f"--held-out takes every {HELD_OUT_EVERY}th file, there are only {len(sources)}: "
            "prepare a text of its own to evaluate on"
        )
        raise ConfigError(message)
    first = HELD_OUT_EVERY - 1
    kept = [each for i, each in enumerate(sources) if i % HELD_OUT_EVERY != first]
    return kept, sources[first::HELD_OUT_EVERY]


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
