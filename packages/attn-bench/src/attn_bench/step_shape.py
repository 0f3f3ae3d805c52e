"""Which model is trained by ``attn-bench train-step``, and how."""

from dataclasses import dataclass, replace

from attn_bench.case import Case
from tiny_llm.config import ModelConfig, TrainingConfig

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class StepShape:
    """The model that is trained, on random tokens, and how.

    Attributes:
        model: Its attention and its longest sequence are replaced.
        batch_size: Sequences per step, or None to derive them from `tokens`.
        tokens: Tokens per step, whatever the length.
        steps: Timed steps.
        dtype: fp32, or what autocast computes in; the weights stay float32.
        is_compiled: Whether model and loss are compiled.
        loss_chunk: As in `TrainingConfig`.
        name: What to call the model.
    """

    model: ModelConfig
    batch_size: int | None
    steps: int
    dtype: str
    tokens: int = 0
    is_compiled: bool = False
    loss_chunk: int = 0
    name: str = "a model"

    def __str__(self) -> str:
        model = self.model
        size = f"batch {self.batch_size}" if self.batch_size else f"{self.tokens} tokens a step"
        how = [
            "compiled" if self.is_compiled else "",
            f"loss in chunks of {self.loss_chunk} tokens" if self.loss_chunk else "",
            f"{self.steps} timed steps",
        ]
        return (
            f"{self.name}: {model.num_layers} layers, d_model {model.d_model}, "
            f"{model.num_heads} heads, vocabulary {model.vocab_size}; {size}, {self.dtype}; "
            + ", ".join(filter(None, how))
        )

    def batch(self, seqlen: int) -> int:
        """Return the sequences per step at a length."""
        return self.batch_size or max(1, self.tokens // seqlen)

    def config(self, seqlen: int, backend: str) -> ModelConfig:
        """Return the model's configuration."""
        return replace(self.model, max_seq_len=seqlen, attention=backend)

    def training(self, seqlen: int) -> TrainingConfig:
        """Return the training's configuration."""
        return TrainingConfig(
            batch_size=self.batch(seqlen),
            seq_len=seqlen,
            steps=self.steps,
            learning_rate=LEARNING_RATE,
            precision=self.dtype,
            compile=self.is_compiled,
            loss_chunk=self.loss_chunk,
        )

    def case(self, seqlen: int) -> Case:
        """Return the attention of one layer."""
        model = self.model
        grouped = model.kv_heads != model.num_heads
        return Case(
            *(self.dtype, self.batch(seqlen), model.num_heads, seqlen, seqlen, model.head_dim),
            is_causal=True,
            mode="fwd+bwd",
            num_kv_heads=model.kv_heads if grouped else None,
        )
