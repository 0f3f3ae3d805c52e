"""What attention is asked for, as plain data: no tensors, and no GPU to reason about one."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tiny_llm.errors import ConfigError


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for others and where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionRequest:
    """One call of attention, or many alike.  A field that is None is not known yet.

    Attributes:
        num_heads: Query heads H.
        head_dim: Width D of each.
        num_kv_heads: Key and value heads; None means as many as query heads.
        seqlen_q: Query rows M.
        seqlen_k: Keys N.
        is_causal: Bottom-right aligned: row i sees the keys ``j <= i + N - M``.
        window: Keys a row sees up to its own, itself included; None is no limit.  Causal only.
        scale: Factor of the scores; None means ``D ** -0.5``.
        ragged: The keys of each sequence end elsewhere (`key_lengths` of `AttentionFn`).
        packed: Sequences hold several documents (`packing` of `AttentionFn`).
        device: Device type, such as "cpu" or "cuda".
        capability: Compute capability of a CUDA device, such as ``(9, 0)``.
        dtype: Element type without its module, such as "bfloat16".
        needs_grad: Gradients will be asked for.
        deterministic: The same inputs must give the same bits.

    Raises:
        ConfigError: The fields contradict each other or are out of range.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    is_causal: bool = True
    window: int | None = None
    scale: float | None = None
    ragged: bool = False
    packed: bool = False
    device: str | None = None
    capability: tuple[int, int] | None = None
    dtype: str | None = None
    needs_grad: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_kv_heads", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                message = f"`{name}` must be at least 1, got {value}"
                raise ConfigError(message)
        if self.num_heads % self.kv_heads:
            message = (
                f"`num_heads` must be a multiple of `num_kv_heads`, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
            raise ConfigError(message)
        if self.window is not None and not self.is_causal:
            message = f"`window` needs is_causal=True, got window={self.window} without"
            raise ConfigError(message)
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            message = (
                f"`dtype` must be the name of a torch dtype such as 'bfloat16', got {self.dtype!r}"
            )
            raise ConfigError(message)

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool,
        window: int | None = None,
        scale: float | None = None,
        ragged: bool = False,
        packed: bool = False,
    ) -> "AttentionRequest":
        """Describe the call for q ``[B, H, M, D]`` and k ``[B, H_kv, N, D]``."""
        return cls(
            num_heads=q.shape[1],
            head_dim=q.shape[3],
            num_kv_heads=k.shape[1],
            seqlen_q=q.shape[2],
            seqlen_k=k.shape[2],
            is_causal=is_causal,
            window=window,
            scale=scale,
            ragged=ragged,
            packed=packed,
            device=q.device.type,
            capability=capability_of(q.device),
            dtype=str(q.dtype).removeprefix("torch."),
            needs_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.kv_heads != self.num_heads

    @property
    def needs_mask(self) -> bool:
        """Whether a kernel with nothing but a square causal switch would need a mask tensor."""
        if self.ragged or self.packed or self.window is not None:
            return True
        rows, keys = self.seqlen_q, self.seqlen_k
        return self.is_causal and rows is not None and keys is not None and 1 < rows < keys

    def __str__(self) -> str:
        """One line for messages: what is known, in words."""
        heads = f"{self.num_heads} heads" + (f" on {self.kv_heads}" if self.is_grouped else "")
        lengths = None
        if self.seqlen_q is not None and self.seqlen_k is not None:
            lengths = f"{self.seqlen_q} x {self.seqlen_k}"
        parts = [
            self.device,
            self.dtype,
            f"{heads} of {self.head_dim}",
            lengths,
            "causal" if self.is_causal else "not causal",
            self.window and f"window {self.window}",
            self.ragged and "ragged",
            self.packed and "packed",
            self.needs_grad and "with gradients",
            self.deterministic and "deterministic",
        ]
        return ", ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)
