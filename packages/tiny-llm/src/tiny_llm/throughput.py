"""How fast training is, against what the device could do.

Convention (PaLM, arXiv:2204.02311, appendix B): forward and backward together, a token costs 6
FLOPs per weight that multiplies it, and attention 12 * layers * width of all heads * seq_len more.
Neither the causal mask nor computing activations again is accounted for.  MFU is that, times tokens
per second, over the device's dense peak at the precision in use.  Of a device that is not in the
table the peak is unknown, and so is the MFU.
"""

import torch

from tiny_llm.config import ModelConfig

# dense peaks without sparsity, from the vendors' data sheets, in FLOP/s: bf16 (or fp16), fp32
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2.25e15, 7.5e13),
    "H200": (9.89e14, 6.7e13),
    "H100 PCIe": (7.56e14, 5.1e13),
    "H100": (9.89e14, 6.7e13),
    "A100": (3.12e14, 1.95e13),
    "L40S": (3.62e14, 9.16e13),
    "L4": (1.21e14, 3.03e13),
    "A10": (1.25e14, 3.12e13),
}


def flops_per_token(config: ModelConfig, num_parameters: int, seq_len: int) -> float:
    """Return the FLOPs of a training step per token.

    >>> toy = ModelConfig(vocab_size=10, d_model=4, num_layers=1, num_heads=1, d_ff=8)
    >>> flops_per_token(toy, num_parameters=200, seq_len=16)  # 6 * 200 + 12 * 1 * 4 * 16
    1968.0
    """
    # an embedding of its own is looked up, not multiplied
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    width = config.num_heads * config.head_dim
    attention = 12 * config.num_layers * width * seq_len
    return float(6 * (num_parameters - looked_up) + attention)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the device's dense peak in FLOP/s, or None if it is not known.

    >>> peak_flops("NVIDIA H200", "bf16")
    989000000000000.0
    >>> peak_flops("abacus", "bf16") is None
    True
    """
    words = f" {device_name.replace('-', ' ')} "
    for name, (half, single) in PEAKS.items():
        if f" {name} " in words:
            return single if precision == "fp32" else half
    return None


def device_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device, or None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def peak_memory(device: torch.device) -> int | None:
    """Return the most memory that tensors took on a GPU so far, in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
