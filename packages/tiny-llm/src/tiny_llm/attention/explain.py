"""Answers as data: which backend a request gets and why not the others, and what each can do."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tiny_llm.attention import registry
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.attention.resolve import Decision, candidates, decide
from tiny_llm.layers import format_layers
from tiny_llm.model_config import ModelConfig

YES = "yes"


@dataclass(frozen=True)
class Explanation:
    """What `resolve` would do, and what every registered backend answers.

    Attributes:
        request: What was asked for.
        choice: By which rule.
        chosen: Name of the backend it comes to, None if it would be refused.
        decisions: One for each backend: those the choice tries, in order, then the others by name.
    """

    request: AttentionRequest
    choice: str
    chosen: str | None
    decisions: tuple[Decision, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return asdict(self)

    def table(self) -> str:
        """Return lines for people: the request, then one line for each backend and reason."""
        width = max(len(each.name) for each in self.decisions)
        lines = [f"request: {self.request}", f"choice: {self.choice} -> {self.chosen or 'refused'}"]
        for each in self.decisions:
            mark = "*" if each.name == self.chosen else " "
            traits = f"forward {each.traits.forward}, backward {each.traits.backward}"
            answers = [str(reason) for reason in each.reasons] or [f"yes: {traits}"]
            lines.append(f"{mark} {each.name:<{width}}  {answers[0]}")
            lines += [f"  {'':<{width}}  {answer}" for answer in answers[1:]]
        return "\n".join(lines)


def explain(request: AttentionRequest, choice: str = "auto") -> Explanation:
    """Explain a choice without a GPU and without a tensor.

    Raises:
        UnknownAttentionError: The choice has a name that is not registered.
        ConfigError: "prefer:" with no names.
    """
    tried = candidates(request, choice)
    others = [name for name in registry.names() if name not in tried]
    decisions = tuple(decide(name, request) for name in (*tried, *others))
    chosen = next((each.name for each in decisions[: len(tried)] if each.ok), None)
    return Explanation(request, choice, chosen, decisions)


def explain_model(config: ModelConfig, **known: Any) -> dict[str, Explanation]:
    """Explain each layer's choice of a model that need not be built.

    Args:
        config: The model's.
        known: What else is known of the calls: fields of `AttentionRequest`, such as
            ``device="cuda"``, ``capability=(9, 0)``, ``dtype="bfloat16"``, ``needs_grad=True``.

    Returns:
        An explanation for each group of layers that are alike, by their numbers ("0,2-5").
    """
    groups: dict[tuple[AttentionRequest, str], set[int]] = {}
    for layer in range(config.num_layers):
        request = AttentionRequest(
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.kv_heads,
            window=config.window_at(layer),
            **known,
        )
        groups.setdefault((request, config.attention_at(layer)), set()).add(layer)
    return {
        format_layers(frozenset(layers), config.num_layers): explain(*question)
        for question, layers in groups.items()
    }


def _request(**changes: Any) -> AttentionRequest:
    fields: dict[str, Any] = {
        "num_heads": 8,
        "head_dim": 64,
        "seqlen_q": 128,
        "seqlen_k": 128,
        "device": "cuda",
        "capability": (9, 0),
        "dtype": "bfloat16",
    }
    return AttentionRequest(**{**fields, **changes})


# one question for each column of the support table
QUESTIONS: dict[str, AttentionRequest] = {
    "CUDA bf16": _request(),
    "CUDA fp32": _request(dtype="float32"),
    "CUDA fp64": _request(dtype="float64"),
    "CPU": _request(device="cpu", capability=None, dtype="float32"),
    "M < N": _request(seqlen_q=16),
    "GQA": _request(num_kv_heads=2),
    "window": _request(window=32),
    "key lengths": _request(ragged=True),
    "documents": _request(packed=True),
    "D = 256": _request(head_dim=256),
}


def support_table() -> str:
    """Return a Markdown table of what each built-in backend can do, by its own predicates.

    Whether a package is installed plays no part, so the table is the same on every machine.
    """
    work: dict[str, Callable[[str], str]] = {
        "forward": lambda name: registry.backend(name).traits(_request()).forward,
        "backward": lambda name: registry.backend(name).traits(_request()).backward,
    }
    header = ["backend", *QUESTIONS, *work]
    rows = [
        [
            f"`{name}`",
            *(_answer(name, request) for request in QUESTIONS.values()),
            *(describe(name) for describe in work.values()),
        ]
        for name in registry.BUILT_IN
    ]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _answer(name: str, request: AttentionRequest) -> str:
    codes = dict.fromkeys(reason.code for reason in registry.backend(name).limits(request))
    return "no: " + ", ".join(codes) if codes else YES
