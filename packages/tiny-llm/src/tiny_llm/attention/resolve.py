"""From a request and a choice to a backend, with the reasons for and against.

A choice is a name, which is obeyed or refused; "auto", which takes the first valid backend of
`AUTO_ORDER`; "prefer:a,b", which takes the first valid one of its own list; or "policy:FILE", which
takes the first valid one of those that were measured to be fast, then goes on as "auto".
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tiny_llm.attention import registry
from tiny_llm.attention.backend import AttentionFn, Reason, Traits
from tiny_llm.attention.policy import read_policy
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.errors import AttentionUnavailable, ConfigError, MissingAttentionError

AUTO = "auto"
PREFER = "prefer:"
POLICY = "policy:"
AUTO_ORDER = {"cuda": ("flash", "sdpa", "eager")}
AUTO_ORDER_ELSEWHERE = ("sdpa", "eager")


@dataclass(frozen=True)
class Decision:
    """What one backend answered to a request.

    Attributes:
        name: The backend.
        reasons: Everything against it; empty if it can serve the request.
        traits: How it would serve it.
        version: Version of its package, if it has one.
    """

    name: str
    reasons: tuple[Reason, ...]
    traits: Traits
    version: str | None

    @property
    def ok(self) -> bool:
        """Whether it can serve the request."""
        return not self.reasons


@dataclass(frozen=True)
class Resolution:
    """The backend that a choice came to, and every decision on the way.

    Attributes:
        request: What was asked for.
        choice: By which rule.
        chosen: Name of the backend.
        trace: One decision for each backend looked at, the chosen one last.
    """

    request: AttentionRequest
    choice: str
    chosen: str
    trace: tuple[Decision, ...]

    @property
    def attention_fn(self) -> AttentionFn:
        """The chosen backend's function."""
        return registry.get(self.chosen)

    def summary(self) -> str:
        """One line: what was taken, and what was passed over and why."""
        passed = "; ".join(
            f"passed over {each.name}: {each.reasons[0].text}" for each in self.trace[:-1]
        )
        line = f"attention {self.choice!r} takes {self.chosen!r} for {self.request}"
        return f"{line}; {passed}" if passed else line

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it, for a run's records."""
        return asdict(self)


def decide(name: str, request: AttentionRequest) -> Decision:
    """Ask one backend.

    Raises:
        UnknownAttentionError: Nothing is registered under `name`.
    """
    backend = registry.backend(name)
    reasons = tuple(backend.reasons(request))
    return Decision(name, reasons, backend.traits(request), backend.probe().version)


def resolve(request: AttentionRequest, choice: str) -> Resolution:
    """Return the backend that `choice` means for `request`.

    A choice between backends writes one line to the log `tiny_llm.attention`.

    Raises:
        UnknownAttentionError: A name is not registered.
        AttentionUnavailable: No backend of the choice can serve the request; the message names
            every reason and what to do.
        ConfigError: "prefer:" with no names.
    """
    resolution = search(request, choice)
    if choice != resolution.chosen:
        registry.logger.info(resolution.summary())
    return resolution


def resolve_all(questions: Iterable[tuple[AttentionRequest, str]]) -> tuple[Resolution, ...]:
    """Resolve many (request, choice) pairs; those that are equal are asked and logged once.

    Raises:
        As `resolve`.
    """
    known: dict[tuple[AttentionRequest, str], Resolution] = {}
    answers = []
    for question in questions:
        if question not in known:
            known[question] = resolve(*question)
        answers.append(known[question])
    return tuple(answers)


def search(request: AttentionRequest, choice: str) -> Resolution:
    """Do what `resolve` does, and write nothing to the log."""
    trace: list[Decision] = []
    for name in candidates(request, choice):
        decision = decide(name, request)
        trace.append(decision)
        if decision.ok:
            return Resolution(request, choice, name, tuple(trace))
    raise refusal(request, choice, trace)


def is_search(choice: str) -> bool:
    """Say whether a choice is one between backends, which waits for what it is asked."""
    return choice == AUTO or choice.startswith((PREFER, POLICY))


def candidates(request: AttentionRequest, choice: str) -> tuple[str, ...]:
    """Return the names that a choice tries, in order.

    Raises:
        ConfigError: "prefer:" with no names, or a policy of another device.
        FileError, FormatError: The policy cannot be read.
    """
    automatic = AUTO_ORDER.get(request.device or "", AUTO_ORDER_ELSEWHERE)
    if choice == AUTO:
        return automatic
    if choice.startswith(POLICY):
        measured = read_policy(choice.removeprefix(POLICY)).order(request)
        return tuple(dict.fromkeys((*measured, *automatic)))
    if not choice.startswith(PREFER):
        return (choice,)
    listed = tuple(name.strip() for name in choice.removeprefix(PREFER).split(","))
    if not all(listed):
        message = f"`attention` must look like 'prefer:flash,sdpa', got {choice!r}"
        raise ConfigError(message)
    return listed


def refusal(
    request: AttentionRequest, choice: str, trace: Iterable[Decision]
) -> AttentionUnavailable:
    """Return the error that says, in one line, why nothing in the trace will do."""
    trace = tuple(trace)
    found = [reason for each in trace for reason in each.reasons]
    is_missing = any(reason.code in ("missing", "broken") for reason in found)
    answers = "; ".join(
        f"{each.name!r}: " + ", and ".join(map(str, each.reasons)) for each in trace
    )
    message = f"attention {choice!r} cannot serve this request [{request}]: {answers}"
    error = (MissingAttentionError if is_missing else AttentionUnavailable)(message)
    error.trace = trace
    return error
