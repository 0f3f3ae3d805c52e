"""A choice that waits for its tensors: "auto", "prefer:..." and "policy:..." as `AttentionFn`."""

from typing import Any

import torch
from torch import Tensor

from tiny_llm.attention.backend import AttentionFn
from tiny_llm.attention.registry import logger
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.attention.resolve import search
from tiny_llm.errors import ConfigError
from tiny_llm.packing import Packing

REQUESTS_KEPT = 256


class AutomaticAttention:
    """Resolves its choice for each new kind of call, and remembers the answers.

    Device and lengths are not known when a model is built.  `Transformer.resolve_attention` fixes
    the answer ahead, which a model that is going to be compiled needs.

    Args:
        choice: "auto", "prefer:a,b" or "policy:FILE".
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self._known: dict[AttentionRequest, AttentionFn] = {}
        self._logged = ""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool,
        window: int | None = None,
        scale: float | None = None,
        key_lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """See `AttentionFn`.

        Raises:
            AttentionUnavailable: No backend of the choice can serve this call.
            ConfigError: It is being compiled.
        """
        if torch.compiler.is_compiling():
            message = (
                f"attention {self.choice!r} must be resolved before torch.compile: "
                "call model.resolve_attention(...) first"
            )
            raise ConfigError(message)
        options: dict[str, Any] = {}
        if window is not None:
            options["window"] = window
        if scale is not None:
            options["scale"] = scale
        request = AttentionRequest.from_tensors(
            q,
            k,
            is_causal=is_causal,
            ragged=key_lengths is not None,
            packed=packing is not None,
            **options,
        )
        if key_lengths is not None:
            options["key_lengths"] = key_lengths
        if packing is not None:
            options["packing"] = packing
        return self._function_for(request)(q, k, v, is_causal=is_causal, **options)

    def _function_for(self, request: AttentionRequest) -> AttentionFn:
        if request not in self._known:
            if len(self._known) >= REQUESTS_KEPT:  # every length of a growing cache is one
                self._known.clear()
            resolution = search(request, self.choice)
            self._known[request] = resolution.attention_fn
            if resolution.chosen != self._logged:
                self._logged = resolution.chosen
                logger.info(resolution.summary())
        return self._known[request]
