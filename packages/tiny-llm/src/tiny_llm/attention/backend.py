"""What a backend says of itself: whether it is there, what it can do, and how it does it.

A backend of your own is a subclass of `AttentionBackend` that overrides `limits` and `traits`:

    class Mine(AttentionBackend):
        def limits(self, request):
            return only(request, devices=("cuda",), dtypes=("float16", "bfloat16"))

        def traits(self, request):
            return Traits(forward="fused", backward="none", deterministic=True)

    register("mine", Mine("mine", "my_package.attention:attend"))
"""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol, cast

from torch import Tensor

from tiny_llm.attention.request import AttentionRequest

Work = Literal["fused", "dense", "none", "unknown"]
USE_ANOTHER = "choose another backend, 'auto', or 'prefer:...' with a list"


class AttentionFn(Protocol):
    """softmax(scale * q k^T) v, per head.

    Causal means bottom-right aligned: of N keys, query row i of M sees the keys
    ``j <= i + N - M``.  A row that sees no key gives zeros.

    A function may take more, by keyword, and is handed it only when it is needed:

        window       int, a causal row sees only the last that many of its keys, itself included
        scale        float, factor of the scores instead of ``D ** -0.5``
        key_lengths  int64 [B], the number n of keys of each sequence; it takes the place of N above
        packing      `tiny_llm.packing.Packing`, for M = N: a row sees keys of its own document only

    and k, v may have fewer heads than q, each serving ``H / H_kv`` query heads in a row.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        """Take q ``[B, H, M, D]`` and k, v ``[B, H_kv, N, D]``; return o ``[B, H, M, D]``."""


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot serve a request.

    Attributes:
        code: One word for programs: "missing", "broken", "device", "dtype", "head_dim", ...
        text: What came and what the rule is.
        fix: What to do.
    """

    code: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text} ({self.fix})"


@dataclass(frozen=True)
class Availability:
    """Whether a backend's code is there: its version if known, or why it is not."""

    ok: bool
    version: str | None = None
    reason: Reason | None = None


@dataclass(frozen=True)
class Traits:
    """How a backend does its work; forward and backward are judged apart.

    "fused" never stores the ``[M, N]`` scores, "dense" does, "none" has no such pass.
    `deterministic` is None where nobody has promised it.
    """

    forward: Work = "unknown"
    backward: Work = "unknown"
    deterministic: bool | None = None


class AttentionBackend:
    """A named `AttentionFn` that can be asked what it can do.

    Args:
        name: What error messages and records call it.
        target: The function, or its place as ``"module:attribute"``, imported on first use.
    """

    def __init__(self, name: str, target: str | AttentionFn) -> None:
        self.name = name
        self._target = target

    def load(self) -> AttentionFn:
        """Return the function; raises whatever its import raises."""
        if not isinstance(self._target, str):
            return self._target
        module, _, attribute = self._target.partition(":")
        return cast("AttentionFn", getattr(import_module(module), attribute))

    @functools.cached_property
    def _availability(self) -> Availability:
        try:
            return Availability(ok=True, version=self.version())
        # an optional package may fail with anything: a missing module, an undefined symbol, ...
        except Exception as error:
            return Availability(ok=False, reason=self.explain_failure(error))

    def probe(self) -> Availability:
        """Say whether the backend can be loaded; found out once, and never raises."""
        return self._availability

    def version(self) -> str | None:
        """Load what is needed and return its version, if it has one."""
        self.load()
        return None

    def explain_failure(self, error: Exception) -> Reason:
        """Turn the exception that `version` raised into a reason."""
        text = f"it cannot be imported: {type(error).__name__}: {error}"
        return Reason("broken", text, "mend the installation, or " + USE_ANOTHER)

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """Return why no version of this backend can serve the request; empty if one can."""
        return []

    def installed_limits(self, request: AttentionRequest) -> list[Reason]:
        """Return what the installed version cannot do; called if `probe` is ok."""
        return []

    def traits(self, request: AttentionRequest) -> Traits:
        """Return how this request would be computed."""
        return Traits()

    def reasons(self, request: AttentionRequest) -> list[Reason]:
        """Return every reason against the request; an empty list means yes."""
        available = self.probe()
        found = [] if available.reason is None else [available.reason]
        found += self.limits(request)
        if available.ok:
            found += self.installed_limits(request)
        traits = self.traits(request)
        if request.needs_grad and traits.backward == "none":
            found.append(Reason("backward", "it computes no gradients", "use it under no_grad"))
        if request.deterministic and traits.deterministic is not True:
            text = "it does not promise the same bits for the same inputs"
            found.append(Reason("deterministic", text, USE_ANOTHER))
        return found


class FunctionBackend(AttentionBackend):
    """A bare function: what it takes is read off its signature, the rest is unknown."""

    def installed_limits(self, request: AttentionRequest) -> list[Reason]:
        """Refuse the keywords that the function does not have, and undeclared shared heads."""
        wanted = {
            "window": request.window is not None,
            "scale": request.scale is not None,
            "key_lengths": request.ragged,
            "packing": request.packed,
        }
        found = [
            Reason(name, f"its function takes no `{name}`", f"add the keyword `{name}` to it")
            for name, is_wanted in wanted.items()
            if is_wanted and not takes(self.load(), name)
        ]
        if request.is_grouped:
            text = "a bare function does not say whether it takes fewer key heads than query heads"
            fix = "register an AttentionBackend whose `limits` says so"
            found.append(Reason("gqa", text, fix))
        return found


def takes(function: Callable[..., object], keyword: str) -> bool:
    """Say whether a function has a parameter of that name, or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )


def only(
    request: AttentionRequest,
    *,
    devices: Collection[str] | None = None,
    dtypes: Collection[str] | None = None,
    max_head_dim: int | None = None,
) -> list[Reason]:
    """Return the reasons of a backend with these limits; what is not known yet is let through."""
    found = []
    if devices is not None and request.device is not None and request.device not in devices:
        text = f"it runs on {' or '.join(devices)}, got {request.device}"
        found.append(Reason("device", text, USE_ANOTHER))
    if dtypes is not None and request.dtype is not None and request.dtype not in dtypes:
        text = f"it takes {', '.join(dtypes)}, got {request.dtype}"
        found.append(
            Reason(
                "dtype",
                text,
                f"convert to {dtypes[0]}" if isinstance(dtypes, tuple) else USE_ANOTHER,
            )
        )
    if max_head_dim is not None and request.head_dim > max_head_dim:
        text = f"`head_dim` must be at most {max_head_dim}, got {request.head_dim}"
        found.append(Reason("head_dim", text, "use more and narrower heads"))
    return found
