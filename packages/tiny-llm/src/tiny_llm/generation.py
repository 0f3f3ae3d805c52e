"""Text from a model, token by token, for one prompt or several at once.

Keys and values of earlier tokens are kept in a preallocated cache, so that a new token costs one
token's work, until a text outgrows `max_seq_len`.  From then on the model sees the last
`max_seq_len` tokens; their positions shift with each token, so each costs a whole forward pass.
"""

import codecs
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tiny_llm.cache import KVCache
from tiny_llm.decoding import DecodingStep, capacity_for, resolve_mode
from tiny_llm.errors import ConfigError
from tiny_llm.sampling import Sampling, sample_token
from tiny_llm.tokenizer import Tokenizer
from tiny_llm.transformer import Transformer


def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
    decode: str = "eager",
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, as they are drawn.

    Args:
        model: On any device.
        prompt: Token ids, at least one.
        max_new_tokens: Where to end.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw from this many likeliest tokens only; by default from all.
        top_p: Draw from the fewest likeliest tokens whose probabilities sum to this.
        repetition_penalty: Above 1, makes tokens that the text already has less likely.
        generator: A CPU generator; the same state gives the same text on every run.
        stop_token: End before yielding this one.
        decode: How a token is computed, see `decoding.resolve_mode`.

    Raises:
        ConfigError: An argument is out of its range.  Raised at the call, not at the first token.
    """
    steps = generate_batch(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(repetition_penalty, temperature, top_k, top_p),
        generators=None if generator is None else [generator],
        stop_tokens=() if stop_token is None else (stop_token,),
        decode=decode,
    )
    return (token for (token,) in steps if token is not None)


def generate_batch(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generators: Sequence[torch.Generator] | None = None,
    stop_tokens: Collection[int] = (),
    decode: str = "eager",
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each of several prompts, or None where one has ended.

    The prompts may have different lengths.  What follows one does not depend on the others.

    Args:
        model: On any device.
        prompts: Token ids, at least one each.
        max_new_tokens: Where to end all of them.
        sampling: How to draw; by default from the softmax.
        generators: A CPU generator for each prompt; by default torch's own for all.
        stop_tokens: A text ends before any of these.
        decode: How a token is computed: "eager"; "graph", a CUDA graph; "compile"; or "auto", the
            second on a GPU where the attention allows it.  See `decoding.resolve_mode`.

    Raises:
        ConfigError: An argument is out of its range.  Raised at the call, not at the first token.
        AttentionUnavailable: The model's attention cannot read the static cache of a `decode` that
            was asked for.
    """
    if not prompts or not all(prompts):
        raise ConfigError("`prompt` must have at least one token, got none")
    if max_new_tokens < 0:
        message = f"`max_new_tokens` must be at least 0, got {max_new_tokens}"
        raise ConfigError(message)
    if generators is not None and len(generators) != len(prompts):
        message = f"`generators` must be one for each prompt, got {len(generators)}"
        raise ConfigError(message)
    draws: Sequence[torch.Generator | None] = generators or [None] * len(prompts)
    how = sampling or Sampling()
    mode = resolve_mode(model, decode)

    def steps() -> Iterator[list[int | None]]:
        texts = [list(prompt) for prompt in prompts]
        running = [True] * len(texts)
        reader = _Reader(model, texts, max_new_tokens, mode)
        for _ in range(max_new_tokens):
            step: list[int | None] = [None] * len(texts)
            for row, logits in enumerate(reader.next_logits()):
                if running[row]:
                    text = texts[row]
                    token = sample_token(logits, how, context=text, generator=draws[row])
                    running[row] = token not in stop_tokens
                    step[row] = token if running[row] else None
                    text.append(token)
                else:
                    # an ended text goes on with anything, since a batch is a rectangle
                    texts[row].append(texts[row][-1])
            if not any(running):
                return
            yield step

    return steps()


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens as it becomes certain.

    A character of several bytes comes when its last byte has come; what never becomes a character
    is U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        text = decoder.decode(tokenizer.decode_bytes([token]))
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


class _Reader:
    """Reads growing texts with a model, each token once as long as they fit into its window."""

    def __init__(
        self, model: Transformer, texts: list[list[int]], max_new_tokens: int, mode: str
    ) -> None:
        self._model, self._texts, self._mode = model, texts, mode
        self._window = model.config.max_seq_len
        self._step: DecodingStep | None = None
        weight = model.embedding.weight
        self._device = weight.device
        self._cache: KVCache | None = None
        if max(map(len, texts)) <= self._window:
            kind = weight.device.type
            # under autocast the projections give keys and values of its type
            dtype = (
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
            )
            self._cache = KVCache(
                model.config,
                len(texts),
                capacity=capacity_for(model, max(map(len, texts)) + max_new_tokens),
                device=weight.device,
                dtype=dtype,
            )

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Return the logits ``[B, vocab_size]`` after each text."""
        if self._cache is not None and max(map(len, self._texts)) > self._window:
            self._cache = self._step = None
        if self._cache is None:
            return torch.stack([self._uncached(text) for text in self._texts])
        held = self._cache.host_lengths
        if self._step is not None:
            return self._step([text[-1] for text in self._texts])
        new = [text[start:] for text, start in zip(self._texts, held, strict=True)]
        logits = self._cached(self._cache, new)
        if self._mode != "eager":
            self._step = DecodingStep(self._model, self._cache, self._mode)
        return logits

    def _cached(self, cache: KVCache, new: list[list[int]]) -> Tensor:
        counts = [len(tokens) for tokens in new]
        rectangle = torch.zeros(len(new), max(counts), dtype=torch.int64)
        for row, tokens in enumerate(new):
            # padding comes after the tokens, where the causal mask hides it from them
            rectangle[row, : len(tokens)] = torch.tensor(tokens)
        hidden = self._model.hidden_states(rectangle.to(self._device), cache=cache)
        last = torch.tensor(counts, device=self._device) - 1
        # the logits of a whole prompt would be its largest tensor
        picked: Tensor = hidden[torch.arange(len(new), device=self._device), last]
        cache.advance(counts[0] if len(set(counts)) == 1 else counts)
        logits: Tensor = self._model.head(picked)  # [B, vocab_size]
        return logits

    def _uncached(self, text: list[int]) -> Tensor:
        visible = torch.tensor([text[-self._window :]], device=self._device)
        logits: Tensor = self._model(visible)[0, -1]
        return logits
