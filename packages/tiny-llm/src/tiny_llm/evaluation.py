"""How well a model predicts text it was not trained on."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tiny_llm.batches import check_long_enough, positions_in_documents
from tiny_llm.data import Tokens
from tiny_llm.distributed import SINGLE, Parallel
from tiny_llm.loss import LanguageModelLoss
from tiny_llm.packing import Packing
from tiny_llm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        loss: Mean cross-entropy in nats per token.
        bits_per_byte: The same in bits per byte of text, which compares across tokenizers.
        num_tokens: Tokens that were predicted.
    """

    loss: float
    bits_per_byte: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss: among how many tokens the model hesitates."""
        return math.exp(self.loss)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte, over {self.num_tokens:,} tokens"
        )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tokens,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    max_batches: int | None = None,
    precision: str = "fp32",
    chunk_tokens: int = 0,
    within_documents: bool = False,
    parallel: Parallel = SINGLE,
) -> Evaluation:
    """Predict the windows at the beginning of a text, one after the other, without overlap.

    Args:
        model: On any device.
        tokens: The text.
        tokenizer: The one it was made with, for the number of bytes.
        seq_len: Tokens per window.
        batch_size: Windows at a time.
        max_batches: Stop after so many; by default at the end of the text.
        precision: As in `TrainingConfig`, like the next two.
        chunk_tokens: Tokens whose logits are held at a time, its `loss_chunk`.
        within_documents: Whether tokens see their own document only.
        parallel: The processes that share the work; all of them get the whole result.

    Raises:
        ConfigError: There are fewer than seq_len + 1 tokens.
    """
    check_long_enough(tokens, seq_len)
    windows = (len(tokens) - 1) // seq_len
    if max_batches is not None:
        windows = min(windows, max_batches * batch_size)
    device = next(model.parameters()).device
    loss = LanguageModelLoss(model, precision, chunk_tokens)
    # every process makes the same number of calls, as sharded models need, on its own windows
    share = math.ceil(windows / parallel.world_size)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, share, batch_size):
        count = min(batch_size, share - start)
        first = parallel.rank * share + start
        numbers = [min(number, windows - 1) for number in range(first, first + count)]
        batch = np.stack([tokens[n * seq_len : (n + 1) * seq_len + 1] for n in numbers])
        counted = torch.tensor([first + i < windows for i in range(count)])
        tensor = torch.from_numpy(batch.astype(np.int64))
        targets = torch.where(counted[:, None], tensor[:, 1:], -100)
        given: list[Tensor | Packing] = [tensor[:, :-1].to(device), targets.to(device)]
        if within_documents:
            starts = [number * seq_len for number in numbers]
            positions = positions_in_documents(tokens, starts, seq_len)
            given.append(Packing.from_positions(positions).to(device))
        total[0] += loss(*given)
        real = tensor[counted][:, 1:].flatten().tolist()
        total[1] += len(tokenizer.decode_bytes(real))
    nats, num_bytes = parallel.total(total).tolist()
    num_tokens = windows * seq_len
    return Evaluation(
        loss=nats / num_tokens,
        bits_per_byte=nats / math.log(2) / max(1.0, num_bytes),
        num_tokens=num_tokens,
    )
