"""The feed-forward layer, SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases.

    Args:
        d_model: Width of the input and the output.
        d_ff: Width in between.
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[..., d_model]`` to the same shape."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out
